//! Generated code of the API: messages, server traits and clients.
//!
//! It comes from `proto/**` by way of `proto/build.rs`. Fields of type `bytes` are [`bytes::Bytes`] and maps are
//! `BTreeMap`. `pubsub::PublishRequest::messages` and `pubsub::ReceivedMessage::message` hold encoded
//! `google.pubsub.v1.PubsubMessage`s; decode them with [`pubsub::PubsubMessage`] where the content matters.

/// Encoded `google.protobuf.FileDescriptorSet` of every service and of all its imports, with the HTTP bindings and the
/// true types of the fields that the generated code keeps encoded.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

pub use self::packages::google::{iam::v1 as iam, pubsub::v1 as pubsub, rpc, r#type as expr};
pub use self::packages::{externalscaler, landline::v1 as landline};

/// The packages as the generated code expects them to be nested.
#[allow(missing_docs, clippy::all, clippy::unwrap_used)]
mod packages {
    pub mod google {
        pub mod iam {
            pub mod v1 {
                include!(concat!(env!("OUT_DIR"), "/google.iam.v1.rs"));
            }
        }
        pub mod pubsub {
            pub mod v1 {
                include!(concat!(env!("OUT_DIR"), "/google.pubsub.v1.rs"));
            }
        }
        pub mod rpc {
            include!(concat!(env!("OUT_DIR"), "/google.rpc.rs"));
        }
        pub mod r#type {
            include!(concat!(env!("OUT_DIR"), "/google.r#type.rs"));
        }
    }
    pub mod externalscaler {
        include!(concat!(env!("OUT_DIR"), "/externalscaler.rs"));
    }
    pub mod landline {
        pub mod v1 {
            include!(concat!(env!("OUT_DIR"), "/landline.v1.rs"));
        }
    }
}
