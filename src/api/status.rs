//! The only table from the connector's errors to gRPC status codes and details.
//!
//! Every status carries `grpc-status-details-bin`, a `google.rpc.Status` with the same code and message: the Python client
//! takes an Acknowledge or ModifyAckDeadline error without it for success of every id.

use bytes::Bytes;
use prost::Message;
use prost_types::Any;
use tonic::{
    Code, Status,
    metadata::{MetadataMap, MetadataValue},
};

use super::proto::rpc;
use crate::{
    auth::{Invalid, Refusal},
    connector::{AckFailure, Error, SchemaViolation},
    model::text::clipped,
};

/// The domain of every error this API reports.
const DOMAIN: &str = "pubsub.googleapis.com";
/// Reason of exactly-once failures.
const ACK_ID_REASON: &str = "PERMANENT_FAILURE_INVALID_ACK_ID";
/// The Node client compares this text literally.
const ERROR_INFO_URL: &str = "type.googleapis.com/google.rpc.ErrorInfo";
/// Trailer with the bare `ErrorInfo`, the only form the PHP client decodes.
const ERROR_INFO_TRAILER: &str = "google.rpc.errorinfo-bin";

/// Longest `ErrorInfo` that is sent twice. gRPC channels that set no bound of their own read 8 KiB of trailers, and take what
/// is beyond for another error; the details, which all other clients read, are worth that room more.
const MAX_REPEATED_BYTES: usize = 2 << 10;

/// The gRPC code of an error.
pub fn code(error: &Error) -> Code {
    match error {
        Error::Name(_)
        | Error::Message(_)
        | Error::Argument(_)
        | Error::TooSmall { .. }
        | Error::TooLarge { .. }
        | Error::OutOfBounds { .. }
        | Error::PayloadTooLarge(_)
        | Error::Unsupported(_)
        | Error::EmptyMask(_)
        | Error::UnknownPath { .. }
        | Error::ImmutablePath { .. }
        | Error::NoSeekTarget
        | Error::NoAckIds
        | Error::AckId(_)
        | Error::ForeignAckId(_)
        | Error::AckDeadline { .. }
        | Error::Transform(_)
        | Error::Text(_)
        | Error::SchemaEncoding
        | Error::Schema(_)
        | Error::SchemaViolation(_) => Code::InvalidArgument,
        Error::NotFound(_) => Code::NotFound,
        Error::Exists(_) => Code::AlreadyExists,
        Error::Detached(_)
        | Error::NotPullable
        | Error::BacklogTooOld
        | Error::SnapshotOfOtherTopic { .. }
        | Error::SchemaDeleted
        | Error::TooManyRevisions
        | Error::LastRevision
        | Error::AckIds(_) => Code::FailedPrecondition,
        Error::Contended | Error::PolicyChanged => Code::Aborted,
        Error::Closing | Error::Unavailable(_) => Code::Unavailable,
        Error::Full(_) => Code::ResourceExhausted,
        Error::Internal(_) => Code::Internal,
    }
}

/// What the caller gets to see of an error. What it must not see goes to the log.
pub fn to_status(error: Error) -> Status {
    match &error {
        Error::Internal(text) => tracing::error!("internal error: {text}"),
        Error::Unavailable(text) | Error::Full(text) => tracing::warn!("{error} ({text})"),
        _ => {}
    }
    match &error {
        Error::AckIds(failed) => with_error_info(code(&error), error.to_string(), ack_id_info(failed)),
        Error::SchemaViolation(violation) => with_error_info(code(&error), error.to_string(), violation_info(violation)),
        _ => with_details(code(&error), error.to_string()),
    }
}

/// The domain of refusals for want of a permission.
const IAM_DOMAIN: &str = "iam.googleapis.com";

/// What a caller gets to see of a call that was not let in. A resource that does not exist is refused as one that does.
pub fn refused(refusal: Refusal) -> Status {
    let info = |reason: &str, domain: &str, metadata: &[(&str, &str)]| rpc::ErrorInfo {
        reason: reason.into(),
        domain: domain.into(),
        metadata: metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
    };
    match refusal {
        Refusal::Unauthenticated => unauthenticated(Invalid::Missing),
        Refusal::Denied(permission, resource) => {
            let (permission, resource) = (permission.name(), clipped(&resource));
            let text = format!(
                "User not authorized to perform this action. Permission '{permission}' denied on resource '{resource}' (or it may not exist)."
            );
            let metadata = [("permission", permission), ("resource", &resource)];
            with_error_info(Code::PermissionDenied, text, info("IAM_PERMISSION_DENIED", IAM_DOMAIN, &metadata))
        }
        Refusal::Name(error) => to_status(error.into()),
        Refusal::Exceeded(exceeded) => {
            let (limit, value) = (exceeded.limit, exceeded.value.to_string());
            let text = format!("Quota exceeded: project {} has reached {limit}, which is {value}.", exceeded.project);
            let metadata = [("quota_limit", limit), ("quota_limit_value", value.as_str()), ("project", &exceeded.project)];
            with_error_info(Code::ResourceExhausted, text, info("RATE_LIMIT_EXCEEDED", "googleapis.com", &metadata))
        }
        Refusal::Failed(error) => to_status(error),
    }
}

/// UNAUTHENTICATED, with what is wrong with the credentials; UNAVAILABLE when that could not be found out.
pub fn unauthenticated(reason: Invalid) -> Status {
    let code = if reason == Invalid::Provider { Code::Unavailable } else { Code::Unauthenticated };
    with_details(code, format!("Request had invalid authentication credentials: {reason}."))
}

