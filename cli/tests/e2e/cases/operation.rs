//! What those who run a server look at; its series are in `metrics`.

use super::{Case, over_http};

pub(super) fn cases() -> Vec<Case> {
    vec![over_http("/healthz is well", |world| {
        assert_eq!(world.api.get("/healthz").success()["status"], "ok");
    })]
}
