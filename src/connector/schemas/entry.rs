//! A schema as remembered: its revisions are compiled when a message first needs them.

use std::sync::OnceLock;

use crate::{
    connector::{SchemaViolation, catalog},
    model::{EncodedMessage, Encoding, Schema, SchemaSettings, SchemaType},
    rules::schema::{CompiledSchema, SchemaError},
};

/// A schema as remembered.
#[derive(Debug)]
pub struct SchemaEntry {
    pub schema: Schema,
    /// Version of the record.
    pub version: u64,
    /// One for each revision.
    compiled: Vec<OnceLock<Result<CompiledSchema, SchemaError>>>,
}

impl catalog::Entry for SchemaEntry {
    fn version(&self) -> u64 {
        self.version
    }
    fn retire(&self) {}
}

/// What clients look for in the details of a violation. Those of protocol buffers are named after those of Avro.
pub(super) fn reason(kind: SchemaType, encoding: Encoding) -> &'static str {
    match (kind, encoding) {
        (SchemaType::Avro, Encoding::Json) => "INVALID_JSON_AVRO_MESSAGE",
        (SchemaType::Avro, Encoding::Binary) => "INVALID_BINARY_AVRO_MESSAGE",
        (SchemaType::ProtocolBuffer, Encoding::Json) => "INVALID_JSON_PROTO_MESSAGE",
        (SchemaType::ProtocolBuffer, Encoding::Binary) => "INVALID_BINARY_PROTO_MESSAGE",
    }
}

fn encoding_name(encoding: Encoding) -> &'static str {
    match encoding {
        Encoding::Json => "JSON",
        Encoding::Binary => "BINARY",
    }
}

impl SchemaEntry {
    pub fn new(schema: Schema, version: u64) -> Self {
        let compiled = schema.revisions.iter().map(|_| OnceLock::new()).collect();
        Self { schema, version, compiled }
    }

    fn compiled(&self, at: usize) -> &Result<CompiledSchema, SchemaError> {
        self.compiled[at].get_or_init(|| CompiledSchema::compile(&self.schema.revisions[at].definition))
    }

    /// True when no revision that a topic allows is still to be compiled.
    pub fn is_warm(&self, settings: &SchemaSettings) -> bool {
        self.allowed(settings).all(|at| self.compiled[at].get().is_some())
    }

    /// Indexes of the revisions that a topic allows, the newest first.
    fn allowed(&self, settings: &SchemaSettings) -> impl Iterator<Item = usize> {
        let (first, last) = (settings.first_sequence.unwrap_or(0), settings.last_sequence.unwrap_or(u64::MAX));
        let revisions = self.schema.revisions.iter().enumerate().rev();
        revisions.filter(move |(_, revision)| (first..=last).contains(&revision.sequence)).map(|(at, _)| at)
    }

    /// Checks a message against the revisions that its topic allows and notes the one that fits in its attributes.
    ///
    /// # Errors
    /// None fits; what the last one says.
    pub fn apply(&self, settings: &SchemaSettings, message: &EncodedMessage) -> Result<EncodedMessage, SchemaViolation> {
        let mut failure = "the topic allows no revision that exists".to_owned();
        for at in self.allowed(settings) {
            let revision = &self.schema.revisions[at];
            let outcome = match self.compiled(at) {
                Ok(compiled) => compiled.validate(message.data(), settings.encoding).map_err(|e| e.to_string()),
                Err(error) => Err(error.to_string()),
            };
            match outcome {
                Ok(()) => {
                    return Ok(message.with_attributes([
                        ("googclient_schemaencoding", encoding_name(settings.encoding)),
                        ("googclient_schemaname", self.schema.name.as_str()),
                        ("googclient_schemarevisionid", &revision.id),
                    ]));
                }
                Err(why) => failure = format!("last checked revision: revision_id={} failed with status: {why}", revision.id),
            }
        }
        let kind = self.schema.revisions.last().map_or(SchemaType::Avro, |revision| revision.definition.kind());
        let name = &self.schema.name;
        let revision_info = format!("Could not validate message with any schema revision for schema: {name}, {failure}");
        Err(SchemaViolation { reason: reason(kind, settings.encoding), revision_info })
    }
}
