//! Request bodies as they come in: none too slowly, and all together within a budget.
//!
//! A unary call is collected in memory until it is whole. Without a bound, a client that opens many calls and finishes none
//! would fill the memory; without a deadline it could hold what it has for ever.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::Status;

/// Bytes of unfinished requests in the whole process: fifty of the largest, which other limits let through slowly.
const MAX_UNFINISHED_BYTES: usize = 512 * 1024 * 1024;
/// Time a body has to begin and, beyond it, the least rate it must keep up. The largest request takes ten minutes at it.
const GRACE: Duration = Duration::from_secs(30);
const LEAST_BYTES_PER_SECOND: usize = 16 * 1024;

/// What all unfinished bodies of the process hold; cheap to clone.
#[derive(Clone, Default)]
pub struct Budget(Arc<AtomicUsize>);

/// A body that counts.
pub struct Counted<B> {
    inner: B,
    budget: Budget,
    /// Bytes that came so far, all of them taken from the budget.
    held: usize,
    /// Since when it has been waited for, and until when it will be.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<B> Counted<B> {
    pub fn new(inner: B, budget: &Budget) -> Self {
        Self { inner, budget: budget.clone(), held: 0, waiting: None }
    }

    fn hold(&mut self, bytes: usize) -> Result<(), Status> {
        self.held += bytes;
        let all = self.budget.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if all > MAX_UNFINISHED_BYTES {
            return Err(Status::resource_exhausted("The server is reading too many large requests. Please try again."));
        }
        Ok(())
    }

    /// Resolves when the body has been too slow.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        let allowed = GRACE + Duration::from_secs((self.held / LEAST_BYTES_PER_SECOND) as u64);
        let (since, sleep) = self.waiting.get_or_insert_with(|| {
            let now = Instant::now();
            (now, Box::pin(tokio::time::sleep_until(now + allowed)))
        });
        let until = *since + allowed;
        if sleep.deadline() != until {
            sleep.as_mut().reset(until);
        }
        sleep.as_mut().poll(cx).map(|()| Status::deadline_exceeded("The request did not arrive in time."))
    }
}

impl<B> Drop for Counted<B> {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.held, Ordering::Relaxed);
    }
}

impl<B> Body for Counted<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<tower::BoxError>,
{
    type Data = Bytes;
    type Error = tower::BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match Pin::new(&mut self.inner).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let counted = frame.data_ref().map_or(Ok(()), |data| self.hold(data.len()));
                Poll::Ready(Some(counted.map(|()| frame).map_err(Into::into)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error.into()))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => self.poll_late(cx).map(|status| Some(Err(status.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::{BodyExt, StreamBody};
    use tonic::Code;

    use super::*;

    /// A body of chunks of some size, one at a time.
    fn body(chunk_bytes: usize, every: Duration, chunks: usize) -> impl Body<Data = Bytes, Error = tower::BoxError> + Unpin {
        let chunk = move || Ok(Frame::data(Bytes::from(vec![0; chunk_bytes])));
        let chunks = stream::iter(0..chunks).then(move |_| async move {
            tokio::time::sleep(every).await;
            chunk()
        });
        Box::pin(StreamBody::new(chunks))
    }

    async fn read(body: impl Body<Data = Bytes, Error = tower::BoxError> + Unpin, budget: &Budget) -> Result<usize, Code> {
        let whole = Counted::new(body, budget).collect().await;
        whole.map(|body| body.to_bytes().len()).map_err(|error| error.downcast::<Status>().unwrap().code())
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_body_is_given_up_and_a_steady_one_is_not() {
        let budget = Budget::default();
        let began = Instant::now();
        assert_eq!(read(body(1, Duration::from_secs(1), 10_000), &budget).await, Err(Code::DeadlineExceeded));
        assert!(began.elapsed() <= GRACE + Duration::from_secs(1));
        assert_eq!(read(body(40 * 1024, Duration::from_secs(2), 200), &budget).await, Ok(200 * 40 * 1024));
        assert_eq!(budget.0.load(Ordering::Relaxed), 0, "what is read is given back");
    }

    #[tokio::test(start_paused = true)]
    async fn unfinished_bodies_share_a_budget() {
        let budget = Budget::default();
        let chunk = 64 * 1024 * 1024;
        let mut first = Counted::new(body(chunk, Duration::ZERO, 7), &budget);
        for _ in 0..7 {
            first.frame().await.unwrap().unwrap();
        }
        assert_eq!(read(body(chunk, Duration::ZERO, 2), &budget).await, Err(Code::ResourceExhausted));
        assert_eq!(read(body(chunk, Duration::ZERO, 1), &budget).await, Ok(chunk));
        drop(first);
        assert_eq!(read(body(chunk, Duration::ZERO, 2), &budget).await, Ok(2 * chunk));
    }
}
