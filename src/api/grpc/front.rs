//! What surrounds every service: the answer to oversized requests, which compressions are understood, and the eye on
//! messages on their way to their client.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::{HeaderMap, HeaderValue, Request, Response};
use tonic::{body::Body, server::NamedService};
use tower::Service;

use super::delivery;
use crate::{api::status::to_status, connector::Error, model::limits::MAX_REQUEST_BYTES};

const ACCEPT_ENCODING: &str = "grpc-accept-encoding";
const ENCODINGS: HeaderValue = HeaderValue::from_static("identity,deflate,gzip");
/// How tonic begins its refusals of a request that is too large as it is, or once it is decompressed, percent-encoded as on
/// the wire. A test in this file fails when tonic changes them.
const TOO_LARGE: &str = "Error,%20decoded%20message%20length%20too%20large";
const TOO_LARGE_DECOMPRESSED: &str = "Error%20decompressing:%20size%20limit";

/// A service whose refusals of oversized requests read as the API's clients expect: INVALID_ARGUMENT, with the limit. The
/// size is known from the first bytes, so that an oversized request is refused before it is read.
#[derive(Debug, Clone)]
pub struct Front<S> {
    service: S,
}

impl<S> Front<S> {
    pub fn new(service: S) -> Self {
        Self { service }
    }
}

impl<S: NamedService> NamedService for Front<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<Request<B>> for Front<S>
where
    S: Service<Request<B>, Response = Response<Body>>,
    S::Future: Unpin,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = FrontFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        FrontFuture { inner: self.service.call(request) }
    }
}

/// The answer of the service inside, adjusted.
pub struct FrontFuture<F> {
    inner: F,
}

impl<F, E> Future for FrontFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>> + Unpin,
{
    type Output = Result<Response<Body>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut response = delivery::track(ready!(Pin::new(&mut self.inner).poll(cx))?);
        if is_too_large(response.headers()) {
            response = to_status(Error::PayloadTooLarge(MAX_REQUEST_BYTES)).into_http();
        }
        response.headers_mut().insert(ACCEPT_ENCODING, ENCODINGS);
        Poll::Ready(Ok(response))
    }
}

fn is_too_large(headers: &HeaderMap) -> bool {
    headers.get("grpc-message").is_some_and(|text| {
        text.as_bytes().starts_with(TOO_LARGE.as_bytes()) || text.as_bytes().starts_with(TOO_LARGE_DECOMPRESSED.as_bytes())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message;
    use tonic::{Code, codec::CompressionEncoding};

    use super::*;
    use crate::{
        api::{
            grpc,
            proto::{
                pubsub::{PublishRequest, Topic, publisher_client::PublisherClient, publisher_server::PublisherServer},
                rpc,
            },
        },
        auth::Guard,
        broker::embedded::Embedded,
        connector::{Connector, Options},
        model::EncodedMessage,
    };

    const TOPIC: &str = "projects/p1/topics/t11";

    /// A client whose requests go straight into the service.
    async fn client() -> PublisherClient<Front<PublisherServer<grpc::PublisherService>>> {
        let connector = Connector::open(Embedded::memory(), Options::default()).await.unwrap();
        let mut client =
            PublisherClient::new(grpc::publisher(Arc::clone(&connector), grpc::Gate::new(Guard::off(connector).unwrap())));
        client.create_topic(Topic { name: TOPIC.into(), ..Topic::default() }).await.unwrap();
        client
    }

    /// A publish request of exactly this many encoded bytes, all of it one letter.
    fn request(encoded_bytes: usize) -> PublishRequest {
        let of = |data: usize| PublishRequest {
            topic: TOPIC.into(),
            messages: vec![EncodedMessage::encode(&vec![b'x'; data], [], "").wire().clone()],
        };
        let overhead = of(encoded_bytes).encoded_len() - encoded_bytes;
        let request = of(encoded_bytes - overhead);
        assert_eq!(request.encoded_len(), encoded_bytes);
        request
    }

    #[tokio::test]
    async fn request_sizes_are_judged_precisely_whatever_they_are() {
        let mut client = client().await;
        assert_eq!(client.publish(request(10_000_000)).await.unwrap().get_ref().message_ids.len(), 1);
        for (bytes, expected) in [
            (10_000_001, "The value for request_size is too large. You passed 10000001 in the request"),
            (10_485_760, "The value for request_size is too large. You passed 10485760 in the request"),
            (10_485_761, "Request payload size exceeds the limit: 10485760 bytes."),
            (30_000_000, "Request payload size exceeds the limit: 10485760 bytes."),
        ] {
            let status = client.publish(request(bytes)).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
            assert!(status.message().starts_with(expected), "{status}");
            assert_eq!(rpc::Status::decode(status.details()).unwrap().message, status.message());
        }
    }

    #[tokio::test]
    async fn compressed_requests_are_understood_and_bounded_by_what_they_become() {
        for encoding in [CompressionEncoding::Gzip, CompressionEncoding::Deflate] {
            let mut client = client().await.send_compressed(encoding).accept_compressed(encoding);
            let response = client.publish(request(1_000_000)).await.unwrap();
            assert_eq!(response.metadata().get("grpc-accept-encoding").unwrap(), "identity,deflate,gzip");
            let status = client.publish(request(10_485_761)).await.unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
            assert_eq!(status.message(), "Request payload size exceeds the limit: 10485760 bytes.");
        }
    }
}
