//! The gRPC services, one file each: handlers convert, call the connector and convert back.

use std::sync::Arc;

use tonic::codec::CompressionEncoding;

use super::proto::{
    iam::iam_policy_server::IamPolicyServer,
    pubsub::{publisher_server::PublisherServer, subscriber_server::SubscriberServer},
};
use crate::{connector::Connector, model::limits::MAX_REQUEST_BYTES};

pub mod delivery;
mod front;
pub mod iam;
pub mod publisher;
pub mod subscriber;

pub use front::Front;
pub use iam::IamPolicyService;
pub use publisher::PublisherService;
pub use subscriber::SubscriberService;

// Requests may be compressed, answers are not: clients announce gzip whether they want it or not, and compressing every
// StreamingPull response for them would cost far more than sending it.

/// The Publisher service, ready to be routed to. Decompressed requests may have up to 10 MiB; larger ones are refused with
/// INVALID_ARGUMENT.
pub fn publisher(connector: Arc<Connector>) -> Front<PublisherServer<PublisherService>> {
    Front::new(
        PublisherServer::new(PublisherService::new(connector))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}

/// The IAMPolicy service, ready to be routed to.
pub fn iam(connector: Arc<Connector>) -> Front<IamPolicyServer<IamPolicyService>> {
    Front::new(
        IamPolicyServer::new(IamPolicyService::new(connector))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}

/// The Subscriber service, ready to be routed to; the same bounds.
pub fn subscriber(connector: Arc<Connector>) -> Front<SubscriberServer<SubscriberService>> {
    Front::new(
        SubscriberServer::new(SubscriberService::new(connector))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}
