//! A Publisher that answers by the names it is asked about, and the means to send it HTTP requests.

use std::{
    io::{Read, Write},
    sync::Arc,
};

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use prost::Message;
use serde_json::Value;
use tonic::{Code, Response, Status, service::Routes};
use tower::ServiceExt;

use crate::api::{
    proto::{
        pubsub::{self, publisher_server::Publisher, publisher_server::PublisherServer},
        rpc,
    },
    rest,
    status::with_error_info,
};

/// What the Publisher saw.
#[derive(Debug, Default, Clone)]
pub struct Seen {
    pub calls: usize,
    pub mask: Vec<String>,
    pub published: Vec<pubsub::PubsubMessage>,
    pub authorization: Option<String>,
    pub grpc_timeout: Option<String>,
    pub peer: Option<String>,
}

/// What a server knows of a connection, as it would put it into a request's extensions.
#[derive(Debug, Default, Clone)]
pub struct Sent {
    pub peer: Option<String>,
}

/// The Publisher.
#[derive(Debug, Default, Clone)]
pub struct Shown(Arc<Mutex<Seen>>);

impl Shown {
    fn note<T>(&self, request: &tonic::Request<T>) {
        let text = |name| request.metadata().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let mut seen = self.0.lock();
        seen.calls += 1;
        seen.authorization = text("authorization");
        seen.grpc_timeout = text("grpc-timeout");
        seen.peer = request.extensions().get::<Sent>().and_then(|sent| sent.peer.clone());
    }
}

fn active(topic: pubsub::Topic) -> Result<Response<pubsub::Topic>, Status> {
    Ok(Response::new(pubsub::Topic { state: pubsub::topic::State::Active as i32, ..topic }))
}

#[tonic::async_trait]
impl Publisher for Shown {
    async fn create_topic(&self, request: tonic::Request<pubsub::Topic>) -> Result<Response<pubsub::Topic>, Status> {
        self.note(&request);
        active(request.into_inner())
    }

    async fn update_topic(&self, request: tonic::Request<pubsub::UpdateTopicRequest>) -> Result<Response<pubsub::Topic>, Status> {
        self.note(&request);
        let request = request.into_inner();
        self.0.lock().mask = request.update_mask.unwrap_or_default().paths;
        active(request.topic.unwrap_or_default())
    }

    async fn publish(
        &self,
        request: tonic::Request<pubsub::PublishRequest>,
    ) -> Result<Response<pubsub::PublishResponse>, Status> {
        self.note(&request);
        let messages = request.into_inner().messages;
        let message_ids = (1..=messages.len()).map(|id| id.to_string()).collect();
        self.0.lock().published = messages.into_iter().map(|message| pubsub::PubsubMessage::decode(message).unwrap()).collect();
        Ok(Response::new(pubsub::PublishResponse { message_ids }))
    }

    async fn get_topic(&self, request: tonic::Request<pubsub::GetTopicRequest>) -> Result<Response<pubsub::Topic>, Status> {
        self.note(&request);
        let name = request.into_inner().topic;
        match name.rsplit('/').next() {
            Some("missing") => Err(Status::not_found("Resource not found (resource=missing).")),
            Some("failing") => {
                let metadata = [("id".to_owned(), "PERMANENT_FAILURE_INVALID_ACK_ID".to_owned())].into();
                let info = rpc::ErrorInfo { reason: "R".into(), domain: "d".into(), metadata };
                Err(with_error_info(Code::FailedPrecondition, "ünïcode %".into(), info))
            }
            _ => active(pubsub::Topic { name, ..Default::default() }),
        }
    }

    async fn list_topics(
        &self,
        request: tonic::Request<pubsub::ListTopicsRequest>,
    ) -> Result<Response<pubsub::ListTopicsResponse>, Status> {
        self.note(&request);
        let pubsub::ListTopicsRequest { project, page_size, page_token } = request.into_inner();
        let shown = format!("{project} {page_size} {page_token}");
        let next_page_token = if project == "projects/empty" { String::new() } else { shown };
        Ok(Response::new(pubsub::ListTopicsResponse { next_page_token, ..Default::default() }))
    }

