//! `landline floor`: this server's transport with nothing behind it, for [`crate::bench`] to measure the rest against.
//!
//! Publish answers with ids, and what is published goes straight into the open streams of the topic's subscriptions.
//! Nothing is kept, checked, leased or limited. Every other call is answered with an empty message.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{Request, Response};
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_stream::{StreamExt, wrappers::UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body, codegen::BoxFuture, server::NamedService};
use tower::{Service, service_fn};

use super::{
    Error, Serving,
    connection::Server,
    dispatch::{Dispatch, Services},
    listen, methods,
    security::Security,
    signals::Signals,
};
use crate::{
    admin::Requests,
    api::{
        codec::Codec,
        proto::pubsub::{
            PublishRequest, PublishResponse, ReceivedMessage, StreamingPullRequest, StreamingPullResponse, Subscription,
        },
    },
    model::limits::MAX_REQUEST_BYTES,
    settings::Settings,
};

/// As long as those of a real server.
const ACK_ID: &str = "floor-floor-floor-floor-floor-floor-floor-floor-floor-floor-floor-floor-floor-floor";

/// Serves until a signal comes.
///
/// # Errors
/// Whatever keeps it from serving.
pub fn serve(settings: &Settings) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    runtime.block_on(run(settings))
}

async fn run(settings: &Settings) -> Result<(), Error> {
    let mut signals = Signals::new().map_err(Error::System)?;
    let listeners = listen::open(settings)?;
    let relay = Arc::new(Relay::default());
    let services = Services::default().with(Floor::<false>(relay.clone())).with(Floor::<true>(relay));
    let authenticator = Security::open(settings)?.authenticator;
    let dispatch = Dispatch::new(services, authenticator, Requests::new(methods()?), &[], false)
        .map_err(|e| Error::Descriptors(e.to_string()))?;
    let drain = CancellationToken::new();
    let server = Server::new(settings, None, dispatch, drain.clone());
    let _serving = Serving::start(settings, listeners, &server, drain).map_err(Error::System)?;
    signals.next().await;
    Ok(())
}

/// Who listens to what.
#[derive(Default)]
struct Relay {
    published: AtomicU64,
    /// Subscriptions of each topic.
    topics: Mutex<HashMap<String, Vec<Arc<Listeners>>>>,
    subscriptions: Mutex<HashMap<String, Arc<Listeners>>>,
}

/// The open streams of a subscription; a closed one is noticed when something is sent to it.
#[derive(Default)]
struct Listeners(Mutex<Vec<UnboundedSender<Vec<Bytes>>>>);

impl Relay {
    fn publish(&self, request: PublishRequest) -> PublishResponse {
        let count = request.messages.len() as u64;
        let first = self.published.fetch_add(count, Ordering::Relaxed);
        for listeners in self.topics.lock().get(&request.topic).into_iter().flatten() {
            let mut streams = listeners.0.lock();
            while let Some(stream) = streams.first()
                && stream.send(request.messages.clone()).is_err()
            {
                streams.remove(0);
            }
        }
        PublishResponse { message_ids: (first..first + count).map(|id| id.to_string()).collect() }
    }

    fn subscribe(&self, subscription: Subscription) -> Subscription {
        let listeners = Arc::new(Listeners::default());
        self.topics.lock().entry(subscription.topic.clone()).or_default().push(listeners.clone());
        self.subscriptions.lock().insert(subscription.name.clone(), listeners);
        subscription
    }

    fn listen(&self, subscription: &str) -> Result<UnboundedReceiver<Vec<Bytes>>, Status> {
        let known = self.subscriptions.lock().get(subscription).cloned();
        let listeners = known.ok_or_else(|| Status::not_found("There is no such subscription."))?;
        let (sender, receiver) = unbounded_channel();
        listeners.0.lock().push(sender);
        Ok(receiver)
    }
}

/// Publisher and Subscriber in one; they differ by name.
#[derive(Clone)]
struct Floor<const SUBSCRIBER: bool>(Arc<Relay>);

impl NamedService for Floor<false> {
    const NAME: &'static str = "google.pubsub.v1.Publisher";
}

impl NamedService for Floor<true> {
    const NAME: &'static str = "google.pubsub.v1.Subscriber";
}

impl<const SUBSCRIBER: bool> Service<Request<Body>> for Floor<SUBSCRIBER> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let relay = self.0.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match method {
                "Publish" => {
                    let publish = service_fn(move |request: tonic::Request<PublishRequest>| {
                        ready(Ok(tonic::Response::new(relay.publish(request.into_inner()))))
                    });
                    let mut grpc = tonic::server::Grpc::new(Codec::<PublishResponse, PublishRequest>::default());
                    grpc = grpc.apply_max_message_size_config(Some(MAX_REQUEST_BYTES), None);
                    grpc.unary(publish, request).await
                }
                "CreateSubscription" => {
                    let create = service_fn(move |request: tonic::Request<Subscription>| {
                        ready(Ok(tonic::Response::new(relay.subscribe(request.into_inner()))))
                    });
                    tonic::server::Grpc::new(Codec::<Subscription, Subscription>::default()).unary(create, request).await
                }
                "StreamingPull" => {
                    let pull = service_fn(move |request| stream(relay.clone(), request));
                    let codec = Codec::<StreamingPullResponse, StreamingPullRequest>::default();
                    tonic::server::Grpc::new(codec).streaming(pull, request).await
                }
                _ => {
                    let nothing = service_fn(|_: tonic::Request<()>| ready(Ok(tonic::Response::new(()))));
                    tonic::server::Grpc::new(Codec::<(), ()>::default()).unary(nothing, request).await
                }
            })
        })
    }
}

/// Sends on what is published; acknowledgements are read and forgotten.
async fn stream(
    relay: Arc<Relay>,
    request: tonic::Request<tonic::Streaming<StreamingPullRequest>>,
) -> Result<tonic::Response<impl tokio_stream::Stream<Item = Result<StreamingPullResponse, Status>>>, Status> {
    let mut requests = request.into_inner();
    let first = requests.message().await?.ok_or_else(|| Status::invalid_argument("The stream has no first message."))?;
    let published = relay.listen(&first.subscription)?;
    tokio::spawn(async move { while let Ok(Some(_)) = requests.message().await {} });
    let responses = UnboundedReceiverStream::new(published).map(|messages| {
        let received = |message| ReceivedMessage { ack_id: ACK_ID.to_owned(), message, ..ReceivedMessage::default() };
        Ok(StreamingPullResponse { received_messages: messages.into_iter().map(received).collect(), ..Default::default() })
    });
    Ok(tonic::Response::new(responses))
}
