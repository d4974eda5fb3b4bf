//! Acknowledge and ModifyAckDeadline.

use std::{collections::HashSet, sync::Arc};

use prost::Message;
use tonic::{Request, Response, Status, metadata::MetadataMap};

use crate::{
    api::{
        proto::pubsub::{AcknowledgeRequest, ModifyAckDeadlineRequest},
        status::{some_ack_ids, to_status},
    },
    connector::{AckFailure, Connector, Error},
    model::{SubscriptionName, limits::MAX_ACK_REQUEST_BYTES},
};

/// Clients that take every id of a failed request for failed unless the error says that the id may be repeated.
const CLIENTS_THAT_JUDGE_BY_CODE: [&str; 3] = ["gl-python/", "gl-go/", "gl-node/"];

/// Ids that are named at most, in bytes, to a client that repeats by itself what is not named. Channels of gRPC's C core that
/// set no bound of their own, like Python's with `PUBSUB_EMULATOR_HOST`, take no more than 8 KiB of metadata in base64; beyond
/// it the client sees another error, or none, and takes the ids for processed.
const MAX_NAMED_BYTES: usize = 5 << 10;
/// What names an id beside its own bytes: the word for the failure, tags and lengths.
const NAMING_BYTES: usize = 42;

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
        Err(Error::AckIds(failed)) if judges_by_code(metadata) => Err(match for_a_judge(failed, ack_ids) {
            Named::All(ids) => to_status(Error::AckIds(ids)),
            Named::Some(ids) => some_ack_ids(&ids),
        }),
        Err(error) => Err(to_status(error)),
    }
}

/// The ids that are named to a client that judges the others by the code.
#[derive(Debug, PartialEq)]
enum Named {
    /// Every id of the request.
    All(Vec<(String, AckFailure)>),
    /// The first that failed for good. The client is to repeat the others: it hears then that they are done, or which of
    /// them failed.
    Some(Vec<(String, AckFailure)>),
}

fn for_a_judge(failed: Vec<(String, AckFailure)>, ack_ids: &[String]) -> Named {
    let bytes = |id: &String| id.len() + NAMING_BYTES;
    if ack_ids.iter().map(bytes).sum::<usize>() <= MAX_NAMED_BYTES {
        return Named::All(with_others(failed, ack_ids));
    }
    let mut sum = 0;
    let fits = |(id, _): &(String, AckFailure)| {
        sum += bytes(id);
        sum <= MAX_NAMED_BYTES
    };
    Named::Some(failed.into_iter().filter(|(_, failure)| *failure == AckFailure::Permanent).take_while(fits).collect())
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

    #[test]
    fn of_many_ids_those_that_failed_for_good_are_named_while_there_is_room() {
        let id = |n: usize| format!("{n:0140}");
        let ids: Vec<String> = (0..100).map(id).collect();
        let mut failed: Vec<_> = (0..100).step_by(2).map(|n| (id(n), AckFailure::Permanent)).collect();
        failed[0].1 = AckFailure::Transient;
        let expected: Vec<_> = (1..=28).map(|n| (id(2 * n), AckFailure::Permanent)).collect();
        assert_eq!(for_a_judge(failed.clone(), &ids), Named::Some(expected));
        // As long as all have room, all are named.
        assert!(matches!(for_a_judge(failed[..1].to_vec(), &ids[..28]), Named::All(all) if all.len() == 28));
        assert!(matches!(for_a_judge(failed[..1].to_vec(), &ids[..29]), Named::Some(none) if none.is_empty()));
    }
}
