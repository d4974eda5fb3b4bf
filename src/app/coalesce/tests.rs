#![allow(clippy::unwrap_used)]

use std::future::poll_fn;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

use super::*;

fn held<S>(shared: &Arc<Mutex<Shared<S>>>) -> (usize, usize) {
    let shared = shared.lock();
    (shared.ahead.capacity(), shared.collected.capacity())
}

async fn drain(flusher: &Flusher<DuplexStream>) {
    poll_fn(|cx| flusher.poll_drain(cx)).await.unwrap();
}

/// Polls a future once.
macro_rules! poll_once {
    ($future:expr) => {
        poll_fn(|cx| Poll::Ready(std::pin::pin!($future).poll(cx))).await
    };
}

#[tokio::test]
async fn writes_are_collected_until_the_drain_and_arrive_in_order() {
    let (near, mut far) = duplex(1 << 20);
    let (mut io, flusher) = coalesce(near);
    for part in ["one ", "two ", "three"] {
        io.write_all(part.as_bytes()).await.unwrap();
        io.flush().await.unwrap();
    }
    let mut into = [0; 64];
    assert!(poll_once!(far.read(&mut into)).is_pending(), "nothing leaves before the drain");
    drain(&flusher).await;
    let count = far.read(&mut into).await.unwrap();
    assert_eq!(&into[..count], b"one two three");
}

#[tokio::test]
async fn a_peer_that_does_not_read_holds_writers_back_at_the_cap() {
    let (near, mut far) = duplex(1024);
    let (mut io, flusher) = coalesce(near);
    let chunk = vec![7u8; 16 * 1024];
    let mut accepted = 0;
    while let Poll::Ready(count) = poll_once!(io.write(&chunk)) {
        accepted += count.unwrap();
        assert!(accepted <= BUFFER_BYTES + 1024, "no more than the buffer and what the pipe takes");
    }
    assert!(accepted >= BUFFER_BYTES - chunk.len());
    assert_eq!(held(&io.shared), (0, BUFFER_BYTES));

    // The peer reads on: everything accepted arrives, and then the writer goes on.
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        far.read_to_end(&mut all).await.unwrap();
        all
    });
    drain(&flusher).await;
    io.write_all(b"end").await.unwrap();
    io.shutdown().await.unwrap();
    drop((io, flusher));
    let all = reader.await.unwrap();
    assert_eq!(all.len(), accepted + 3);
    assert!(all.ends_with(b"\x07end"));
}

#[tokio::test]
async fn a_large_write_goes_out_behind_what_was_collected() {
    let (near, mut far) = duplex(1 << 20);
    let (mut io, flusher) = coalesce(near);
    io.write_all(b"head").await.unwrap();
    let large = vec![b'x'; 3 * BUFFER_BYTES];
    io.write_all(&large).await.unwrap();
    io.write_all(b"tail").await.unwrap();
    drain(&flusher).await;
    let mut all = vec![0; large.len() + 8];
    far.read_exact(&mut all).await.unwrap();
    assert!(all.starts_with(b"headx") && all.ends_with(b"xtail"));
}

#[tokio::test]
async fn the_shutdown_writes_out_what_is_left() {
    let (near, mut far) = duplex(16);
    let (mut io, _flusher) = coalesce(near);
    io.write_all(&[b'z'; 1000]).await.unwrap();
    let reader = tokio::spawn(async move {
        let mut all = Vec::new();
        far.read_to_end(&mut all).await.unwrap();
        all.len()
    });
    io.shutdown().await.unwrap();
    assert_eq!(reader.await.unwrap(), 1000);
}

#[tokio::test]
async fn an_idle_connection_holds_no_buffer() {
    let (near, mut far) = duplex(1 << 20);
    let (mut io, flusher) = coalesce(near);
    let mut into = [0; 3];
    assert!(poll_once!(io.read(&mut into)).is_pending());
    assert_eq!(held(&io.shared), (0, 0), "waiting for the first byte");

    far.write_all(b"abcdef").await.unwrap();
    io.read_exact(&mut into).await.unwrap();
    assert_eq!((&into, held(&io.shared).0), (b"abc", BUFFER_BYTES), "the rest was read ahead");
    io.read_exact(&mut into).await.unwrap();
    assert_eq!(&into, b"def");
    io.write_all(b"answer").await.unwrap();
    assert_eq!(held(&io.shared), (0, BUFFER_BYTES));
    drain(&flusher).await;
    assert_eq!(held(&io.shared), (0, 0));
}

#[tokio::test]
async fn the_end_of_the_stream_is_seen_after_what_was_read_ahead() {
    let (near, mut far) = duplex(64);
    let (mut io, _flusher) = coalesce(near);
    far.write_all(b"last words").await.unwrap();
    drop(far);
    let mut all = Vec::new();
    io.read_to_end(&mut all).await.unwrap();
    assert_eq!(all, b"last words");
}

#[tokio::test]
async fn the_preface_tells_the_protocols_apart_however_it_is_cut() {
    for (pieces, protocol) in [
        (vec![&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"frames"], Protocol::Http2),
        (vec![b"PRI * HT", b"TP/2.0\r\n\r\nSM", b"\r\n\r\n"], Protocol::Http2),
        (vec![b"GET / HTTP/1.1\r\n"], Protocol::Http1),
        (vec![b"P", b"UT /v1/x HTTP/1.1\r\n"], Protocol::Http1),
        (vec![b"PRI * HTTP/1.1\r\n"], Protocol::Http1),
    ] {
        let (near, mut far) = duplex(1024);
        let (mut io, _flusher) = coalesce(near);
        let whole = pieces.concat();
        let writer = tokio::spawn(async move {
            for piece in pieces {
                far.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        assert_eq!(io.protocol().await.unwrap(), protocol);
        let mut all = Vec::new();
        io.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, whole, "the bytes looked at are still read");
        writer.await.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_goes_without_a_word_is_an_error() {
    let (near, far) = duplex(64);
    drop(far);
    let (io, _flusher) = coalesce(near);
    assert_eq!(io.protocol().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}
