//! Messages in Avro's JSON encoding, checked while they are read: nothing of them is kept.
//!
//! The encoding is stricter than plain JSON: the value of a union is `null` or an object with the branch's name as its one
//! key, bytes are strings of the code points 0 to 255, and every field of a record is there and no other.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};
use serde_json::Value;

use super::{Record, Schema, Type, TypeId, Union};

/// Checks one message. Nesting is bounded by the JSON parser, which gives up after 128 levels.
pub(super) fn validate(schema: &Schema, data: &[u8]) -> Result<(), String> {
    let mut json = serde_json::Deserializer::from_slice(data);
    let root = Expected { schema, id: schema.root, as_default: false };
    root.deserialize(&mut json).and_then(|()| json.end()).map_err(|e| e.to_string())
}

/// Checks the default value of a field. It is written like a message, except that a union's value has no branch name and
/// that fields of a record may be missing if they have a default themselves.
pub(super) fn check_default(schema: &Schema, id: TypeId, value: &Value) -> Result<(), String> {
    Expected { schema, id, as_default: true }.deserialize(value).map_err(|e| e.to_string())
}

/// What must come next.
#[derive(Clone, Copy)]
struct Expected<'s> {
    schema: &'s Schema,
    id: TypeId,
    as_default: bool,
}

