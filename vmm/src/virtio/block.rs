//! virtio-blk over a file: read, write, flush, discard, write zeroes, id; with a rate limit.

mod clear;

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::unix::fs::FileExt,
};

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::{DescriptorChain, QueueT, Reader, Writer};
use vm_memory::{ByteValued, Le32, Le64};

use self::clear::How;
use super::{Device, DeviceState, Io, Outcome, QUEUE_SIZE, pop, rate_limit::Limiter, waits};
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

/// Bytes of the configuration space, as far as it is used.
const CONFIG: usize = 57;
/// Buffers of a request's data; head and status take a descriptor each.
const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;

/// A disk.
pub(crate) struct Block {
    file: File,
    sectors: u64,
    read_only: bool,
    config: [u8; CONFIG],
    buffer: Vec<u8>,
    limiter: Option<Limiter>,
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
    pub(crate) fn new(mut file: File, read_only: bool, limiter: Option<Limiter>) -> Result<Self, Error> {
        let bytes = file.seek(SeekFrom::End(0)).host("size of a disk")?;
        if bytes == 0 || !bytes.is_multiple_of(SECTOR) {
            return Err(Error::Refused("a disk's size must be a multiple of 512 bytes"));
        }
        let sectors = bytes / SECTOR;
        let config = config(sectors, read_only);
        Ok(Self { file, sectors, read_only, config, buffer: vec![0; CHUNK], limiter })
    }

    /// Whether one more request may be served now.
    fn admits(&mut self) -> bool {
        self.limiter.as_mut().is_none_or(Limiter::admits)
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
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES if self.read_only => Ok(VIRTIO_BLK_S_IOERR),
            VIRTIO_BLK_T_DISCARD => clear::execute(&self.file, self.sectors, How::Discard, from),
            VIRTIO_BLK_T_WRITE_ZEROES => clear::execute(&self.file, self.sectors, How::Zero, from),
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

/// What the driver can read of a disk (virtio 1.2, section 5.2.4).
fn config(sectors: u64, read_only: bool) -> [u8; CONFIG] {
    let mut config = [0; CONFIG];
    config[..8].copy_from_slice(&sectors.to_le_bytes());
    config[12..16].copy_from_slice(&MAX_SEGMENTS.to_le_bytes());
    if !read_only {
        clear::configure(&mut config);
    }
    config
}

impl Device for Block {
    fn id(&self) -> u32 {
        DEVICE_ID
    }

    fn features(&self) -> u64 {
        let own = if self.read_only {
            1 << VIRTIO_BLK_F_RO
        } else {
            1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES
        };
        1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_SEG_MAX | own
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
            // Only a request that waits is held back: over an empty queue, the driver must tell of the next one.
            if waits(queue, memory)? && !self.admits() {
                more = false; // the timer comes back to it
                break;
            }
            if let Some(chain) = pop(queue, memory)? {
                let head = chain.head_index();
                let (written, read) = self.serve(memory, chain)?;
                queue.add_used(memory, head, written)?;
                used = true;
                let moved = written as usize + read;
                bytes += moved;
                if let Some(limiter) = &mut self.limiter {
                    limiter.charge(moved as u64);
                }
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

    fn source_ready(&mut self, _: u8, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        self.quiet();
        self.notified(0, io)
    }

    fn quiet(&mut self) {
        if let Some(limiter) = &self.limiter {
            limiter.disarm();
        }
    }

    /// Requests that the rate limit held back: the driver has told of them already.
    fn wake(&mut self, io: &mut Io<'_>) -> Result<Outcome, virtio_queue::Error> {
        Ok(Outcome { used: false, more: waits(&io.queues[0], io.memory)? })
    }

    fn reset(&mut self) {
        self.quiet();
        self.buffer.fill(0); // what one guest's requests moved is no other's
    }

    fn clone_disk(&self, to: &File) -> Result<bool, Error> {
        if !self.read_only {
            rustix::fs::ioctl_ficlone(to, &self.file)
                .host("FICLONE of a disk (its clone needs a file on the same volume, with reflink)")?;
        }
        Ok(!self.read_only)
    }

    fn save(&self) -> Result<DeviceState, Error> {
        Ok(DeviceState::Block { sectors: self.sectors, read_only: self.read_only })
    }
}

#[cfg(test)]
mod tests;
