//! How an end is told: in the words of Go's library, which is what clients compare with.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus};

use crate::process::message::End;

/// What to tell of an exit.
pub(super) fn end(exit: ExitStatus) -> End {
    let mut status = match (exit.code(), exit.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {}", signal_text(signal)),
        (None, None) => format!("wait status {}", exit.into_raw()),
    };
    if exit.core_dumped() {
        status.push_str(" (core dumped)");
    }
    End {
        exit_code: exit.code().unwrap_or(-1),
        exited: exit.code().is_some(),
        error: (!exit.success()).then(|| status.clone()),
        status,
    }
}

fn signal_text(signal: i32) -> String {
    let text = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        _ => return format!("signal {signal}"),
    };
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_told_in_gos_words() {
        for (raw, code, exited, status, failed) in [
            (0, 0, true, "exit status 0", false),
            (1 << 8, 1, true, "exit status 1", true),
            (255 << 8, 255, true, "exit status 255", true),
            (9, -1, false, "signal: killed", true),
            (15, -1, false, "signal: terminated", true),
            (11 | 0x80, -1, false, "signal: segmentation fault (core dumped)", true),
            (24, -1, false, "signal: signal 24", true),
        ] {
            let error = failed.then(|| status.to_owned());
            assert_eq!(
                end(ExitStatus::from_raw(raw)),
                End { exit_code: code, exited, status: status.into(), error },
                "{raw}"
            );
        }
    }
}
