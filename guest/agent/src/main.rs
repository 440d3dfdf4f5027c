//! `/sbin/stasis-agent`, started by the guest's kernel as PID 1.

use std::{io::Write, process::ExitCode};

use nix::{
    sys::reboot::{RebootMode, reboot},
    unistd::getpid,
};
use stasis_agent::{console, life};

const HELP: &str = "stasis-agent: PID 1 of a Stasis microVM; starts nothing anywhere else.
The kernel's command line names it: init=/sbin/stasis-agent
";

fn main() -> ExitCode {
    if std::env::args().nth(1).is_some_and(|argument| argument == "--help") {
        return match std::io::stdout().write_all(HELP.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    if getpid().as_raw() != 1 {
        eprint!("{HELP}");
        return ExitCode::from(2);
    }
    let error = life::live();
    console::say(format_args!("fatal: {}", console::chain(&error)));
    // With `reboot=t` or `reboot=k` on the kernel's command line the VMM sees this as a reset.
    let Err(errno) = reboot(RebootMode::RB_AUTOBOOT);
    console::say(format_args!("reboot: {errno}"));
    ExitCode::FAILURE
}
