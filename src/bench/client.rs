//! The connections, the topic and the subscriptions of a run.

use std::time::{SystemTime, UNIX_EPOCH};

use futures::{StreamExt, TryStreamExt, stream};

use super::{Options, Scenario, Shaping};
use crate::{
    api::proto::pubsub::{
        CreateSchemaRequest, DeleteSchemaRequest, DeleteSubscriptionRequest, DeleteTopicRequest, Encoding, JavaScriptUdf,
        MessageTransform, Schema, SchemaSettings, StreamingPullRequest, StreamingPullResponse, Subscription, Topic,
        message_transform, publisher_client::PublisherClient, schema, schema_service_client::SchemaServiceClient,
        subscriber_client::SubscriberClient,
    },
    client::{Connection, Target},
    model::EncodedMessage,
};

const MAX_RESPONSE: usize = 64 << 20;
/// Subscriptions made or streams opened at once: a server that syncs each of them groups as many.
pub const AT_ONCE: usize = 64;
/// What the text payloads follow.
const SCHEMA: &str = r#"{"type":"record","name":"Bench","fields":[{"name":"number","type":"long"},{"name":"sent","type":"long"},{"name":"filling","type":"string"}]}"#;

/// The filter of `filtered`; every message passes.
const FILTER: &str = r#"attributes.kind = "bench" AND NOT hasPrefix(attributes.region, "us-")"#;
const ATTRIBUTES: [(&str, &str); 2] = [("kind", "bench"), ("region", "eu-west-1")];

pub struct Client {
    scenario: Scenario,
    channels: Vec<Connection>,
    pub topic: String,
    pub subscriptions: Vec<String>,
    /// Whether the topic was there before and stays.
    lasting: bool,
}

impl Client {
    pub async fn open(options: &Options) -> Result<Self, String> {
        let target =
            Target { ca_file: options.ca_file.clone(), key_file: options.key_file.clone(), ..Target::plain(&options.endpoint) };
        let channels = target.connections(options.connections as usize)?;
        let run = format!("{:x}", now_nanos());
        let count = match options.scenario {
            Scenario::FanOut | Scenario::Idle => options.subscriptions,
            _ if options.topic.is_some() => 0,
            _ => 1,
        };
        let client = Self {
            scenario: options.scenario,
            channels,
            topic: options.topic.clone().unwrap_or_else(|| format!("projects/{}/topics/bench-{run}", options.project)),
            lasting: options.topic.is_some(),
            subscriptions: (0..count).map(|n| format!("projects/{}/subscriptions/bench-{run}-{n}", options.project)).collect(),
        };
        if !client.lasting {
            client.create(options.shaping).await?;
        }
        Ok(client)
    }

    /// A topic with one subscription beside this one, over the same connections.
    pub async fn beside(&self) -> Result<Self, String> {
        let beside = Self {
            scenario: Scenario::EndToEnd,
            channels: self.channels.clone(),
            topic: format!("{}-beside", self.topic),
            lasting: false,
            subscriptions: vec![format!("{}-beside", self.subscriptions[0])],
        };
        beside.create(Shaping::None).await?;
        Ok(beside)
    }

    /// The name of the run's snapshot.
    pub fn snapshot(&self) -> String {
        self.subscriptions[0].replace("/subscriptions/", "/snapshots/")
    }

    async fn create(&self, shaping: Shaping) -> Result<(), String> {
        let mut topic = Topic { name: self.topic.clone(), ..Default::default() };
        match shaping {
            Shaping::None => {}
            Shaping::Schema => topic.schema_settings = Some(self.create_schema().await?),
            Shaping::Transform => topic.message_transforms = vec![transform()],
        }
        self.publisher(0).create_topic(topic).await.map_err(|e| format!("CreateTopic: {e}"))?;
        let created = stream::iter(0..self.subscriptions.len()).map(async |n| {
            let subscription = Subscription {
                name: self.subscriptions[n].clone(),
                topic: self.topic.clone(),
                ack_deadline_seconds: 600,
                enable_message_ordering: matches!(self.scenario, Scenario::Ordered | Scenario::Hold),
                retain_acked_messages: self.scenario == Scenario::Seek,
                filter: if self.scenario == Scenario::Filtered { FILTER.into() } else { String::new() },
                ..Default::default()
            };
            self.subscriber(n).create_subscription(subscription).await.map_err(|e| format!("CreateSubscription: {e}"))
        });
        created.buffer_unordered(AT_ONCE).try_for_each(async |_| Ok(())).await
    }

