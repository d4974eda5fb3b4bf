//! Acknowledge and ModifyAckDeadline.

use std::{collections::HashSet, sync::Arc};

use prost::Message;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use crate::{
    api::{
        proto::pubsub::{AcknowledgeRequest, ModifyAckDeadlineRequest},
        status::to_status,
    },
    connector::{AckFailure, Connector, Error},
    model::{SubscriptionName, limits::MAX_ACK_REQUEST_BYTES},
};

/// Clients that take every id of a failed request for failed unless the error says that the id may be repeated.
const CLIENTS_THAT_JUDGE_BY_CODE: [&str; 3] = ["gl-python/", "gl-go/", "gl-node/"];

/// Acknowledges messages.
pub async fn acknowledge(connector: &Arc<Connector>, request: Request<AcknowledgeRequest>) -> Result<Response<()>, Status> {
    let (metadata, _, request) = request.into_parts();
    let outcome = match checked(&request, &request.subscription) {
        Ok(name) => connector.acknowledge(&name, &request.ack_ids).await,
        Err(error) => Err(error),
    };
    answer(outcome, &metadata, &request.ack_ids)
}

/// Moves ack deadlines.
pub async fn modify_ack_deadline(
    connector: &Arc<Connector>,
    request: Request<ModifyAckDeadlineRequest>,
) -> Result<Response<()>, Status> {
    let (metadata, _, request) = request.into_parts();
    let outcome = match checked(&request, &request.subscription) {
        Ok(name) => connector.modify_ack_deadline(&name, &request.ack_ids, request.ack_deadline_seconds).await,
        Err(error) => Err(error),
    };
    answer(outcome, &metadata, &request.ack_ids)
}

fn checked(request: &impl Message, subscription: &str) -> Result<SubscriptionName, Error> {
    if request.encoded_len() > MAX_ACK_REQUEST_BYTES {
        return Err(Error::PayloadTooLarge(MAX_ACK_REQUEST_BYTES));
    }
    Ok(SubscriptionName::parse(subscription)?)
}

fn answer(outcome: Result<(), Error>, metadata: &MetadataMap, ack_ids: &[String]) -> Result<Response<()>, Status> {
    match outcome {
        Ok(()) => Ok(Response::new(())),
        Err(Error::AckIds(failed)) if judges_by_code(metadata) => Err(to_status(Error::AckIds(with_others(failed, ack_ids)))),
        Err(error) => Err(to_status(error)),
    }
}

/// Whether the caller is a client that reports the ids which an error does not list as failed too.
fn judges_by_code(metadata: &MetadataMap) -> bool {
    let client = metadata.get("x-goog-api-client").and_then(|value| value.to_str().ok()).unwrap_or_default();
    client.split(' ').any(|part| CLIENTS_THAT_JUDGE_BY_CODE.iter().any(|known| part.starts_with(known)))
}

/// Lists also the ids that were carried out, as ones that may be repeated: the client repeats just these, and hears that
/// they are done.
fn with_others(mut failed: Vec<(String, AckFailure)>, ack_ids: &[String]) -> Vec<(String, AckFailure)> {
    let listed: HashSet<&str> = failed.iter().map(|(id, _)| id.as_str()).collect();
    let others: Vec<_> =
        ack_ids.iter().filter(|id| !listed.contains(id.as_str())).map(|id| (id.clone(), AckFailure::Transient)).collect();
    failed.extend(others);
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(client: &str) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        metadata.insert("x-goog-api-client", client.parse().unwrap());
        metadata
    }

    #[test]
    fn clients_are_told_apart_by_their_header() {
        assert!(judges_by_code(&metadata("gl-python/3.12.1 grpc/1.70.0 gax/2.24 gapic/2.28 gccl/2.28")));
        assert!(judges_by_code(&metadata("gax/4.3 gapic/4.9 gl-node/20.1 grpc/1.12 gccl/4.9")));
        assert!(judges_by_code(&metadata("gl-go/1.24 gccl/2.0 gax/2.14 grpc/1.71")));
        assert!(!judges_by_code(&metadata("gl-java/17 gapic/1.130 gax/2.60 grpc/1.70")));
        assert!(!judges_by_code(&metadata("x-gl-go/1")));
        assert!(!judges_by_code(&MetadataMap::new()));
    }

    #[test]
    fn ids_that_were_carried_out_are_listed_as_repeatable_once() {
        let ids = ["a", "b", "c"].map(str::to_owned);
        let listed = with_others(vec![("b".into(), AckFailure::Permanent)], &ids);
        let expected = [("b", AckFailure::Permanent), ("a", AckFailure::Transient), ("c", AckFailure::Transient)]
            .map(|(id, f)| (id.into(), f));
        assert_eq!(listed, expected);
    }
}
