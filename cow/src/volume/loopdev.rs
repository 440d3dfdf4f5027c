//! Loop devices of one file: changed by `losetup`, looked up in sysfs, because whoever opens a device keeps it from being detached.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::tool::{LOSETUP, ToolError};

use super::{VolumeError, uevent::Uevents};

const SYSFS: &str = "/sys/block";

/// Devices that have the file of this canonical path below them.
pub(super) fn attached(file: &Path) -> Result<Vec<PathBuf>, VolumeError> {
    list(file).map_err(VolumeError::io("list", Path::new(SYSFS)))
}

/// Waits until no device has the file below it. That is at once, but for programs which look at the device just now: a detached
/// device stays until the last one has closed it. Returns what is left.
pub(super) fn wait_until_detached(file: &Path, limit: Duration) -> Result<Vec<PathBuf>, VolumeError> {
    let devices = attached(file)?;
    if devices.is_empty() {
        return Ok(devices);
    }
    let waited = Uevents::listen().and_then(|uevents| uevents.wait_until(limit, || Ok(list(file)?.is_empty())));
    waited.map_err(VolumeError::io("wait for loop devices of", file))?;
    attached(file)
}

fn list(file: &Path) -> io::Result<Vec<PathBuf>> {
    let mut devices = Vec::new();
    for entry in fs::read_dir(SYSFS)? {
        let name = entry?.file_name();
        if backing_file(&name).is_some_and(|path| path == file) {
            devices.push(Path::new("/dev").join(name));
        }
    }
    Ok(devices)
}

/// The same, by the file's inode, which it has under every mount and name. For explanations only: it opens every device.
pub(super) fn attached_by_inode(file: &Path) -> Result<Vec<PathBuf>, ToolError> {
    let args = ["--noheadings", "--output", "NAME", "--associated"].map(OsStr::new);
    let listed = LOSETUP.run(args.into_iter().chain([file.as_os_str()]), &[])?;
    Ok(listed.lines().map(str::trim).filter(|line| !line.is_empty()).map(PathBuf::from).collect())
}

/// `major:minor`, as mountinfo has it.
pub(super) fn number(device: &Path) -> Result<String, VolumeError> {
    let path = in_sysfs(device).join("dev");
    let number = fs::read_to_string(&path).map_err(VolumeError::io("read", &path))?;
    Ok(number.trim().to_owned())
}

/// Attaches `file` to a free device: with direct I/O, so that its pages are not cached twice, or else without.
pub(super) fn attach(file: &Path) -> Result<PathBuf, ToolError> {
    let attach = |args: &[&'static str]| {
        let args = args.iter().map(OsStr::new).chain([file.as_os_str()]);
        LOSETUP.run(args, &[]).map(|printed| PathBuf::from(printed.trim()))
    };
    let direct = attach(&["--find", "--show", "--direct-io=on"]);
    let device = match direct {
        Err(ToolError::Failed { stderr, .. }) => {
            tracing::debug!(file = %file.display(), stderr, "direct I/O was refused");
            attach(&["--find", "--show"])?
        }
        other => other?,
    };
    if !has_direct_io(&device) {
        tracing::warn!(
            file = %file.display(), device = %device.display(),
            "no direct I/O on the file system below: the image's pages are cached twice"
        );
    }
    Ok(device)
}

/// Detaches every device of `file`: at once where it is not mounted, else when it is unmounted. True if there was one.
pub(super) fn detach_all(file: &Path) -> Result<bool, VolumeError> {
    let devices = attached(file)?;
    devices.iter().try_for_each(|device| detach(device))?;
    Ok(!devices.is_empty())
}

/// Detaches one device: at once where it is not mounted, else when it is unmounted.
pub(super) fn detach(device: &Path) -> Result<(), ToolError> {
    LOSETUP.run([OsStr::new("--detach"), device.as_os_str()], &[]).map(drop)
}

fn has_direct_io(device: &Path) -> bool {
    fs::read_to_string(in_sysfs(device).join("loop/dio")).is_ok_and(|value| value.trim() == "1")
}

fn in_sysfs(device: &Path) -> PathBuf {
    Path::new(SYSFS).join(device.file_name().unwrap_or_default())
}

/// None where this is no loop device, or a free one.
fn backing_file(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new(SYSFS).join(name).join("loop/backing_file");
    let mut line = fs::read(path).ok()?;
    line.pop_if(|byte| *byte == b'\n');
    Some(PathBuf::from(OsString::from_vec(line)))
}