    /// A schema by the name of the topic.
    async fn create_schema(&self) -> Result<SchemaSettings, String> {
        let (parent, id) = self.topic.split_once("/topics/").unwrap_or_default();
        let schema = Schema { r#type: schema::Type::Avro as i32, definition: SCHEMA.into(), ..Default::default() };
        let request = CreateSchemaRequest { parent: parent.into(), schema: Some(schema), schema_id: id.into() };
        let mut schemas = SchemaServiceClient::new(self.channels[0].clone());
        let schema = schemas.create_schema(request).await.map_err(|e| format!("CreateSchema: {e}"))?.into_inner();
        Ok(SchemaSettings { schema: schema.name, encoding: Encoding::Json as i32, ..Default::default() })
    }

    /// Removes what the run made; what is left behind by a failure does no harm.
    pub async fn remove(&self) {
        let removed = stream::iter(0..self.subscriptions.len()).map(async |n| {
            let request = DeleteSubscriptionRequest { subscription: self.subscriptions[n].clone() };
            let _ = self.subscriber(n).delete_subscription(request).await;
        });
        removed.buffer_unordered(AT_ONCE).for_each(async |()| ()).await;
        if self.lasting {
            return;
        }
        let _ = self.publisher(0).delete_topic(DeleteTopicRequest { topic: self.topic.clone() }).await;
        let name = self.topic.replace("/topics/", "/schemas/");
        let _ = SchemaServiceClient::new(self.channels[0].clone()).delete_schema(DeleteSchemaRequest { name }).await;
    }

    pub fn publisher(&self, n: usize) -> PublisherClient<Connection> {
        PublisherClient::new(self.channels[n % self.channels.len()].clone()).max_decoding_message_size(MAX_RESPONSE)
    }

    pub fn subscriber(&self, n: usize) -> SubscriberClient<Connection> {
        SubscriberClient::new(self.channels[n % self.channels.len()].clone()).max_decoding_message_size(MAX_RESPONSE)
    }

    /// Opens a stream; requests go through the sender.
    pub async fn stream(
        &self,
        n: usize,
        subscription: &str,
        max_outstanding_messages: i64,
    ) -> Result<(tokio::sync::mpsc::Sender<StreamingPullRequest>, tonic::Streaming<StreamingPullResponse>), String> {
        let (sender, receiver) = tokio::sync::mpsc::channel(1024);
        let first = StreamingPullRequest {
            subscription: subscription.to_owned(),
            stream_ack_deadline_seconds: 600,
            max_outstanding_messages,
            ..Default::default()
        };
        let _ = sender.send(first).await;
        let requests = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let response = self.subscriber(n).streaming_pull(requests).await.map_err(|e| format!("StreamingPull: {e}"))?;
        Ok((sender, response.into_inner()))
    }
}

pub fn now_nanos() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
}

/// As [`message`], but JSON text, for a schema or a function.
pub fn text_message(number: u64, bytes: usize, key: &str) -> bytes::Bytes {
    let head = format!(r#"{{"number":{number},"sent":{},"filling":""#, now_nanos());
    let filling = "x".repeat(bytes.saturating_sub(head.len() + 2));
    EncodedMessage::encode(format!(r#"{head}{filling}"}}"#).as_bytes(), [], key).wire().clone()
}

fn transform() -> MessageTransform {
    let code = "function shape(message) { message.attributes.shaped = 'yes'; return message; }";
    let udf = JavaScriptUdf { function_name: "shape".into(), code: code.into() };
    MessageTransform { transform: Some(message_transform::Transform::JavascriptUdf(udf)), ..Default::default() }
}

/// A message: its number and the time, then filling.
pub fn message(number: u64, bytes: usize, key: &str) -> bytes::Bytes {
    EncodedMessage::encode(&payload(number, bytes), [], key).wire().clone()
}

fn payload(number: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![b'x'; bytes];
    data[..8].copy_from_slice(&number.to_be_bytes());
    data[8..16].copy_from_slice(&now_nanos().to_be_bytes());
    data
}

/// As [`message`], with attributes that pass the filter.
pub fn labelled_message(number: u64, bytes: usize, key: &str) -> bytes::Bytes {
    let data = payload(number, bytes);
    EncodedMessage::encode(&data, ATTRIBUTES, key).wire().clone()
}

/// The number and the time of a received message, and its ordering key.
pub fn read(message: &bytes::Bytes) -> Option<(u64, u64, EncodedMessage)> {
    let message = EncodedMessage::scan_system(message.clone()).ok()?;
    let data = message.data();
    let number = u64::from_be_bytes(data.get(..8)?.try_into().ok()?);
    let sent = u64::from_be_bytes(data.get(8..16)?.try_into().ok()?);
    Some((number, sent, message))
}
