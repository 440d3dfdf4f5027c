//! The bytes to and from the function.
//!
//! A function may answer and close before it has read the whole request. hyper would give up at the first write that fails and
//! lose the answer; so a failed write only makes the function deaf, and what it said decides.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use stasis_pool_api::GuestStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub(super) struct GuestIo {
    stream: Box<dyn GuestStream>,
    deaf: bool,
}

impl GuestIo {
    pub(super) fn new(stream: Box<dyn GuestStream>) -> Self {
        Self { stream, deaf: false }
    }

    fn swallow(&mut self, written: Poll<io::Result<usize>>, len: usize) -> Poll<io::Result<usize>> {
        match written {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(count)) if count > 0 || len == 0 => Poll::Ready(Ok(count)),
            Poll::Ready(_) => {
                self.deaf = true;
                Poll::Ready(Ok(len))
            }
        }
    }
}

impl AsyncRead for GuestIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for GuestIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(buf.len()));
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.swallow(written, buf.len())
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let len = bufs.iter().map(|buf| buf.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(len));
        }
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.swallow(written, len)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx).map(|_| Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx).map(|_| Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::Request;
    use http_body_util::{BodyExt as _, Full};
    use hyper::{body::Bytes, client::conn::http1};
    use hyper_util::rt::TokioIo;
    use tokio::{
        io::{AsyncWriteExt as _, DuplexStream},
        sync::watch,
    };

    use super::*;

    /// Does not listen, and tells so.
    struct NotListening {
        stream: DuplexStream,
        refused: watch::Sender<bool>,
    }

    impl AsyncRead for NotListening {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.stream).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for NotListening {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            self.refused.send_replace(true);
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn an_answer_outlives_the_function_s_ear() {
        let (refused, mut seen) = watch::channel(false);
        let (stream, mut function) = tokio::io::duplex(4096);
        let io = GuestIo::new(Box::new(NotListening { stream, refused }));
        let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await.unwrap();
        tokio::spawn(connection);
        tokio::spawn(async move {
            seen.wait_for(|refused| *refused).await.unwrap();
            function.write_all(b"HTTP/1.1 403 No\r\nContent-Length: 4\r\n\r\nnope").await.unwrap();
        });
        let request = Request::post("/").body(Full::new(Bytes::from(vec![0; 1 << 20]))).unwrap();
        let answer =
            tokio::time::timeout(Duration::from_secs(20), sender.send_request(request)).await.unwrap().unwrap();
        assert_eq!(answer.status(), 403);
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "nope");
    }
}
