//! External tools, run to their end.

use std::{
    ffi::OsStr,
    io,
    process::{Command, ExitStatus, Output, Stdio},
};

pub(crate) const MKFS_XFS: Tool = Tool { name: "mkfs.xfs", package: "xfsprogs" };
pub(crate) const MKFS_EXT4: Tool = Tool { name: "mkfs.ext4", package: "e2fsprogs" };
pub(crate) const RESIZE2FS: Tool = Tool { name: "resize2fs", package: "e2fsprogs" };
pub(crate) const LOSETUP: Tool = Tool { name: "losetup", package: "mount" };

/// Why a tool did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It is not installed.
    #[error("{tool} is not installed: apt-get install {package}")]
    Missing {
        /// Its name.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// It could not be started.
    #[error("{tool} could not be started")]
    Start {
        /// Its name.
        tool: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It ran and refused.
    #[error("{tool} failed ({status}): {stderr}")]
    Failed {
        /// Its name.
        tool: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it said.
        stderr: String,
    },
}

/// A tool and where it comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tool {
    name: &'static str,
    package: &'static str,
}

impl Tool {
    /// A tool that only tests use.
    #[cfg(test)]
    pub(crate) const fn for_tests(name: &'static str) -> Self {
        Self { name, package: name }
    }

    /// Runs it and returns what it printed.
    pub(crate) fn run<I, S>(self, args: I, env: &[(&str, &str)]) -> Result<String, ToolError>
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let args: Vec<S> = args.into_iter().collect();
        let Output { status, stdout, stderr } = self.output(&args, env)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
        Err(ToolError::Failed { tool: self.name, status, stderr })
    }

    /// By `PATH`, then where the distributions put tools of the administrator, which not every `PATH` names.
    fn output<S: AsRef<OsStr>>(self, args: &[S], env: &[(&str, &str)]) -> Result<Output, ToolError> {
        for program in [self.name.to_owned(), format!("/usr/sbin/{}", self.name), format!("/sbin/{}", self.name)] {
            let mut command = Command::new(program);
            command.args(args).env("LC_ALL", "C").envs(env.iter().copied()).stdin(Stdio::null());
            match command.output() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(ToolError::Start { tool: self.name, source }),
                Ok(output) => return Ok(output),
            }
        }
        Err(ToolError::Missing { tool: self.name, package: self.package })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_names_its_package() {
        let error = Tool { name: "mkfs.nothing", package: "nothing-utils" }.run([""; 0], &[]).unwrap_err();
        assert!(error.to_string().contains("apt-get install nothing-utils"), "{error}");
    }

    #[test]
    fn a_refusal_carries_what_was_said() {
        let error = LOSETUP.run(["--detach", "/dev/null"], &[]).unwrap_err();
        assert!(matches!(error, ToolError::Failed { ref stderr, .. } if stderr.contains("/dev/null")), "{error}");
    }
}
