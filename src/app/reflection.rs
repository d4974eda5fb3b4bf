//! gRPC reflection, version 1 and its alpha, which older tools ask for.

use tonic_reflection::server::Builder;

use super::dispatch::Services;
use crate::api::proto;

/// Adds both versions.
///
/// # Errors
/// When the descriptors don't fit together.
pub fn add(services: Services) -> Result<Services, String> {
    let builder = || {
        Builder::configure()
            .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = builder().build_v1().map_err(|e| e.to_string())?;
    let v1alpha = builder().build_v1alpha().map_err(|e| e.to_string())?;
    Ok(services.with(v1).with(v1alpha))
}
