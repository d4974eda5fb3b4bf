//! Fewer and larger system calls under HTTP.
//!
//! HTTP/2 reads about 8 KiB at a time and asks for a write after every frame of 16 KiB; under load those system calls
//! cost more than everything else. [`Coalesce`] stands between the protocol and the socket: it reads ahead, and it
//! collects writes until the connection's task has done all it can. Then the task itself calls [`Flusher::poll_drain`].
//! So nothing waits for a timer: a lone answer leaves at the end of the turn that made it.
//!
//! Buffers belong to the thread. A connection holds one only while there is something in it, so idle connections hold
//! none, and a peer that does not read costs one.

use std::{
    cell::RefCell,
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::io::poll_read_buf;

/// Bytes read ahead, and bytes collected before a write goes out. Larger ones gained nothing when measured; half of it
/// cost a third more processor time for deliveries of 1 KiB messages.
pub const BUFFER_BYTES: usize = 128 * 1024;

/// Unused buffers a thread keeps. One serves all connections that are not stalled; the rest smooth out bursts.
const SPARE_BUFFERS: usize = 4;

/// Slices of one vectored write: what is buffered, and the pieces of an HTTP/2 frame or an HTTP/1 answer.
const MAX_SLICES: usize = 16;

/// What an HTTP/2 client sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Takes an empty buffer of [`BUFFER_BYTES`].
fn take_buffer() -> Vec<u8> {
    SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(BUFFER_BYTES))
}

/// Gives a buffer back, which leaves the place empty.
fn give_buffer(place: &mut Vec<u8>) {
    let mut buffer = std::mem::take(place);
    if buffer.capacity() >= BUFFER_BYTES {
        buffer.clear();
        SPARE.with_borrow_mut(|spare| {
            if spare.len() < SPARE_BUFFERS {
                spare.push(buffer);
            }
        });
    }
}

/// The protocol a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Http1,
    Http2,
}

/// The protocol's end: what it reads is read ahead, what it writes is collected.
pub struct Coalesce<S> {
    shared: Arc<Mutex<Shared<S>>>,
}

/// The task's end, which writes out what was collected.
pub struct Flusher<S> {
    shared: Arc<Mutex<Shared<S>>>,
}

struct Shared<S> {
    stream: S,
    ahead: Vec<u8>,
    ahead_at: usize,
    collected: Vec<u8>,
    /// Bytes of `collected` that the stream has taken.
    sent: usize,
    /// The stream has taken bytes since it was flushed.
    dirty: bool,
}

/// Splits a stream into both ends.
pub fn coalesce<S>(stream: S) -> (Coalesce<S>, Flusher<S>) {
    let shared = Shared { stream, ahead: Vec::new(), ahead_at: 0, collected: Vec::new(), sent: 0, dirty: false };
    let shared = Arc::new(Mutex::new(shared));
    (Coalesce { shared: shared.clone() }, Flusher { shared })
}

impl<S: AsyncRead + Unpin> Coalesce<S> {
    /// Looks at the first bytes, which stay to be read.
    ///
    /// # Errors
    /// `UnexpectedEof` when the client goes without a word.
    pub async fn protocol(&self) -> io::Result<Protocol> {
        std::future::poll_fn(|cx| self.shared.lock().poll_protocol(cx)).await
    }
}

impl<S: AsyncRead + Unpin> Shared<S> {
    fn poll_protocol(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Protocol>> {
        loop {
            let seen = self.ahead.len().min(PREFACE.len());
            if self.ahead[..seen] != PREFACE[..seen] {
                return Poll::Ready(Ok(Protocol::Http1));
            }
            if seen == PREFACE.len() {
                return Poll::Ready(Ok(Protocol::Http2));
            }
            if ready!(self.poll_fill(cx))? == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Reads into the buffer behind what it holds. Leaves no buffer behind when it holds nothing.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.ahead.capacity() == 0 {
            self.ahead = take_buffer();
        }
        let read = poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.ahead);
        if self.ahead.is_empty() {
            give_buffer(&mut self.ahead);
        }
        read
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            if into.remaining() >= BUFFER_BYTES {
                // A large frame: the caller's own buffer saves a copy.
                return Pin::new(&mut self.stream).poll_read(cx, into);
            }
            if ready!(self.poll_fill(cx))? == 0 {
                return Poll::Ready(Ok(()));
            }
        }
        let rest = &self.ahead[self.ahead_at..];
        let count = rest.len().min(into.remaining());
        into.put_slice(&rest[..count]);
        self.ahead_at += count;
        if self.ahead_at == self.ahead.len() {
            self.ahead_at = 0;
            give_buffer(&mut self.ahead);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> Shared<S> {
    fn poll_write(&mut self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let incoming: usize = pieces.iter().map(|piece| piece.len()).sum();
        loop {
            let waiting = self.collected.len() - self.sent;
            if waiting + incoming <= BUFFER_BYTES {
                self.collect(pieces, incoming);
                return Poll::Ready(Ok(incoming));
            }
            // Too much to collect: what waits goes out now, and as much of the new as the stream takes, uncopied.
            let taken = ready!(self.poll_send(cx, pieces))?;
            if taken > 0 {
                return Poll::Ready(Ok(taken));
            }
        }
    }

    fn collect(&mut self, pieces: &[IoSlice<'_>], incoming: usize) {
        if incoming == 0 {
            return;
        }
        if self.collected.capacity() == 0 {
            self.collected = take_buffer();
        }
        if self.collected.len() + incoming > BUFFER_BYTES {
            self.collected.drain(..self.sent);
            self.sent = 0;
        }
        for piece in pieces {
            self.collected.extend_from_slice(piece);
        }
    }

    /// Writes once, what waits first and then the pieces; answers how much of the pieces went out.
    fn poll_send(&mut self, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let waiting = self.collected.len() - self.sent;
        let mut slices = [IoSlice::new(&[]); MAX_SLICES];
        slices[0] = IoSlice::new(&self.collected[self.sent..]);
        let mut count = usize::from(waiting > 0);
        for piece in pieces.iter().filter(|piece| !piece.is_empty()).take(MAX_SLICES - 1) {
            slices[count] = IoSlice::new(piece);
            count += 1;
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, &slices[..count]))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.dirty = true;
        if written < waiting {
            self.sent += written;
            return Poll::Ready(Ok(0));
        }
        self.sent = 0;
        give_buffer(&mut self.collected);
        Poll::Ready(Ok(written - waiting))
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.collected.is_empty() {
            ready!(self.poll_send(cx, &[]))?;
        }
        if self.dirty {
            ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
            self.dirty = false;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> Flusher<S> {
    /// Writes out everything collected. `Pending` when the peer does not read; the task is woken when it does.
    ///
    /// # Errors
    /// The stream's.
    pub fn poll_drain(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shared.lock().poll_drain(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Coalesce<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.shared.lock().poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Coalesce<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.shared.lock().poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.shared.lock().poll_write(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: the task drains at the end of its turn.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.shared.lock();
        ready!(shared.poll_drain(cx))?;
        Pin::new(&mut shared.stream).poll_shutdown(cx)
    }
}

impl<S> Drop for Shared<S> {
    fn drop(&mut self) {
        give_buffer(&mut self.ahead);
        give_buffer(&mut self.collected);
    }
}

#[cfg(test)]
mod tests;
