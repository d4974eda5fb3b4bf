//! Schemas as they are stored: a name and its revisions.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::SchemaName;

/// A schema with all of its revisions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schema {
    pub name: SchemaName,
    /// Tells a schema from an earlier one of the same name; random, never 0.
    pub incarnation: u64,
    /// Oldest first, 1 to 20 of them.
    pub revisions: Vec<SchemaRevision>,
}

/// One version of a schema's definition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchemaRevision {
    /// 8 lower-case hexadecimal digits, unique within the schema.
    pub id: String,
    /// Grows with every revision of the schema; tells their order even when others were deleted.
    pub sequence: u64,
    /// Milliseconds since the epoch.
    pub create_time_ms: u64,
    pub definition: Definition,
}

/// What a schema says, as it was given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Definition {
    /// An Avro schema in JSON.
    Avro(String),
    /// The source of one `.proto` file.
    Proto(String),
    /// Compiled `.proto` files.
    CompiledProto {
        /// Full name of the message type.
        root_message: String,
        /// An encoded `google.protobuf.FileDescriptorSet`.
        #[serde(serialize_with = "to_base64", deserialize_with = "from_base64")]
        files: Vec<u8>,
    },
}

/// The language of a definition. All revisions of a schema share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaType {
    Avro,
    ProtocolBuffer,
}

impl Definition {
    /// The definition's language.
    pub fn kind(&self) -> SchemaType {
        match self {
            Self::Avro(_) => SchemaType::Avro,
            Self::Proto(_) | Self::CompiledProto { .. } => SchemaType::ProtocolBuffer,
        }
    }

    /// Bytes of the definition.
    pub fn len(&self) -> usize {
        match self {
            Self::Avro(text) | Self::Proto(text) => text.len(),
            Self::CompiledProto { root_message, files } => root_message.len() + files.len(),
        }
    }

    /// True for a definition that says nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn to_base64<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

fn from_base64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_survives_its_stored_form() {
        let revision = |id: &str, definition| SchemaRevision { id: id.into(), sequence: 1, create_time_ms: 7, definition };
        let schema = Schema {
            name: SchemaName::new("p1", "sch").unwrap(),
            incarnation: u64::MAX,
            revisions: vec![
                revision("00000001", Definition::Avro("{}".into())),
                revision("00000002", Definition::Proto("message é {}".into())),
                revision("00000003", Definition::CompiledProto { root_message: "a.B".into(), files: vec![0, 255, 10] }),
            ],
        };
        let stored = serde_json::to_string(&schema).unwrap();
        assert!(stored.contains("AP8K"), "{stored}");
        assert_eq!(serde_json::from_str::<Schema>(&stored).unwrap(), schema);
    }
}
