//! The jail, from inside and outside: this program starts itself as a VMM process is started, enters the real jail, and tries what it must not.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how tests fail")]

#[allow(dead_code, reason = "tests/kvm uses the rest")]
#[path = "../kvm/guest.rs"]
mod guest;
mod inmate;
mod kept;
mod outside;
mod paged;
mod probes;
#[allow(dead_code, reason = "tests/kvm uses the rest")]
#[path = "../kvm/vmm.rs"]
mod vmm;

use libtest_mimic::{Arguments, Trial};

fn main() {
    let words: Vec<_> = std::env::args().collect();
    if let [_, first, order, uid] = &words[..]
        && first == inmate::WORD
    {
        probes::obey(order, uid.parse().unwrap());
    }
    let arguments = Arguments::from_args();
    let mut trials = probes::trials();
    trials.extend(outside::trials());
    trials.extend(paged::trials());
    trials.extend(kept::trials());
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: the jail's {} tests need root", trials.len());
        trials = trials.into_iter().map(|trial| trial.with_ignored_flag(true)).collect();
    } else {
        // For the jail to take away.
        nix::unistd::setgroups(&[4, 5].map(nix::unistd::Gid::from_raw)).unwrap();
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// A test that fails by panicking.
fn trial(name: impl Into<String>, run: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        run();
        Ok(())
    })
}
