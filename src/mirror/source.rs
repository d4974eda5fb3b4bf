//! The source's end: streams that bring messages, and what is sent back about them.

use std::{sync::Arc, time::Duration};

use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::IntervalStream};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use super::{
    progress::Progress,
    publish::{Pause, routed, text},
};
use crate::{
    api::proto::pubsub::{
        AcknowledgeRequest, GetSubscriptionRequest, ModifyAckDeadlineRequest, ReceivedMessage, StreamingPullRequest,
        Subscription, subscriber_client::SubscriberClient,
    },
    client::Connection,
};

/// Ack ids a request: Google bounds requests at 512 KiB, and an id has some 200 bytes.
const ACK_IDS: usize = 2000;
/// Sent over an idle stream, as official clients do, so that nothing on the way takes it for dead.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Bytes of one answer: 10 MB of messages and what is around them.
const MAX_RESPONSE: usize = 64 << 20;
/// Tries of what need not succeed: giving back, and asking for more time.
const SOME_TRIES: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A subscription of the source.
#[derive(Clone)]
pub struct Source {
    pub client: SubscriberClient<Connection>,
    pub subscription: String,
    pub ack_deadline_seconds: i32,
    pub max_outstanding: (i64, i64),
}

/// What is sent back.
#[derive(Debug)]
pub enum Settle {
    Ack(Vec<String>),
    Nack(Vec<String>),
    Extend(Vec<String>),
}

impl Source {
    pub fn new(connection: Connection, subscription: String, ack_deadline_seconds: i32, max_outstanding: (i64, i64)) -> Self {
        let client = SubscriberClient::new(connection).max_decoding_message_size(MAX_RESPONSE);
        Self { client, subscription, ack_deadline_seconds, max_outstanding }
    }

    /// The subscription itself.
    pub async fn get(&mut self) -> Result<Subscription, Status> {
        let subscription = self.subscription.clone();
        let request = GetSubscriptionRequest { subscription: subscription.clone() };
        self.client.get_subscription(routed(request, "subscription", &subscription)).await.map(tonic::Response::into_inner)
    }

    /// Receives until `stop`, over one stream at a time.
    pub async fn receive(mut self, out: mpsc::Sender<Vec<ReceivedMessage>>, stop: CancellationToken, progress: Arc<Progress>) {
        let client_id = format!("landline-mirror-{:x}", rand::random::<u64>());
        let mut pause = Pause::default();
        while !stop.is_cancelled() {
            let ended = tokio::select! {
                ended = self.stream(&client_id, &out, &mut pause) => ended,
                () = stop.cancelled() => return,
            };
            // Services close streams now and then; that is no trouble.
            if !matches!(ended.code(), Code::Ok) {
                progress.tell(&format!("StreamingPull: {}", text(&ended)));
            }
            if !pause.wait(&stop).await {
                return;
            }
        }
    }

    /// One stream, to its end.
    async fn stream(&mut self, client_id: &str, out: &mpsc::Sender<Vec<ReceivedMessage>>, pause: &mut Pause) -> Status {
        let first = StreamingPullRequest {
            subscription: self.subscription.clone(),
            stream_ack_deadline_seconds: self.ack_deadline_seconds,
            max_outstanding_messages: self.max_outstanding.0,
            max_outstanding_bytes: self.max_outstanding.1,
            client_id: client_id.to_owned(),
            ..Default::default()
        };
        let mut beats = tokio::time::interval(HEARTBEAT);
        beats.reset();
        let beats = IntervalStream::new(beats).map(|_| StreamingPullRequest::default());
        let requests = tokio_stream::once(first).chain(beats);
        let mut answers = match self.client.streaming_pull(routed(requests, "subscription", &self.subscription)).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return status,
        };
        loop {
            match answers.message().await {
                Ok(Some(answer)) => {
                    *pause = Pause::default();
                    if !answer.received_messages.is_empty() && out.send(answer.received_messages).await.is_err() {
                        return Status::ok("");
                    }
                }
                Ok(None) => return Status::ok(""),
                Err(status) => return status,
            }
        }
    }

    /// Sends back what comes, until nothing more will.
    pub async fn settle(mut self, mut work: mpsc::UnboundedReceiver<Settle>, progress: Arc<Progress>) {
        let mut some = Vec::new();
        while work.recv_many(&mut some, ACK_IDS).await > 0 {
            let (mut acks, mut nacks, mut extensions) = (Vec::new(), Vec::new(), Vec::new());
            for item in some.drain(..) {
                match item {
                    Settle::Ack(ids) => acks.extend(ids),
                    Settle::Nack(ids) => nacks.extend(ids),
                    Settle::Extend(ids) => extensions.extend(ids),
                }
            }
            for ack_ids in acks.chunks(ACK_IDS) {
                self.acknowledge(ack_ids, &progress).await;
            }
            for (ids, seconds) in [(extensions, self.ack_deadline_seconds), (nacks, 0)] {
                for ack_ids in ids.chunks(ACK_IDS) {
                    self.modify(ack_ids, seconds, &progress).await;
                }
            }
        }
    }

    /// Until it is done, or the source says that it can't be: then the messages come again.
    async fn acknowledge(&mut self, ack_ids: &[String], progress: &Progress) {
        let (mut pause, never) = (Pause::default(), CancellationToken::new());
        loop {
            let request = AcknowledgeRequest { subscription: self.subscription.clone(), ack_ids: ack_ids.to_vec() };
            let answer = self.client.acknowledge(routed(request, "subscription", &self.subscription));
            let status = match tokio::time::timeout(TIMEOUT, answer).await {
                Ok(Ok(_)) => return,
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("there was no answer within a minute"),
            };
            progress.tell(&format!("Acknowledge: {}", text(&status)));
            if matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition | Code::NotFound) {
                return;
            }
            pause.wait(&never).await;
        }
    }

    async fn modify(&mut self, ack_ids: &[String], seconds: i32, progress: &Progress) {
        let (mut pause, never) = (Pause::default(), CancellationToken::new());
        for _ in 0..SOME_TRIES {
            let request = ModifyAckDeadlineRequest {
                subscription: self.subscription.clone(),
                ack_ids: ack_ids.to_vec(),
                ack_deadline_seconds: seconds,
            };
            match self.client.modify_ack_deadline(routed(request, "subscription", &self.subscription)).await {
                Ok(_) => return,
                Err(status) => progress.tell(&format!("ModifyAckDeadline: {}", text(&status))),
            }
            pause.wait(&never).await;
        }
    }
}
