//! Avro schemas: parsed into an arena whose types refer to each other by index, so that a type may contain itself.
//!
//! Source: the Apache Avro specification, 1.11 and 1.12. Only records can be schemas of a topic.

mod binary;
mod compatibility;
mod json;
mod parser;

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};

pub(super) use compatibility::check_mutual;

/// A parsed schema.
#[derive(Debug)]
pub(super) struct Schema {
    types: Vec<Type>,
    root: TypeId,
}

/// Index of a type in its schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TypeId(u32);

#[derive(Debug)]
enum Type {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes { decimal: Option<Decimal> },
    String,
    Array(TypeId),
    Map(TypeId),
    Union(Union),
    Record(Record),
    Enum(Enum),
    Fixed { name: Name, size: usize, decimal: Option<Decimal> },
}

/// The logical type `decimal`; the only one that two schemas must agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Decimal {
    precision: u64,
    scale: u64,
}

#[derive(Debug, Clone, Default)]
struct Name {
    /// With its namespace, if it has one.
    full: String,
    /// Other full names a reader knows it by.
    aliases: Vec<String>,
}

#[derive(Debug)]
struct Union {
    branches: Vec<TypeId>,
    /// The branches by what JSON calls them.
    by_name: HashMap<String, TypeId>,
}

#[derive(Debug, Default)]
struct Record {
    name: Name,
    fields: Vec<Field>,
    /// Where a field of this name is in `fields`.
    positions: HashMap<String, usize>,
}

#[derive(Debug)]
struct Field {
    name: String,
    aliases: Vec<String>,
    schema: TypeId,
    has_default: bool,
}

#[derive(Debug)]
struct Enum {
    name: Name,
    symbols: HashSet<String>,
    has_default: bool,
}

impl Schema {
    /// Parses a definition.
    ///
    /// # Errors
    /// What is wrong and where.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        parser::parse(text)
    }

    pub(super) fn validate_json(&self, data: &[u8]) -> Result<(), String> {
        json::validate(self, data)
    }

    pub(super) fn validate_binary(&self, data: &[u8]) -> Result<(), String> {
        binary::validate(self, data)
    }

    fn get(&self, id: TypeId) -> &Type {
        &self.types[id.0 as usize]
    }
}

impl Name {
    /// Without the namespace.
    fn short(&self) -> &str {
        self.full.rsplit('.').next().unwrap_or_default()
    }
}

impl Union {
    fn has_null(&self) -> bool {
        self.by_name.contains_key("null")
    }
}

impl Type {
    /// What JSON calls a union's branch of this type: the full name of a named type, else the type itself.
    fn branch_name(&self) -> &str {
        match self {
            Self::Null => "null",
            Self::Boolean => "boolean",
            Self::Int => "int",
            Self::Long => "long",
            Self::Float => "float",
            Self::Double => "double",
            Self::Bytes { .. } => "bytes",
            Self::String => "string",
            Self::Array(_) => "array",
            Self::Map(_) => "map",
            Self::Union(_) => "union",
            Self::Record(record) => &record.name.full,
            Self::Enum(symbols) => &symbols.name.full,
            Self::Fixed { name, .. } => &name.full,
        }
    }
}
