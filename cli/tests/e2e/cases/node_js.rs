//! Another language.

use super::{Case, over_http};
use crate::world::World;

pub(super) fn cases() -> Vec<Case> {
    vec![over_http("a Node.js function draws other numbers in every VM", |world: &World| {
        world.build_sample("hello-node");
        let [one, other] = [(); 2].map(|()| world.api.get("/invoke/hello-node/").success());
        assert_eq!(one["hello"], "world");
        assert!(one["runtime"].as_str().unwrap().starts_with('v'));
        assert_ne!(one["random"], other["random"], "Math.random");
        assert_ne!(one["uuid"], other["uuid"], "crypto.randomUUID");
    })]
}
