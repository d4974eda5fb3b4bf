//! Schemas: whether a definition is one, whether a message follows it, whether a revision may follow another.
//!
//! Everything here works on hostile input: depth, work and memory are bounded by the size of what was sent.

mod avro;
mod proto;

use crate::model::{Definition, Encoding, limits::MAX_SCHEMA_BYTES, text::clipped};

/// A definition ready for use.
#[derive(Debug)]
pub struct CompiledSchema(Language);

#[derive(Debug)]
enum Language {
    Avro(avro::Schema),
    Proto(proto::Schema),
}

/// Why a definition can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaError {
    #[error("The schema definition is empty.")]
    Empty,
    #[error(
        "The schema definition is too long. You passed {bytes} bytes in the request, but the maximum value is {MAX_SCHEMA_BYTES}."
    )]
    TooLong { bytes: usize },
    /// Holds the place and what is wrong there.
    #[error("The schema definition is invalid: {0}.")]
    Invalid(String),
    /// The definition is legal but can't follow the one before it. Holds the place and the difference.
    #[error("The schema revision is incompatible with the previous one: {0}.")]
    Incompatible(String),
}

/// Why a message does not follow a schema: the place and what is wrong there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(String);

impl CompiledSchema {
    /// Checks a definition and prepares it. Takes milliseconds for the largest ones.
    ///
    /// # Errors
    /// [`SchemaError`] naming the place.
    pub fn compile(definition: &Definition) -> Result<Self, SchemaError> {
        match definition.len() {
            0 => return Err(SchemaError::Empty),
            bytes if bytes > MAX_SCHEMA_BYTES => return Err(SchemaError::TooLong { bytes }),
            _ => {}
        }
        let language = match definition {
            Definition::Avro(text) => avro::Schema::parse(text).map(Language::Avro),
            Definition::Proto(source) => proto::Schema::from_source(source).map(Language::Proto),
            Definition::CompiledProto { root_message, files } => {
                proto::Schema::from_descriptors(files, root_message).map(Language::Proto)
            }
        };
        language.map(Self).map_err(|e| SchemaError::Invalid(clipped(&e).into_owned()))
    }

    /// Checks a message's data.
    ///
    /// # Errors
    /// [`Violation`] naming the first thing that is wrong.
    pub fn validate(&self, data: &[u8], encoding: Encoding) -> Result<(), Violation> {
        match (&self.0, encoding) {
            (Language::Avro(schema), Encoding::Json) => schema.validate_json(data),
            (Language::Avro(schema), Encoding::Binary) => schema.validate_binary(data),
            (Language::Proto(schema), Encoding::Json) => schema.validate_json(data),
            (Language::Proto(schema), Encoding::Binary) => schema.validate_binary(data),
        }
        .map_err(|e| Violation(clipped(&e).into_owned()))
    }

    /// Checks that this definition may come after `previous` in the same schema. Avro: each can read what the other wrote.
    /// Protocol buffers: only optional fields come or go.
    ///
    /// # Errors
    /// [`SchemaError::Incompatible`] naming the first difference that is not allowed.
    pub fn follows(&self, previous: &Self) -> Result<(), SchemaError> {
        match (&self.0, &previous.0) {
            (Language::Avro(new), Language::Avro(old)) => avro::check_mutual(new, old),
            (Language::Proto(new), Language::Proto(old)) => proto::check_change(new, old),
            _ => Err("the type of a schema can't change".to_owned()),
        }
        .map_err(|e| SchemaError::Incompatible(clipped(&e).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AVRO: &str = r#"{"type":"record","name":"R","fields":[{"name":"f","type":"string"}]}"#;
    const PROTO: &str = "syntax = 'proto3'; message M { string f = 1; }";

    #[test]
    fn definitions_are_bounded_in_bytes() {
        let filled = |bytes: usize| Definition::Proto(format!("{PROTO}{}", " ".repeat(bytes - PROTO.len())));
        assert!(CompiledSchema::compile(&filled(MAX_SCHEMA_BYTES)).is_ok());
        let bytes = MAX_SCHEMA_BYTES + 1;
        assert_eq!(CompiledSchema::compile(&filled(bytes)).err(), Some(SchemaError::TooLong { bytes }));
        assert_eq!(CompiledSchema::compile(&Definition::Avro(String::new())).err(), Some(SchemaError::Empty));
    }

    #[test]
    fn a_message_is_judged_by_its_language_and_encoding() {
        let avro = CompiledSchema::compile(&Definition::Avro(AVRO.into())).unwrap();
        let proto = CompiledSchema::compile(&Definition::Proto(PROTO.into())).unwrap();
        for (schema, binary, wrong) in [(&avro, b"\x02x".as_slice(), b"\x0a\x01x".as_slice()), (&proto, b"\x0a\x01x", b"\x02x")] {
            assert_eq!(schema.validate(br#"{"f":"x"}"#, Encoding::Json), Ok(()));
            assert_eq!(schema.validate(binary, Encoding::Binary), Ok(()));
            assert!(schema.validate(wrong, Encoding::Binary).is_err());
            assert!(schema.validate(binary, Encoding::Json).is_err());
        }
        assert!(avro.follows(&proto).is_err());
        assert_eq!(avro.follows(&avro), Ok(()));
    }

    #[test]
    fn an_error_does_not_quote_a_message_at_length() {
        let schema = CompiledSchema::compile(&Definition::Avro(AVRO.replace("string", "int"))).unwrap();
        let message = format!("{{\"f\":\"{}\"}}", "é".repeat(100_000));
        let error = schema.validate(message.as_bytes(), Encoding::Json).unwrap_err().to_string();
        assert!(error.len() < 1000, "{}", error.len());
    }
}