/// A status whose details are present but empty.
pub fn with_details(code: Code, message: String) -> Status {
    let details = encode_details(code, &message, Vec::new());
    Status::with_details(code, message, details)
}

/// A status that explains itself with an `ErrorInfo`: as the first detail and, unless it is long, as a trailer of its own.
pub fn with_error_info(code: Code, message: String, info: rpc::ErrorInfo) -> Status {
    let encoded = info.encode_to_vec();
    let mut trailers = MetadataMap::new();
    if encoded.len() <= MAX_REPEATED_BYTES {
        trailers.insert_bin(ERROR_INFO_TRAILER, MetadataValue::from_bytes(&encoded));
    }
    let details = encode_details(code, &message, vec![Any { type_url: ERROR_INFO_URL.into(), value: encoded }]);
    Status::with_details_and_metadata(code, message, details, trailers)
}

/// Names some of the ids that failed, under a code that makes clients repeat the others.
pub fn some_ack_ids(failed: &[(String, AckFailure)]) -> Status {
    let message = "Some ack ids failed: those that are named for good, the others are to be repeated.".to_owned();
    with_error_info(Code::Aborted, message, ack_id_info(failed))
}

fn violation_info(violation: &SchemaViolation) -> rpc::ErrorInfo {
    let metadata = [("message", "Message failed schema validation"), ("revisionInfo", &violation.revision_info)];
    rpc::ErrorInfo {
        reason: violation.reason.into(),
        domain: DOMAIN.into(),
        metadata: metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
    }
}

fn ack_id_info(failed: &[(String, AckFailure)]) -> rpc::ErrorInfo {
    rpc::ErrorInfo {
        reason: ACK_ID_REASON.into(),
        domain: DOMAIN.into(),
        metadata: failed.iter().map(|(id, failure)| (id.clone(), failure.as_str().to_owned())).collect(),
    }
}

fn encode_details(code: Code, message: &str, details: Vec<Any>) -> Bytes {
    rpc::Status { code: code as i32, message: message.to_owned(), details }.encode_to_vec().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn details(status: &Status) -> rpc::Status {
        rpc::Status::decode(status.details()).unwrap()
    }

    #[test]
    fn every_status_repeats_its_code_and_message_in_the_details() {
        for error in [Error::NoAckIds, Error::NotFound("t1".into()), Error::Internal("secret path /x".into()), Error::Closing] {
            let status = to_status(error);
            let inner = details(&status);
            assert_eq!((inner.code, inner.message.as_str()), (status.code() as i32, status.message()));
            assert!(inner.details.is_empty());
        }
    }

    #[test]
    fn failed_ack_ids_are_listed_in_the_first_detail_and_in_the_trailer() {
        let failed = vec![("id1".to_owned(), AckFailure::Permanent), ("id2".to_owned(), AckFailure::Transient)];
        let status = to_status(Error::AckIds(failed));
        assert_eq!(status.code(), Code::FailedPrecondition);
        let inner = details(&status);
        assert_eq!(inner.details.len(), 1);
        assert_eq!(inner.details[0].type_url, "type.googleapis.com/google.rpc.ErrorInfo");
        let info = rpc::ErrorInfo::decode(&inner.details[0].value[..]).unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("PERMANENT_FAILURE_INVALID_ACK_ID", "pubsub.googleapis.com"));
        assert_eq!(info.metadata["id1"], "PERMANENT_FAILURE_INVALID_ACK_ID");
        assert!(info.metadata["id2"].starts_with("TRANSIENT_FAILURE_"));
        let trailer = status.metadata().get_bin("google.rpc.errorinfo-bin").unwrap().to_bytes().unwrap();
        assert_eq!(rpc::ErrorInfo::decode(trailer).unwrap(), info);
    }

    #[test]
    fn a_long_list_of_failed_ids_is_sent_once() {
        let failed = (0..40).map(|n| (format!("{n:0>140}"), AckFailure::Permanent)).collect();
        let status = to_status(Error::AckIds(failed));
        let info = rpc::ErrorInfo::decode(&details(&status).details[0].value[..]).unwrap();
        assert_eq!(info.metadata.len(), 40);
        assert!(status.metadata().is_empty());
        assert!(status.details().len() < 8 << 10);
    }

    #[test]
    fn a_message_against_its_schema_is_explained_by_reason_and_revision() {
        let violation = SchemaViolation { reason: "INVALID_JSON_AVRO_MESSAGE", revision_info: "revision_id=0a1b2c3d".into() };
        let status = to_status(Error::SchemaViolation(Box::new(violation)));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(status.message(), "Invalid data in message: Message failed schema validation.");
        let info = rpc::ErrorInfo::decode(&details(&status).details[0].value[..]).unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("INVALID_JSON_AVRO_MESSAGE", "pubsub.googleapis.com"));
        assert_eq!(info.metadata["message"], "Message failed schema validation");
        assert_eq!(info.metadata["revisionInfo"], "revision_id=0a1b2c3d");
    }

    #[test]
    fn internal_texts_do_not_reach_the_caller() {
        for error in [Error::Internal("/var/x".into()), Error::Unavailable("/var/x".into()), Error::Full("/var/x".into())] {
            let status = to_status(error);
            assert!(!status.message().contains("/var/x"));
            assert!(!String::from_utf8_lossy(status.details()).contains("/var/x"));
        }
    }
}
