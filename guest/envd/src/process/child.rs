//! The start of a child: its descriptors, its session, its user.

use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStrExt, process::CommandExt},
    },
    path::Path,
    process::{Command, Stdio},
};

use rustix::{
    process::{Gid, Uid, chdir, geteuid, ioctl_tiocsctty, setsid},
    pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
    thread::{set_thread_gid, set_thread_groups, set_thread_uid},
};
use tokio::process::Child;

use crate::{
    fd::{self, Fd},
    users::User,
};

/// What a child is born with.
#[derive(Debug)]
pub(super) struct Birth<'a> {
    pub(super) cmd: &'a str,
    pub(super) args: &'a [String],
    pub(super) envs: BTreeMap<String, String>,
    pub(super) cwd: &'a Path,
    pub(super) user: &'a User,
    pub(super) io: Wanted,
}

/// What it reads and writes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Wanted {
    /// Two outputs, and an input or `/dev/null`.
    Pipes { stdin: bool },
    /// A terminal of that many columns and rows.
    Pty { cols: u16, rows: u16 },
}

/// Our ends.
#[derive(Debug)]
pub(super) enum Io {
    Pipes { stdin: Option<Fd>, stdout: Fd, stderr: Fd },
    Pty(Fd),
}

/// Starts it.
///
/// # Errors
/// A descriptor, the fork or the program's start failed. The program is looked for in the child's own `PATH`.
pub(super) fn spawn(birth: &Birth<'_>) -> io::Result<(Child, Io)> {
    let mut command = Command::new(birth.cmd);
    command.args(birth.args).env_clear().envs(&birth.envs);
    let io = match birth.io {
        Wanted::Pipes { stdin } => pipes(&mut command, stdin)?,
        Wanted::Pty { cols, rows } => terminal(&mut command, cols, rows)?,
    };
    let cwd = CString::new(birth.cwd.as_os_str().as_bytes())?;
    let user = Identity::of(birth.user);
    let on_terminal = matches!(birth.io, Wanted::Pty { .. });
    let prepare = move || {
        setsid()?;
        if on_terminal {
            ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        if let Some(user) = &user {
            user.assume()?;
        }
        // As the user, who may not be allowed to.
        Ok(chdir(&cwd)?)
    };
    // SAFETY: between fork and exec a child of a process with threads may only do what is async-signal-safe. `prepare` makes system calls by
    // rustix, which issues them directly and takes no lock, on descriptors and memory that were made before the fork; it does not allocate:
    // its errors are numbers.
    unsafe { command.pre_exec(prepare) };
    Ok((tokio::process::Command::from(command).spawn()?, io))
}

/// Who a child becomes.
#[derive(Debug)]
struct Identity {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Identity {
    /// None where we may not become anybody else, which is in order if it is ourselves.
    fn of(user: &User) -> Option<Self> {
        if !geteuid().is_root() && user.uid == geteuid().as_raw() {
            return None;
        }
        Some(Self {
            uid: Uid::from_raw(user.uid),
            gid: Gid::from_raw(user.gid),
            groups: user.groups.iter().copied().map(Gid::from_raw).collect(),
        })
    }

    /// In the child, whose only thread this is.
    fn assume(&self) -> rustix::io::Result<()> {
        set_thread_groups(&self.groups)?;
        set_thread_gid(self.gid)?;
        set_thread_uid(self.uid)
    }
}

fn pipes(command: &mut Command, stdin: bool) -> io::Result<Io> {
    let (stdout, child_stdout) = io::pipe()?;
    let (stderr, child_stderr) = io::pipe()?;
    command.stdout(child_stdout).stderr(child_stderr);
    let stdin = if stdin {
        let (child_stdin, stdin) = io::pipe()?;
        command.stdin(child_stdin);
        Some(fd::take(stdin.into())?)
    } else {
        command.stdin(Stdio::null());
        None
    };
    Ok(Io::Pipes { stdin, stdout: fd::take(stdout.into())?, stderr: fd::take(stderr.into())? })
}

fn terminal(command: &mut Command, cols: u16, rows: u16) -> io::Result<Io> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    resize(&master, cols, rows)?;
    let child: OwnedFd = ioctl_tiocgptpeer(&master, flags)?;
    command.stdin(child.try_clone()?).stdout(child.try_clone()?).stderr(child);
    Ok(Io::Pty(fd::take(master)?))
}

/// Gives a terminal another size.
pub(super) fn resize(terminal: impl AsFd, cols: u16, rows: u16) -> io::Result<()> {
    Ok(tcsetwinsize(terminal, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })?)
}