impl<'s> Expected<'s> {
    fn kind(&self) -> &'s Type {
        self.schema.get(self.id)
    }

    fn at(&self, id: TypeId) -> Self {
        Self { id, ..*self }
    }

    /// Chooses the branch of a union in a default value, which does not name it: the first that takes the value itself,
    /// whatever may be inside it. To try them all with their parts would take exponential time.
    fn settle(self, takes: impl Fn(&Type) -> bool) -> Self {
        match self.kind() {
            Type::Union(union) if self.as_default => {
                union.branches.iter().map(|id| self.at(*id)).find(|branch| takes(branch.kind())).unwrap_or(self)
            }
            _ => self,
        }
    }

    /// Decides about a value without parts.
    fn simple<E: Error>(self, takes: impl Fn(&Type) -> bool, found: Unexpected<'_>) -> Result<(), E> {
        let settled = self.settle(&takes);
        if takes(settled.kind()) { Ok(()) } else { Err(E::invalid_value(found, &settled)) }
    }

    /// Reads an object as a record.
    fn record<'de, A: MapAccess<'de>>(&self, record: &Record, mut object: A) -> Result<(), A::Error> {
        let mut seen = vec![false; record.fields.len()];
        while let Some(position) = object.next_key_seed(FieldName(record))? {
            let field = &record.fields[position];
            if std::mem::replace(&mut seen[position], true) {
                return Err(A::Error::custom(format_args!("field {} of {} is there twice", field.name, record.name.full)));
            }
            object.next_value_seed(self.at(field.schema))?;
        }
        let missing = |(field, seen): &(&super::Field, bool)| !(*seen || self.as_default && field.has_default);
        match record.fields.iter().zip(seen).find(missing) {
            None => Ok(()),
            Some((field, _)) => Err(A::Error::custom(format_args!("field {} of {} is missing", field.name, record.name.full))),
        }
    }

    /// Reads an object as the value of a union's branch.
    fn branch<'de, A: MapAccess<'de>>(&self, union: &'s Union, mut object: A) -> Result<(), A::Error> {
        let name = BranchName(union);
        let Some(branch) = object.next_key_seed(name)? else { return Err(A::Error::invalid_length(0, self)) };
        object.next_value_seed(self.at(branch))?;
        match object.next_key_seed(name) {
            Ok(None) => Ok(()),
            _ => Err(A::Error::custom("the value of a union has more than one branch")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for Expected<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Expected<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Type::Int => f.write_str("an int (a whole number of 32 bits)"),
            Type::Long => f.write_str("a long (a whole number of 64 bits)"),
            Type::Bytes { .. } => f.write_str("bytes (a string of the code points 0 to 255)"),
            Type::Fixed { name, size, .. } => write!(f, "{} (a string of {size} of the code points 0 to 255)", name.full),
            Type::Enum(symbols) => write!(f, "a symbol of {}", symbols.name.full),
            Type::Record(record) => write!(f, "an object for {}", record.name.full),
            Type::Union(union) => {
                let null = if union.has_null() { "null or " } else { "" };
                write!(f, "{null}an object with the name of a union's branch as its one key")
            }
            other => f.write_str(other.branch_name()),
        }
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        match self.kind() {
            Type::Union(union) if union.has_null() => Ok(()),
            _ => self.simple(|kind| matches!(kind, Type::Null), Unexpected::Unit),
        }
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<(), E> {
        self.simple(|kind| matches!(kind, Type::Boolean), Unexpected::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<(), E> {
        self.simple(|kind| takes_integer(kind, value.into()), Unexpected::Signed(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<(), E> {
        self.simple(|kind| takes_integer(kind, value.into()), Unexpected::Unsigned(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<(), E> {
        self.simple(|kind| matches!(kind, Type::Float | Type::Double), Unexpected::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<(), E> {
        self.simple(|kind| takes_text(kind, value), Unexpected::Str(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<(), A::Error> {
        let settled = self.settle(|kind| matches!(kind, Type::Array(_)));
        let Type::Array(items) = settled.kind() else { return Err(A::Error::invalid_type(Unexpected::Seq, &settled)) };
        while array.next_element_seed(settled.at(*items))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<(), A::Error> {
        let settled = self.settle(|kind| matches!(kind, Type::Record(_) | Type::Map(_)));
        match settled.kind() {
            Type::Record(record) => settled.record(record, object),
            Type::Union(union) if !self.as_default => settled.branch(union, object),
            Type::Map(values) => {
                while object.next_key::<serde::de::IgnoredAny>()?.is_some() {
                    object.next_value_seed(settled.at(*values))?;
                }
                Ok(())
            }
            _ => Err(A::Error::invalid_type(Unexpected::Map, &settled)),
        }
    }
}

fn takes_integer(kind: &Type, value: i128) -> bool {
    match kind {
        Type::Int => i32::try_from(value).is_ok(),
        Type::Long => i64::try_from(value).is_ok(),
        Type::Float | Type::Double => true,
        _ => false,
    }
}

fn takes_text(kind: &Type, value: &str) -> bool {
    let is_latin = || value.chars().all(|c| u32::from(c) <= 0xff);
    match kind {
        Type::String => true,
        Type::Bytes { .. } => is_latin(),
        Type::Fixed { size, .. } => is_latin() && value.chars().count() == *size,
        Type::Enum(symbols) => symbols.symbols.contains(value),
        // How the reference implementation writes what JSON has no numbers for.
        Type::Float | Type::Double => matches!(value, "NaN" | "Infinity" | "-Infinity"),
        _ => false,
    }
}

/// A key of a record's object; read as the field's position.
struct FieldName<'s>(&'s Record);

impl<'de> DeserializeSeed<'de> for FieldName<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldName<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a field of {}", self.0.name.full)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<usize, E> {
        self.0.positions.get(name).copied().ok_or_else(|| E::custom(format_args!("{} has no field {name:?}", self.0.name.full)))
    }
}

/// The key of a union's value; read as the branch.
#[derive(Clone, Copy)]
struct BranchName<'s>(&'s Union);

impl<'de> DeserializeSeed<'de> for BranchName<'_> {
    type Value = TypeId;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<TypeId, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for BranchName<'_> {
    type Value = TypeId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a union's branch")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<TypeId, E> {
        // `null` is written bare, never as an object.
        self.0
            .by_name
            .get(name)
            .copied()
            .filter(|_| name != "null")
            .ok_or_else(|| E::custom(format_args!("the union has no branch {name:?}")))
    }
}
