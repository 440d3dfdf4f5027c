//! The whole way, for real: the binary, KVM, microVMs, and callers outside.
//!
//! Two lanes (`docs/ARCHITECTURE.md`). **Direct**: as root on a host with `/dev/kvm`; the suite starts its own `stasis up` with the
//! kernel and the bases that `STASIS_KERNEL` and `STASIS_BASES` name. **Rig**: `STASIS_E2E_URL` names a server that runs elsewhere;
//! what needs that server's host is skipped, and counted. `STASIS_BIN` names the binary, where it is not the one built beside this.

#[cfg(test)]
mod cases;
#[cfg(test)]
mod chance;
#[cfg(test)]
mod cli;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod groups;
#[cfg(test)]
mod host;
#[cfg(test)]
mod http;
#[cfg(test)]
mod lane;
#[cfg(test)]
mod ledger;
#[cfg(test)]
mod log;
#[cfg(test)]
mod server;
#[cfg(test)]
mod suite;
#[cfg(test)]
mod world;

#[cfg(test)]
fn main() -> std::process::ExitCode {
    suite::run()
}

#[cfg(not(test))]
fn main() {}
