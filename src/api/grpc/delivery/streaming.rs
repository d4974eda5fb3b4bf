//! StreamingPull.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt};
use prost::Message;
use tonic::{Code, Request, Response, Status, Streaming};

use super::{
    super::gate::{self, Gate},
    received,
    tracked::Tracking,
};
use crate::{
    api::{
        proto::pubsub::{
            StreamingPullRequest, StreamingPullResponse,
            streaming_pull_response::{AcknowledgeConfirmation, ModifyAckDeadlineConfirmation, SubscriptionProperties},
        },
        status::to_status,
    },
    connector::{
        Connector, Error,
        session::{Opening, StreamRequest, StreamResponse},
    },
    model::{SubscriptionName, limits::MAX_ACK_REQUEST_BYTES},
};

/// How long a stream may stay without its first request: as long as the clients give any other call.
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(60);

/// The responses of a stream.
pub type StreamingPullStream = Pin<Box<dyn Stream<Item = Result<StreamingPullResponse, Status>> + Send>>;

/// Opens a stream. The response headers are sent once the first request is accepted.
pub async fn streaming_pull(
    connector: &Arc<Connector>,
    gate: &Gate,
    request: Request<Streaming<StreamingPullRequest>>,
) -> Result<Response<StreamingPullStream>, Status> {
    let caller = gate::caller(&request);
    let mut requests = request.into_inner();
    let first = tokio::select! {
        first = tokio::time::timeout(FIRST_REQUEST_WAIT, requests.message()) => match first {
            Ok(first) => first?.ok_or_else(|| to_status(Error::Argument("subscription".into())))?,
            Err(_) => return Err(to_status(Error::Closing)),
        },
        () = connector.stopping() => return Err(to_status(Error::Closing)),
    };
    gate.admit_stream(&caller, &first).await?;
    let subscription = StreamingPullRequest { subscription: first.subscription.clone(), ..Default::default() };
    let refused = gate.until_refused(caller, subscription);
    let opening = opening(first).map_err(to_status)?;
    let requests = requests.map(|request| request.map_err(broken).and_then(later));
    let responses = connector.stream(opening, requests).await.map_err(to_status)?;
    let responses = responses.map(|response| response.map(encode).map_err(to_status));
    let responses: StreamingPullStream = match refused {
        None => Box::pin(responses),
        Some(refused) => ended_by(Box::pin(responses), refused),
    };
    let mut response = Response::new(responses);
    response.extensions_mut().insert(Tracking::stream());
    Ok(response)
}

/// The responses up to a refusal, which is the last.
fn ended_by(responses: StreamingPullStream, refused: impl Future<Output = Status> + Send + 'static) -> StreamingPullStream {
    let state = Some((responses, Box::pin(refused)));
    Box::pin(futures::stream::unfold(state, |state| async move {
        let (mut responses, mut refused) = state?;
        tokio::select! {
            response = responses.next() => response.map(|response| (response, Some((responses, refused)))),
            status = &mut refused => Some((Err(status), None)),
        }
    }))
}

fn opening(request: StreamingPullRequest) -> Result<Opening, Error> {
    check_size(&request)?;
    Ok(Opening {
        subscription: SubscriptionName::parse(&request.subscription)?,
        stream_ack_deadline_seconds: request.stream_ack_deadline_seconds,
        max_outstanding_messages: request.max_outstanding_messages,
        max_outstanding_bytes: request.max_outstanding_bytes,
        protocol_version: request.protocol_version,
        request: asked(request),
    })
}

/// A request after the first. What belongs to the first only, ends the stream; a client id is tolerated.
fn later(request: StreamingPullRequest) -> Result<StreamRequest, Error> {
    check_size(&request)?;
    let first_only = [
        ("subscription", !request.subscription.is_empty()),
        ("max_outstanding_messages", request.max_outstanding_messages != 0),
        ("max_outstanding_bytes", request.max_outstanding_bytes != 0),
        ("protocol_version", request.protocol_version != 0),
    ];
    match first_only.into_iter().find(|(_, set)| *set) {
        Some((field, _)) => Err(Error::argument(field, "only the first request of a stream may set it")),
        None => Ok(asked(request)),
    }
}

fn check_size(request: &StreamingPullRequest) -> Result<(), Error> {
    if request.encoded_len() > MAX_ACK_REQUEST_BYTES { Err(Error::PayloadTooLarge(MAX_ACK_REQUEST_BYTES)) } else { Ok(()) }
}

fn asked(request: StreamingPullRequest) -> StreamRequest {
    StreamRequest {
        ack_ids: request.ack_ids,
        modify_deadline_ack_ids: request.modify_deadline_ack_ids,
        modify_deadline_seconds: request.modify_deadline_seconds,
        stream_ack_deadline_seconds: request.stream_ack_deadline_seconds,
    }
}

/// A request that could not be read: the client has gone, or it sent something that is not a request.
fn broken(status: Status) -> Error {
    match status.code() {
        Code::Internal | Code::InvalidArgument | Code::OutOfRange | Code::ResourceExhausted => {
            Error::argument("request", status.message())
        }
        _ => Error::Closing,
    }
}

fn encode(response: StreamResponse) -> StreamingPullResponse {
    let StreamResponse { messages, acknowledged, modified, exactly_once, ordered } = response;
    StreamingPullResponse {
        received_messages: messages.into_iter().map(received).collect(),
        acknowledge_confirmation: (!acknowledged.is_empty()).then_some(AcknowledgeConfirmation {
            ack_ids: acknowledged.done,
            invalid_ack_ids: acknowledged.invalid,
            unordered_ack_ids: Vec::new(),
            temporary_failed_ack_ids: acknowledged.failed,
        }),
        modify_ack_deadline_confirmation: (!modified.is_empty()).then_some(ModifyAckDeadlineConfirmation {
            ack_ids: modified.done,
            invalid_ack_ids: modified.invalid,
            temporary_failed_ack_ids: modified.failed,
        }),
        subscription_properties: Some(SubscriptionProperties {
            exactly_once_delivery_enabled: exactly_once,
            message_ordering_enabled: ordered,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_first_request_are_refused_later() {
        let request = StreamingPullRequest::default;
        for (field, request) in [
            ("subscription", StreamingPullRequest { subscription: "projects/p1/subscriptions/s11".into(), ..request() }),
            ("max_outstanding_messages", StreamingPullRequest { max_outstanding_messages: 1, ..request() }),
            ("max_outstanding_bytes", StreamingPullRequest { max_outstanding_bytes: -1, ..request() }),
            ("protocol_version", StreamingPullRequest { protocol_version: 1, ..request() }),
        ] {
            assert!(matches!(later(request), Err(Error::Argument(text)) if text.starts_with(field)));
        }
        assert!(later(StreamingPullRequest { client_id: "c".into(), stream_ack_deadline_seconds: 60, ..request() }).is_ok());
        assert!(later(request()).is_ok());
    }

    #[test]
    fn a_request_beyond_512_kib_is_refused() {
        let request = StreamingPullRequest { ack_ids: vec!["x".repeat(524_288)], ..Default::default() };
        assert!(matches!(later(request), Err(Error::PayloadTooLarge(524_288))));
    }

    #[test]
    fn every_response_tells_the_subscriptions_properties() {
        let encoded = encode(StreamResponse { exactly_once: true, ..StreamResponse::default() });
        let properties = encoded.subscription_properties.unwrap();
        assert!(properties.exactly_once_delivery_enabled && !properties.message_ordering_enabled);
        assert_eq!((encoded.acknowledge_confirmation, encoded.modify_ack_deadline_confirmation), (None, None));
    }
}
