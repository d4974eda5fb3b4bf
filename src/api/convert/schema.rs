//! Schemas.

use super::timestamp_ms;
use crate::{
    api::proto::pubsub::{self as pb, schema::Type},
    connector::{
        draft::{CompiledDraft, DefinitionDraft},
        schemas::{Detail, SchemaView},
    },
    model::{Definition, SchemaType},
};

/// A definition as a caller sent it; the name and the revision are the request's to say.
pub fn definition_draft(schema: pb::Schema) -> DefinitionDraft {
    let kind = match Type::try_from(schema.r#type) {
        Ok(Type::Avro) => Some(SchemaType::Avro),
        Ok(Type::ProtocolBuffer) => Some(SchemaType::ProtocolBuffer),
        _ => None,
    };
    let compiled = schema.configuration.map(|pb::schema::Configuration::CompiledProtoSchema(compiled)| CompiledDraft {
        root_message: compiled.root_message,
        files: compiled.compiled_bytes.into(),
    });
    DefinitionDraft { kind, text: schema.definition, compiled }
}

/// A revision of a schema as callers see it.
pub fn schema(view: SchemaView) -> pb::Schema {
    let kind = match view.kind {
        SchemaType::Avro => Type::Avro,
        SchemaType::ProtocolBuffer => Type::ProtocolBuffer,
    };
    let mut schema = pb::Schema {
        name: view.name.to_string(),
        r#type: kind.into(),
        revision_id: view.revision_id,
        revision_create_time: Some(timestamp_ms(view.create_time_ms)),
        ..pb::Schema::default()
    };
    match view.definition {
        None => {}
        Some(Definition::Avro(text) | Definition::Proto(text)) => schema.definition = text,
        Some(Definition::CompiledProto { root_message, files }) => {
            let compiled = pb::CompiledProtoSchema { root_message, compiled_bytes: files.into() };
            schema.configuration = Some(pb::schema::Configuration::CompiledProtoSchema(compiled));
        }
    }
    schema
}

/// How much to show: what the caller asked for, or what the method shows otherwise.
pub fn detail(view: i32, otherwise: Detail) -> Detail {
    match pb::SchemaView::try_from(view) {
        Ok(pb::SchemaView::Basic) => Detail::Basic,
        Ok(pb::SchemaView::Full) => Detail::Full,
        _ => otherwise,
    }
}
