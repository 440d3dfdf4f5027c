//! A watch of a folder: inotify, and the folders below where that is asked.
//!
//! A folder that appears is watched as soon as its event is read, and what is in it by then is told as created: the kernel told nobody. What
//! it did tell after all, since it appeared between the two, is not told twice.

use std::{
    collections::{HashMap, HashSet},
    ffi::{CStr, OsStr},
    fs, io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init, remove_watch},
    io::Errno,
};

use crate::filesystem::message::Kind;

/// Most events that are read at once.
const BATCH: usize = 4096;

/// Something that happened: to what, relative to the folder, and what.
pub(super) type Change = (PathBuf, Kind);

/// Why a watch ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum WatchError {
    /// More happened than was read.
    #[error("watcher error: too much happened at once, events are lost: watch again")]
    Overflow,
    /// Watching failed.
    #[error("watcher error: {0}")]
    System(#[from] io::Error),
}

impl From<Errno> for WatchError {
    fn from(error: Errno) -> Self {
        Self::System(error.into())
    }
}

#[derive(Debug)]
pub(super) struct Watch {
    root: PathBuf,
    recursive: bool,
    /// Watched folders by descriptor, relative to the root.
    folders: HashMap<i32, PathBuf>,
    /// Told as created, though the kernel may yet do so: of what happened before we looked.
    told: HashSet<PathBuf>,
}

impl Watch {
    /// Of a folder, and those below. The descriptor is to be read by [`Watch::read`].
    pub(super) fn new(root: PathBuf, recursive: bool) -> io::Result<(Self, OwnedFd)> {
        let fd = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut watch = Self { root, recursive, folders: HashMap::new(), told: HashSet::new() };
        let own = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        let descriptor = add_watch(&fd, &watch.root, changes() | own)?;
        watch.folders.insert(descriptor, PathBuf::new());
        if recursive {
            watch.enter(&fd, Path::new(""), &mut |_| {});
            watch.told.clear();
        }
        Ok((watch, fd))
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// What has happened since; whether that is all.
    pub(super) fn read(&mut self, fd: &OwnedFd, changed: &mut impl FnMut(Change)) -> Result<bool, WatchError> {
        let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
        let mut reader = Reader::new(fd, &mut buffer);
        for _ in 0..BATCH {
            match reader.next() {
                Ok(event) => self.apply(fd, event.wd(), event.events(), event.file_name(), changed)?,
                Err(Errno::AGAIN) => {
                    // What the kernel tells from now on has happened after we looked.
                    self.told.clear();
                    return Ok(true);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // What is in the buffer is not the kernel's any more.
        while !reader.is_buffer_empty() {
            let event = reader.next()?;
            self.apply(fd, event.wd(), event.events(), event.file_name(), changed)?;
        }
        Ok(false)
    }

    fn apply(
        &mut self,
        fd: &OwnedFd,
        descriptor: i32,
        flags: ReadFlags,
        name: Option<&CStr>,
        changed: &mut impl FnMut(Change),
    ) -> Result<(), WatchError> {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return Err(WatchError::Overflow);
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.folders.remove(&descriptor);
            return Ok(());
        }
        let Some(folder) = self.folders.get(&descriptor) else { return Ok(()) };
        let Some(kind) = kind(flags) else { return Ok(()) };
        // About a folder below itself, the one above it tells.
        if name.is_none() && !folder.as_os_str().is_empty() {
            return Ok(());
        }
        let path = name.map_or_else(|| ".".into(), |name| folder.join(OsStr::from_bytes(name.to_bytes())));
        let again = match kind {
            Kind::Create => self.told.remove(&path),
            Kind::Remove | Kind::Rename => {
                self.told.remove(&path);
                false
            }
            Kind::Write | Kind::Chmod => false,
        };
        if !again {
            changed((path.clone(), kind));
        }
        if self.recursive && flags.contains(ReadFlags::ISDIR) && name.is_some() {
            match kind {
                Kind::Create => self.enter(fd, &path, changed),
                Kind::Rename => self.leave(fd, &path),
                Kind::Remove | Kind::Write | Kind::Chmod => {}
            }
        }
        Ok(())
    }

    /// Watches `path` and what is below, and tells what is there.
    fn enter(&mut self, fd: &OwnedFd, path: &Path, changed: &mut impl FnMut(Change)) {
        let mut waiting = vec![path.to_owned()];
        while let Some(path) = waiting.pop() {
            if !path.as_os_str().is_empty() {
                let flags = changes() | WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
                // What vanished meanwhile is not there; what may not be watched, or would be too many, is left out.
                let Ok(descriptor) = add_watch(fd, self.root.join(&path), flags) else { continue };
                self.folders.insert(descriptor, path.clone());
            }
            let Ok(entries) = fs::read_dir(self.root.join(&path)) else { continue };
            for entry in entries.flatten() {
                let below = path.join(entry.file_name());
                if self.told.insert(below.clone()) {
                    changed((below.clone(), Kind::Create));
                }
                if entry.file_type().is_ok_and(|file| file.is_dir()) {
                    waiting.push(below);
                }
            }
        }
    }

    /// Watches `path` and what was below no more.
    fn leave(&mut self, fd: &OwnedFd, path: &Path) {
        let gone: Vec<i32> = self
            .folders
            .iter()
            .filter(|(_, folder)| folder.starts_with(path))
            .map(|(descriptor, _)| *descriptor)
            .collect();
        for descriptor in gone {
            // One that was deleted is not watched already.
            let _ = remove_watch(fd, descriptor);
            self.folders.remove(&descriptor);
        }
        self.told.retain(|told| !told.starts_with(path));
    }
}

fn changes() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::DELETE
        | WatchFlags::MODIFY
        | WatchFlags::ATTRIB
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
}

fn kind(flags: ReadFlags) -> Option<Kind> {
    if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
        Some(Kind::Create)
    } else if flags.intersects(ReadFlags::DELETE | ReadFlags::DELETE_SELF) {
        Some(Kind::Remove)
    } else if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF) {
        Some(Kind::Rename)
    } else if flags.contains(ReadFlags::MODIFY) {
        Some(Kind::Write)
    } else if flags.contains(ReadFlags::ATTRIB) {
        Some(Kind::Chmod)
    } else {
        None
    }
}
