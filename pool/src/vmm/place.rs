//! Where a VM that outlives its node is found: a folder of root's alone, with the socket that its next owner comes to and what is written
//! down of it.
//!
//! ```text
//! NAME/socket     the VMM process listens here while it has no owner
//! NAME/vm.json    put there by a rename, so always whole
//! ```

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::DirBuilderExt,
    },
    path::{Path, PathBuf},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde::{Serialize, de::DeserializeOwned};
use tokio_seqpacket::{UnixSeqpacket, UnixSeqpacketListener};
use uuid::Uuid;

const SOCKET: &str = "socket";
const PAPERS: &str = "vm.json";
const NEW: &str = "vm.json.new";

/// A VM's folder. It is removed when the VM's process has ended.
#[derive(Debug, Clone)]
pub(crate) struct Place(PathBuf);

impl Place {
    /// A new one below `root`.
    pub(crate) fn make(root: &Path) -> io::Result<Self> {
        let folder = root.join(Uuid::new_v4().simple().to_string());
        DirBuilder::new().mode(0o700).create(&folder)?;
        Ok(Self(folder))
    }

    /// All below `root`.
    pub(crate) fn all(root: &Path) -> io::Result<Vec<Self>> {
        fs::read_dir(root)?.map(|entry| entry.map(|entry| Self(entry.path()))).collect()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes down what the next owner has to know.
    pub(crate) fn write(&self, papers: &impl Serialize) -> io::Result<()> {
        fs::write(self.0.join(NEW), serde_json::to_vec(papers)?)?;
        fs::rename(self.0.join(NEW), self.0.join(PAPERS))
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(serde_json::from_slice(&fs::read(self.0.join(PAPERS))?)?)
    }

    /// A socket for the VMM process to listen at.
    pub(crate) fn listen(&self) -> io::Result<OwnedFd> {
        let folder = File::open(&self.0)?;
        UnixSeqpacketListener::bind(short(&folder)).map(OwnedFd::from)
    }

    /// Comes to the VMM process, which need not have noticed yet.
    pub(crate) async fn connect(&self) -> io::Result<UnixSeqpacket> {
        let folder = File::open(&self.0)?;
        UnixSeqpacket::connect(short(&folder)).await
    }

    /// Whether a process listens there: as long as a kept VM's lives, it does.
    pub(crate) fn is_listened_at(&self) -> bool {
        let connected = || {
            let folder = File::open(&self.0)?;
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            let socket = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
            connect(socket.as_raw_fd(), &UnixAddr::new(&short(&folder))?).map_err(io::Error::from)
        };
        // Whose queue is full (EAGAIN) listens too.
        connected().map_or_else(|error: io::Error| error.kind() == io::ErrorKind::WouldBlock, |()| true)
    }

    pub(crate) fn remove(&self) {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(folder = %self.0.display(), %error, "the folder of a VM that has ended cannot be removed");
            }
            _ => {}
        }
    }
}

/// A socket's path has 108 bytes (unix(7)), and the data directory's may be longer: so it is named by the folder's descriptor.
fn short(folder: &File) -> PathBuf {
    format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_reached_however_long_its_path_is() {
        let root = tempfile::tempdir().unwrap();
        let deep = root.path().join("d".repeat(120));
        fs::create_dir(&deep).unwrap();
        let place = Place::make(&deep).unwrap();
        let mut listener = UnixSeqpacketListener::try_from(place.listen().unwrap()).unwrap();
        let near = place.connect().await.unwrap();
        near.send(b"hello").await.unwrap();
        let far = listener.accept().await.unwrap();
        let mut heard = [0; 8];
        assert_eq!(far.recv(&mut heard).await.unwrap().bytes_read(), 5);
        assert_eq!(Place::all(&deep).unwrap().len(), 1);
        assert!(place.is_listened_at());
        drop(listener);
        assert!(!place.is_listened_at());
        place.remove();
        place.remove();
        assert_eq!(Place::all(&deep).unwrap().len(), 0);
    }

    #[test]
    fn what_is_written_replaces_what_was() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::make(root.path()).unwrap();
        assert!(place.read::<u32>().is_err());
        place.write(&1).unwrap();
        place.write(&2).unwrap();
        assert_eq!(place.read::<u32>().unwrap(), 2);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
    }
}
