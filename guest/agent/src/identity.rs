//! The files that tell a guest who it is, made before the function starts so that a wake only writes into them.
//!
//! They are on a tmpfs and mounted over the places where programs look: `boot_nonce` over the kernel's `boot_id`,
//! `machine-id` over `/etc/machine-id`.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use nix::mount::{MsFlags, mount};

use crate::text::{Text, read_at_start};

/// Where the kernel shows its boot id, and after [`Identity::prepare`] the boot nonce.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MACHINE_ID: &str = "/etc/machine-id";
const RUN: &str = "/run/stasis";
const NONCE: &str = "/run/stasis/boot_nonce";

/// What could not be prepared.
#[derive(Debug, thiserror::Error)]
#[error("cannot prepare {what}")]
pub struct IdentityError {
    what: &'static str,
    #[source]
    source: io::Error,
}

/// The prepared files.
#[derive(Debug)]
pub struct Identity {
    /// Opened before it was covered.
    kernel_boot_id: File,
    boot_nonce: Text,
    machine_id: Text,
    /// Written as usual: programs may watch it, and nobody is told of what is written through a mapping.
    generation: File,
}

impl Identity {
    /// Makes and mounts the files. Until a wake they show what this boot is: the kernel's boot id, and a machine id
    /// made from it.
    ///
    /// # Errors
    /// Any of it failed.
    pub fn prepare() -> Result<Self, IdentityError> {
        let at = |what| move |source: io::Error| IdentityError { what, source };
        let kernel_boot_id = File::open(BOOT_ID).map_err(at(BOOT_ID))?;
        let boot_id = read_at_start(&kernel_boot_id).map_err(at(BOOT_ID))?;
        fs::create_dir_all(RUN).map_err(at(RUN))?;
        fs::set_permissions(RUN, Permissions::from_mode(0o755)).map_err(at(RUN))?;
        let boot_nonce = Text::create(NONCE, &boot_id).map_err(at(NONCE))?;
        let machine_id = Text::create("/run/stasis/machine-id", &boot_id.replace('-', "")).map_err(at(MACHINE_ID))?;
        let generation = create("/run/stasis/generation", "0").map_err(at("/run/stasis/generation"))?;
        // Something to mount over; an image made read-only may have it already.
        let _ = OpenOptions::new().create(true).append(true).mode(0o444).open(MACHINE_ID);
        cover("/run/stasis/machine-id", MACHINE_ID).map_err(at(MACHINE_ID))?;
        cover(NONCE, BOOT_ID).map_err(at(BOOT_ID))?;
        Ok(Self { kernel_boot_id, boot_nonce, machine_id, generation })
    }

    /// The kernel's own boot id.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn kernel_boot_id(&self) -> io::Result<String> {
        read_at_start(&self.kernel_boot_id)
    }

    /// Replaces the boot nonce; what programs now see.
    ///
    /// # Errors
    /// It cannot be written or read.
    pub fn set_boot_nonce(&self, nonce: &str) -> io::Result<String> {
        self.boot_nonce.replace(nonce, Path::new(BOOT_ID))
    }

    /// Replaces the machine id; what programs now see.
    ///
    /// # Errors
    /// It cannot be written or read.
    pub fn set_machine_id(&self, id: &str) -> io::Result<String> {
        self.machine_id.replace(id, Path::new(MACHINE_ID))
    }

    /// Replaces the generation.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn set_generation(&self, generation: u64) -> io::Result<()> {
        // Generations only grow, so nothing of a longer one can be left behind.
        self.generation.write_all_at(format!("{generation}\n").as_bytes(), 0)
    }
}

fn create(path: &str, text: &str) -> io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o444).open(path)?;
    file.set_permissions(Permissions::from_mode(0o444))?;
    file.write_all_at(format!("{text}\n").as_bytes(), 0)?;
    Ok(file)
}

fn cover(file: &str, target: &str) -> io::Result<()> {
    Ok(mount(Some(file), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_boot_id_reads_again_and_again() {
        let file = File::open(BOOT_ID).unwrap();
        let first = read_at_start(&file).unwrap();
        assert_eq!(first.len(), 36);
        assert_eq!(read_at_start(&file).unwrap(), first);
    }
}
