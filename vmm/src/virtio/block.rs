//! virtio-blk over a file: read, write, flush, id.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
};
use virtio_queue::{DescriptorChain, QueueT, Reader, Writer};
use vm_memory::{ByteValued, Le32, Le64};

use super::{Device, DeviceState, Io, Outcome, pop};
use crate::{
    error::{Error, Host},
    memory::GuestMemory,
};

const DEVICE_ID: u32 = 2;
pub(crate) const QUEUES: usize = 1;
const SECTOR: u64 = 512;
/// Bytes moved at a time, so that a request costs no more memory than this however long it is.
const CHUNK: usize = 64 * 1024;
/// Longest request, in bytes. No driver makes one of this size in one piece; it would keep the event loop for too long.
const LONGEST: usize = 32 << 20;
/// What is served in one turn of the event loop.
const REQUESTS_PER_TURN: usize = 64;
const BYTES_PER_TURN: usize = 8 << 20;

/// A disk.
pub(crate) struct Block {
    file: File,
    sectors: u64,
    read_only: bool,
    config: [u8; 8],
    buffer: Vec<u8>,
}

/// The head of a request (virtio 1.2, section 5.2.6).
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Header {
    kind: Le32,
    reserved: Le32,
    sector: Le64,
}

// SAFETY: four and four and eight bytes without padding, and every bit pattern is a value.
unsafe impl ByteValued for Header {}

impl Block {
    /// A disk over `file`, whose size must be whole sectors.
    pub(crate) fn new(mut file: File, read_only: bool) -> Result<Self, Error> {
        let bytes = file.seek(SeekFrom::End(0)).host("size of a disk")?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
            return Err(Error::Refused("a disk's size must be a multiple of 512 bytes"));
        }
        let sectors = bytes / SECTOR;
        Ok(Self { file, sectors, read_only, config: sectors.to_le_bytes(), buffer: vec![0; CHUNK] })
    }

    /// Serves one request. Returns the bytes written to guest memory, and those read from it.
    fn serve(
        &mut self,
        memory: &GuestMemory,
        chain: DescriptorChain<&GuestMemory>,
    ) -> Result<(u32, usize), virtio_queue::Error> {
        let mut reader = chain.clone().reader(memory)?;
        let mut writer = chain.writer(memory)?;
        // The last writable byte is the status; without one there is nowhere to answer.
        let Some(data) = writer.available_bytes().checked_sub(1) else { return Ok((0, 0)) };
        let mut status = writer.split_at(data)?;
        let outcome = match reader.read_obj::<Header>() {
            Ok(header) => self.execute(header, &mut reader, &mut writer),
            Err(_) => Ok(VIRTIO_BLK_S_IOERR),
        };
        let code = outcome.unwrap_or_else(|error| {
            tracing::warn!(%error, "a disk request failed");
            VIRTIO_BLK_S_IOERR
        });
        let written = u32::try_from(writer.bytes_written() + 1).unwrap_or(u32::MAX);
        let code = [u8::try_from(code).unwrap_or(u8::MAX)];
        Ok((if status.write_all(&code).is_ok() { written } else { 0 }, reader.bytes_read()))
    }

    fn execute(&mut self, header: Header, from: &mut Reader<'_>, to: &mut Writer<'_>) -> io::Result<u32> {
        let sector = header.sector.to_native();
        match header.kind.to_native() {
            VIRTIO_BLK_T_IN => {
                let mut left = to.available_bytes();
                let Some(mut at) = self.place(sector, left) else { return Ok(VIRTIO_BLK_S_IOERR) };
                while left > 0 {
                    let chunk = &mut self.buffer[..left.min(CHUNK)];
                    self.file.read_exact_at(chunk, at)?;
                    to.write_all(chunk)?;
                    left -= chunk.len();
                    at += chunk.len() as u64;
                }
                Ok(VIRTIO_BLK_S_OK)
            }
            VIRTIO_BLK_T_OUT => {
                let mut left = from.available_bytes();
                let Some(mut at) = self.place(sector, left).filter(|_| !self.read_only) else {
                    return Ok(VIRTIO_BLK_S_IOERR);
                };
                while left > 0 {
                    let chunk = &mut self.buffer[..left.min(CHUNK)];
                    from.read_exact(chunk)?;
                    self.file.write_all_at(chunk, at)?;
                    left -= chunk.len();
                    at += chunk.len() as u64;
                }
                Ok(VIRTIO_BLK_S_OK)
            }
            VIRTIO_BLK_T_FLUSH => {
                if !self.read_only {
                    self.file.sync_data()?;
                }
                Ok(VIRTIO_BLK_S_OK)
            }
            VIRTIO_BLK_T_GET_ID => {
                let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
                id[..6].copy_from_slice(b"stasis");
                let length = to.available_bytes().min(id.len());
                to.write_all(&id[..length])?;
                Ok(VIRTIO_BLK_S_OK)
            }
            _ => Ok(VIRTIO_BLK_S_UNSUPP),
        }
    }

    /// The byte offset of a request that lies wholly on the disk and covers whole sectors.
    fn place(&self, sector: u64, length: usize) -> Option<u64> {
        if length > LONGEST {
            return None;
        }
        let length = length as u64;
        let end = sector.checked_add(length.div_ceil(SECTOR))?;
        (length.is_multiple_of(SECTOR) && end <= self.sectors).then(|| sector * SECTOR)
    }
}

impl Device for Block {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_BLK_F_FLUSH | u64::from(self.read_only) << VIRTIO_BLK_F_RO
    }

    fn queues(&self) -> usize {
        QUEUES
    }

    fn config(&self) -> &[u8] {
        &self.config
    }

    fn notified(&mut self, _: usize, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        let memory = io.memory;
        let queue = &mut io.queues[0];
        if !queue.ready() {
            return Ok(Outcome::default());
        }
        queue.disable_notification(memory)?;
        let (mut used, mut bytes) = (false, 0);
        let mut more = true;
        for _ in 0..REQUESTS_PER_TURN {
            if let Some(chain) = pop(queue, memory)? {
                let head = chain.head_index();
                let (written, read) = self.serve(memory, chain)?;
                queue.add_used(memory, head, written)?;
                used = true;
                bytes += written as usize + read;
            } else if !queue.enable_notification(memory)? {
                more = false;
                break;
            }
            if bytes >= BYTES_PER_TURN {
                break;
            }
        }
        Ok(Outcome { used: used && queue.needs_notification(memory)?, more })
    }

    fn reset(&mut self) {
        self.buffer.fill(0); // what one guest's requests moved is no other's
    }

    fn save(&self) -> Result<DeviceState, Error> {
        Ok(DeviceState::Block { sectors: self.sectors, read_only: self.read_only })
    }
}

#[cfg(test)]
mod tests;
