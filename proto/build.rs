//! Compiles `proto/**` into Rust code and descriptor sets, without protoc.
//!
//! Two things differ from a plain run. The fields in `OPAQUE` become `bytes` before code is generated, so that messages
//! pass through the server as they were encoded by their publisher. The descriptors stored for reflection and REST are
//! the true ones, with the HTTP bindings.

use std::{env, error::Error, fs, path::PathBuf};

use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};

/// The directory of the `.proto` files, relative to the package.
const ROOT: &str = "proto";

/// Every file whose types or options the server needs.
const FILES: [&str; 11] = [
    "google/pubsub/v1/pubsub.proto",
    "google/pubsub/v1/schema.proto",
    "google/iam/v1/iam_policy.proto",
    "google/iam/v1/policy.proto",
    "google/iam/v1/options.proto",
    "google/type/expr.proto",
    "google/rpc/status.proto",
    "google/rpc/error_details.proto",
    "google/rpc/code.proto",
    "landline/v1/transforms.proto",
    "keda/externalscaler.proto",
];

/// Message fields whose value stays encoded: file, message, field. On the wire a submessage and `bytes` are the same.
const OPAQUE: [(&str, &str, &str); 2] = [
    ("google/pubsub/v1/pubsub.proto", "PublishRequest", "messages"),
    ("google/pubsub/v1/pubsub.proto", "ReceivedMessage", "message"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={ROOT}");
    let out = PathBuf::from(env::var("OUT_DIR")?);

    let mut compiler = protox::Compiler::new([ROOT])?;
    compiler.include_imports(true).open_files(FILES)?;
    fs::write(out.join("descriptors.bin"), compiler.encode_file_descriptor_set())?;

    // Only this set holds the comments of the sources. Nothing in the generated code refers to the options in google/api.
    let mut set = compiler.include_source_info(true).file_descriptor_set();
    set.file.retain(|file| !file.name().starts_with("google/api/"));
    make_opaque(&mut set)?;
    tonic_prost_build::configure()
        .btree_map(".")
        .bytes(".")
        .codec_path("crate::api::codec::Codec")
        .out_dir(&out)
        // The stored descriptors above are the true ones; tonic must not write the changed ones beside them.
        .skip_protoc_run()
        .emit_rerun_if_changed(false)
        .compile_fds(set)?;
    Ok(())
}

/// Turns the `OPAQUE` fields into `bytes`; fails if one of them no longer exists.
fn make_opaque(set: &mut FileDescriptorSet) -> Result<(), String> {
    for (file, message, field) in OPAQUE {
        let found = set
            .file
            .iter_mut()
            .filter(|candidate| candidate.name() == file)
            .flat_map(|candidate| candidate.message_type.iter_mut())
            .filter(|candidate| candidate.name() == message)
            .flat_map(|candidate| candidate.field.iter_mut())
            .find(|candidate| candidate.name() == field)
            .ok_or_else(|| format!("{file} has no field {message}.{field}"))?;
        found.set_type(Type::Bytes);
        found.type_name = None;
    }
    Ok(())
}
