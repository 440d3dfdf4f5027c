//! Request bodies that are read or made while they are sent.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    thread,
};

use anyhow::Context as _;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

const CHUNK: usize = 64 << 10;
/// Chunks between the thread that makes them and the connection.
const AHEAD: usize = 4;

/// A body of a known or an unknown length.
#[derive(Debug)]
pub(crate) struct Outgoing {
    chunks: Option<mpsc::Receiver<io::Result<Bytes>>>,
    whole: Bytes,
    length: Option<u64>,
}

impl Outgoing {
    pub(crate) fn empty() -> Self {
        Self::whole(Bytes::new())
    }

    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self { chunks: None, length: Some(bytes.len() as u64), whole: bytes }
    }

    /// Streams a file.
    pub(super) fn file(path: &Path) -> anyhow::Result<Self> {
        let opened = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        let meta = opened.metadata().with_context(|| format!("cannot read {}", path.display()))?;
        // A pipe or a device says nothing of its length.
        let length = meta.is_file().then_some(meta.len());
        Ok(Self::reader(opened.take(length.unwrap_or(u64::MAX)), length))
    }

    /// Streams the standard input.
    pub(super) fn stdin() -> Self {
        Self::reader(io::stdin(), None)
    }

    fn reader(mut source: impl Read + Send + 'static, length: Option<u64>) -> Self {
        Self::made(length, move |out| io::copy(&mut source, out).map(|_| ()))
    }

    /// Streams what `make` writes, from a thread of its own: the runtime would wait for a blocked read at its end.
    pub(super) fn made(
        length: Option<u64>,
        make: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
    ) -> Self {
        let (chunks, receiver) = mpsc::channel(AHEAD);
        thread::spawn(move || {
            let mut out = io::BufWriter::with_capacity(CHUNK, ChunkWriter(chunks.clone()));
            if let Err(error) = make(&mut out).and_then(|()| out.flush()) {
                let _ = chunks.blocking_send(Err(error));
            }
        });
        Self { chunks: Some(receiver), whole: Bytes::new(), length }
    }
}

struct ChunkWriter(mpsc::Sender<io::Result<Bytes>>);

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map(|()| bytes.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = &mut *self;
        match &mut this.chunks {
            Some(chunks) => chunks.poll_recv(cx).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data))),
            None if this.whole.is_empty() => Poll::Ready(None),
            None => Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.whole))))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.chunks.is_none() && self.whole.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