    async fn list_topic_subscriptions(
        &self,
        _: tonic::Request<pubsub::ListTopicSubscriptionsRequest>,
    ) -> Result<Response<pubsub::ListTopicSubscriptionsResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn list_topic_snapshots(
        &self,
        _: tonic::Request<pubsub::ListTopicSnapshotsRequest>,
    ) -> Result<Response<pubsub::ListTopicSnapshotsResponse>, Status> {
        Ok(Response::new(Default::default()))
    }

    async fn delete_topic(&self, request: tonic::Request<pubsub::DeleteTopicRequest>) -> Result<Response<()>, Status> {
        self.note(&request);
        Ok(Response::new(()))
    }

    async fn detach_subscription(
        &self,
        request: tonic::Request<pubsub::DetachSubscriptionRequest>,
    ) -> Result<Response<pubsub::DetachSubscriptionResponse>, Status> {
        self.note(&request);
        assert_eq!(request.into_inner().subscription, "projects/p/subscriptions/s");
        Ok(Response::new(Default::default()))
    }
}

/// A body to send.
pub trait IntoBody {
    fn into_body(self) -> Bytes;
}

impl IntoBody for () {
    fn into_body(self) -> Bytes {
        Bytes::new()
    }
}

impl IntoBody for &'static str {
    fn into_body(self) -> Bytes {
        self.into()
    }
}

impl IntoBody for String {
    fn into_body(self) -> Bytes {
        self.into()
    }
}

impl IntoBody for Vec<u8> {
    fn into_body(self) -> Bytes {
        self.into()
    }
}

impl IntoBody for Value {
    fn into_body(self) -> Bytes {
        self.to_string().into()
    }
}

/// The transcoder over the Publisher.
pub struct Fixture {
    publisher: Shown,
    rest: rest::Rest<Routes>,
}

impl Fixture {
    pub fn new() -> Self {
        let publisher = Shown::default();
        Self { rest: rest::service(Self::grpc(&publisher)).unwrap(), publisher }
    }

    fn grpc(publisher: &Shown) -> Routes {
        Routes::new(PublisherServer::new(publisher.clone()).max_decoding_message_size(usize::MAX))
    }

    /// The service of a port, over a Publisher of its own.
    pub fn one_port() -> rest::OnePort<Routes> {
        rest::one_port(Self::grpc(&Shown::default())).unwrap()
    }

    pub async fn send(&self, verb: Method, uri: &str, body: impl IntoBody) -> Answer {
        self.send_with([], verb, uri, body).await
    }

    pub async fn send_with(
        &self,
        headers: impl IntoIterator<Item = (&'static str, &'static str)>,
        verb: Method,
        uri: &str,
        body: impl IntoBody,
    ) -> Answer {
        self.send_sent(headers, Sent::default(), verb, uri, body).await
    }

    pub async fn send_sent(
        &self,
        headers: impl IntoIterator<Item = (&'static str, &'static str)>,
        sent: Sent,
        verb: Method,
        uri: &str,
        body: impl IntoBody,
    ) -> Answer {
        let request = Request::builder().method(verb).uri(uri).extension(sent);
        let request = headers.into_iter().fold(request, |request, (name, value)| request.header(name, value));
        let request = request.body(Full::new(body.into_body())).unwrap();
        let (parts, body) = self.rest.clone().oneshot(request).await.unwrap().into_parts();
        Answer { status: parts.status, headers: parts.headers, body: body.collect().await.unwrap().to_bytes() }
    }

    pub fn seen(&self) -> Seen {
        self.publisher.0.lock().clone()
    }

    pub fn calls(&self) -> usize {
        self.seen().calls
    }

    pub fn mask(&self) -> Vec<String> {
        self.seen().mask
    }

    pub fn published(&self) -> Vec<pubsub::PubsubMessage> {
        self.seen().published
    }
}

/// An answer, read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: http::HeaderMap,
    pub body: Bytes,
}

impl Answer {
    /// A header, empty if there is none.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.body))
    }

    /// Code, status and message of an error, whose code must be the HTTP status.
    pub fn error(&self) -> (u16, &'static str, String) {
        let error = &self.json()["error"];
        assert_eq!(error["code"], self.status.as_u16());
        let status = error["status"].as_str().unwrap();
        let status = rpc::Code::from_str_name(status).unwrap().as_str_name();
        (self.status.as_u16(), status, error["message"].as_str().unwrap().to_owned())
    }
}

pub fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

pub fn gunzip(packed: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(packed).read_to_end(&mut plain).unwrap();
    plain
}
