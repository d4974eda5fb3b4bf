//! Protocol buffer schemas: compiled by protox, then kept as plain tables of what a message check needs.

mod binary;
mod compatibility;
mod compile;
mod json;
mod nesting;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

pub(super) use compatibility::check_change;

/// A compiled schema.
#[derive(Debug)]
pub(super) struct Schema {
    messages: Vec<Message>,
    enums: Vec<Enum>,
    root: MessageId,
}

/// Index of a message type in its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MessageId(usize);

/// Index of an enum type in its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct EnumId(usize);

#[derive(Debug)]
struct Message {
    /// With its package.
    name: String,
    fields: Vec<Field>,
    /// Where the field of this number is in `fields`; extensions included.
    by_number: HashMap<u32, usize>,
    /// The same by name in the source and by name in JSON; extensions are `[full.name]`.
    by_name: HashMap<String, usize>,
    /// How many fields are required.
    required: usize,
    /// How JSON writes it, if that is not an object of its fields.
    well_known: Option<WellKnown>,
}

#[derive(Debug)]
struct Field {
    name: String,
    number: u32,
    kind: Kind,
    cardinality: Cardinality,
    /// Name of the oneof it is in.
    oneof: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cardinality {
    Required,
    Optional,
    Repeated,
    /// A repeated message of a key and a value.
    Map,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Double,
    Float,
    Int32,
    Int64,
    Uint32,
    Uint64,
    Sint32,
    Sint64,
    Fixed32,
    Fixed64,
    Sfixed32,
    Sfixed64,
    Bool,
    /// Only proto3 asks for UTF-8 on the wire.
    String {
        utf8: bool,
    },
    Bytes,
    Message(MessageId),
    Group(MessageId),
    Enum(EnumId),
}

#[derive(Debug)]
struct Enum {
    name: String,
    values: HashMap<String, i32>,
    numbers: HashSet<i32>,
    /// Takes only its own values, as in proto2.
    closed: bool,
}

/// Types from google/protobuf that JSON writes in a way of their own. They can only come with compiled files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WellKnown {
    Any,
    Timestamp,
    Duration,
    FieldMask,
    Struct,
    Value,
    ListValue,
    /// A message around one scalar.
    Wrapper,
}

impl Schema {
    /// Compiles the source of one `.proto` file without imports and with exactly one message at its top level.
    ///
    /// # Errors
    /// What is wrong and where.
    pub(super) fn from_source(source: &str) -> Result<Self, String> {
        compile::from_source(source)
    }

    /// Takes an encoded `FileDescriptorSet` and the full name of a message in it.
    ///
    /// # Errors
    /// What is wrong and where.
    pub(super) fn from_descriptors(files: &[u8], root_message: &str) -> Result<Self, String> {
        compile::from_descriptors(files, root_message)
    }

    pub(super) fn validate_json(&self, data: &[u8]) -> Result<(), String> {
        json::validate(self, data)
    }

    pub(super) fn validate_binary(&self, data: &[u8]) -> Result<(), String> {
        binary::validate(self, data)
    }

    fn message(&self, id: MessageId) -> &Message {
        &self.messages[id.0]
    }

    fn enumeration(&self, id: EnumId) -> &Enum {
        &self.enums[id.0]
    }
}

impl Enum {
    fn has(&self, number: i32) -> bool {
        !self.closed || self.numbers.contains(&number)
    }
}

impl Message {
    /// The first required field whose index is not in `seen`.
    fn missing<'m>(&'m self, seen: &HashSet<usize>) -> Option<&'m Field> {
        let is_missing = |(index, field): &(usize, &Field)| field.cardinality == Cardinality::Required && !seen.contains(index);
        self.fields.iter().enumerate().find(is_missing).map(|(_, field)| field)
    }
}
