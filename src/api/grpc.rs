//! The gRPC services, one file each: handlers convert, call the connector and convert back.

use std::sync::Arc;

use tonic::codec::CompressionEncoding;

#[cfg(feature = "transforms")]
use super::proto::landline::message_transforms_server::MessageTransformsServer;
#[cfg(feature = "schemas")]
use super::proto::pubsub::schema_service_server::SchemaServiceServer;
use super::proto::{
    externalscaler::external_scaler_server::ExternalScalerServer,
    iam::iam_policy_server::IamPolicyServer,
    pubsub::{publisher_server::PublisherServer, subscriber_server::SubscriberServer},
};
use crate::{connector::Connector, model::limits::MAX_REQUEST_BYTES};

pub mod delivery;
mod front;
pub mod gate;
pub mod iam;
pub mod publisher;
pub mod scaler;
#[cfg(feature = "schemas")]
pub mod schema;
pub mod subscriber;
#[cfg(feature = "transforms")]
pub mod transforms;

pub use front::Front;
pub use gate::Gate;
pub use iam::IamPolicyService;
pub use publisher::PublisherService;
pub use scaler::ExternalScalerService;
#[cfg(feature = "schemas")]
pub use schema::SchemaService;
pub use subscriber::SubscriberService;
#[cfg(feature = "transforms")]
pub use transforms::MessageTransformsService;

// Requests may be compressed, answers are not: clients announce gzip whether they want it or not, and compressing every
// StreamingPull response for them would cost far more than sending it.

/// The Publisher service, ready to be routed to. Decompressed requests may have up to 10 MiB; larger ones are refused with
/// INVALID_ARGUMENT.
pub fn publisher(connector: Arc<Connector>, gate: Gate) -> Front<PublisherServer<PublisherService>> {
    Front::new(
        PublisherServer::new(PublisherService::new(connector, gate))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}

/// The IAMPolicy service, ready to be routed to.
pub fn iam(connector: Arc<Connector>, gate: Gate) -> Front<IamPolicyServer<IamPolicyService>> {
    Front::new(
        IamPolicyServer::new(IamPolicyService::new(connector, gate))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}

/// The SchemaService, ready to be routed to.
#[cfg(feature = "schemas")]
pub fn schemas(connector: Arc<Connector>, gate: Gate) -> Front<SchemaServiceServer<SchemaService>> {
    Front::new(
        SchemaServiceServer::new(SchemaService::new(connector, gate))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}

/// The methods on message transforms, ready to be routed to.
#[cfg(feature = "transforms")]
pub fn transforms(connector: Arc<Connector>, gate: Gate) -> Front<MessageTransformsServer<MessageTransformsService>> {
    Front::new(
        MessageTransformsServer::new(MessageTransformsService::new(connector, gate)).max_decoding_message_size(MAX_REQUEST_BYTES),
    )
}

/// The external scaler for KEDA, ready to be routed to.
pub fn scaler(connector: Arc<Connector>, gate: Gate) -> Front<ExternalScalerServer<ExternalScalerService>> {
    Front::new(
        ExternalScalerServer::new(ExternalScalerService::new(connector, gate)).max_decoding_message_size(MAX_REQUEST_BYTES),
    )
}

/// The Subscriber service, ready to be routed to; the same bounds.
pub fn subscriber(connector: Arc<Connector>, gate: Gate) -> Front<SubscriberServer<SubscriberService>> {
    Front::new(
        SubscriberServer::new(SubscriberService::new(connector, gate))
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .accept_compressed(CompressionEncoding::Gzip)
            .accept_compressed(CompressionEncoding::Deflate),
    )
}
