//! Knowing what has left for the client.
//!
//! HTTP/2 asks a body for its next frame once the one before is at least partly covered by the client's flow-control
//! window. Here every frame is handed over in two parts, so the question comes only when all but the last few bytes are
//! covered. A message whose response got stuck before that never reached its client, and can be given back uncounted.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::{Status, body::Body};

use crate::connector::pull::Receipt;

/// Bytes of a frame's second part. Some HTTP/2 stacks take smaller frames for abuse.
const TAIL_BYTES: usize = 256;

/// Marks a response that [`track`] follows.
#[derive(Clone)]
pub(super) struct Tracking {
    receipt: Option<Arc<Receipt>>,
}

impl Tracking {
    /// One response; the receipt gives its messages back if it is not sent.
    pub fn unary(receipt: Receipt) -> Self {
        Self { receipt: Some(Arc::new(receipt)) }
    }

    /// A stream that follows its responses by itself.
    pub fn stream() -> Self {
        Self { receipt: None }
    }
}

/// Follows the bodies of Pull and StreamingPull responses on their way to the transport. To be applied to every response
/// of the Subscriber service, as close to the transport as possible.
pub fn track(mut response: http::Response<Body>) -> http::Response<Body> {
    let Some(tracking) = response.extensions_mut().remove::<Tracking>() else { return response };
    if let Some(receipt) = &tracking.receipt {
        receipt.arm();
    }
    response.map(|inner| Body::new(Tracked { inner, tail: Bytes::new(), receipt: tracking.receipt }))
}

struct Tracked {
    inner: Body,
    tail: Bytes,
    receipt: Option<Arc<Receipt>>,
}

impl Tracked {
    fn sent(&mut self) {
        if let Some(receipt) = self.receipt.take() {
            receipt.sent();
        }
    }
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.tail.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.tail)))));
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(Ok(match frame.into_data() {
                Ok(mut data) if data.len() >= 2 * TAIL_BYTES => {
                    self.tail = data.split_off(data.len() - TAIL_BYTES);
                    Frame::data(data)
                }
                Ok(data) => Frame::data(data),
                Err(trailers) => {
                    self.sent();
                    trailers
                }
            })),
            last => {
                self.sent();
                last
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.tail.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use http_body::Body as _;
    use http_body_util::{BodyExt, Full};

    use super::*;

    fn tracked(bytes: &[u8]) -> Tracked {
        let inner = Body::new(Full::new(Bytes::copy_from_slice(bytes)).map_err(|never| match never {}));
        Tracked { inner, tail: Bytes::new(), receipt: None }
    }

    #[tokio::test]
    async fn a_large_frame_is_handed_over_in_two_parts() {
        let bytes: Vec<u8> = (0..10_000u32).map(|at| at as u8).collect();
        let mut body = tracked(&bytes);
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert!(!body.is_end_stream());
        let second = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!((first.len(), second.len()), (10_000 - TAIL_BYTES, TAIL_BYTES));
        assert_eq!([first, second].concat(), bytes);
        assert!(body.is_end_stream());
        assert!(body.frame().await.is_none());
    }

    #[tokio::test]
    async fn a_small_frame_stays_whole() {
        let mut body = tracked(b"small");
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), &b"small"[..]);
        assert!(body.frame().await.is_none());
    }
}
