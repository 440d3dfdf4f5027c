//! The daemon by hand, on a host: `cargo run -p stasis-envd --example envd -- 127.0.0.1:49983 [DEFAULT_USER]`.

use anyhow::Context;
use stasis_envd::{Config, Door, Envd, serve};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().context("say where to listen: 127.0.0.1:49983")?;
    let mut config = Config::default();
    config.default_user = arguments.next().unwrap_or(config.default_user);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(address).await?;
        match serve(listener, Envd::new(config), Door::Public).await {}
    })
}
