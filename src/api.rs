//! Transports: gRPC and REST. Both share every validator and the one table from errors to status.

pub mod codec;
pub mod convert;
pub mod grpc;
pub mod proto;
pub mod rest;
pub mod status;
