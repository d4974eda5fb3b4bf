//! Messages in the JSON mapping of protocol buffers, checked while they are read: nothing of them is kept.
//!
//! Fields have their name in JSON or in the source; unknown ones, a field given twice, two fields of one oneof and missing
//! required fields are refused. `google.protobuf.Any` is refused: its content could be of any size and type.

use std::{collections::HashSet, fmt};

use base64::{
    Engine,
    alphabet::{STANDARD, URL_SAFE},
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};

use super::{Cardinality, Kind, Message, MessageId, Schema, WellKnown};

/// Checks one message. Nesting is bounded by the JSON parser, which gives up after 128 levels.
pub(super) fn validate(schema: &Schema, data: &[u8]) -> Result<(), String> {
    let mut json = serde_json::Deserializer::from_slice(data);
    let root = Slot { schema, kind: Kind::Message(schema.root), shape: Shape::Single, nullable: false };
    root.deserialize(&mut json).and_then(|_| json.end()).map_err(|e| e.to_string())
}

/// A place for a value.
#[derive(Clone, Copy)]
struct Slot<'s> {
    schema: &'s Schema,
    kind: Kind,
    shape: Shape,
    /// Null leaves the field out.
    nullable: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Single,
    List,
    Map,
}

impl<'s> Slot<'s> {
    fn element(self) -> Self {
        Self { shape: Shape::Single, nullable: false, ..self }
    }

    /// The message type of a single value.
    fn single_message(&self) -> Option<&'s Message> {
        match self.kind {
            Kind::Message(id) | Kind::Group(id) if self.shape == Shape::Single => Some(self.schema.message(id)),
            _ => None,
        }
    }

    fn well_known(&self) -> Option<WellKnown> {
        self.single_message().and_then(|message| message.well_known)
    }

    /// What a wrapper message wraps; anything else stays what it is.
    fn unwrapped(self) -> Self {
        match self.single_message() {
            Some(Message { well_known: Some(WellKnown::Wrapper), fields, .. }) => {
                fields.first().map_or(self, |field| Self { kind: field.kind, ..self })
            }
            _ => self,
        }
    }

    fn number<E: Error>(self, number: Number, found: Unexpected<'_>) -> Result<bool, E> {
        let slot = self.unwrapped();
        let fits = slot.well_known() == Some(WellKnown::Value) || slot.shape == Shape::Single && slot.takes_number(number);
        if fits { Ok(true) } else { Err(E::invalid_value(found, &self)) }
    }

    fn takes_number(&self, number: Number) -> bool {
        let within = |low: i128, high: i128| number.whole().is_some_and(|n| (low..=high).contains(&n));
        match self.kind {
            Kind::Double => true,
            Kind::Float => number.approximate().abs() <= f64::from(f32::MAX),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => within(i32::MIN.into(), i32::MAX.into()),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => within(i64::MIN.into(), i64::MAX.into()),
            Kind::Uint32 | Kind::Fixed32 => within(0, u32::MAX.into()),
            Kind::Uint64 | Kind::Fixed64 => within(0, u64::MAX.into()),
            Kind::Enum(id) => match number {
                Number::Whole(n) => i32::try_from(n).is_ok_and(|n| self.schema.enumeration(id).has(n)),
                Number::Real(_) => false,
            },
            Kind::Bool | Kind::String { .. } | Kind::Bytes | Kind::Message(_) | Kind::Group(_) => false,
        }
    }

    fn takes_text(&self, text: &str) -> bool {
        match self.kind {
            Kind::String { .. } => true,
            Kind::Bytes => is_base64(text),
            Kind::Enum(id) => self.schema.enumeration(id).values.contains_key(text),
            Kind::Double | Kind::Float if matches!(text, "NaN" | "Infinity" | "-Infinity") => true,
            Kind::Bool => false,
            Kind::Message(_) | Kind::Group(_) => match self.well_known() {
                Some(WellKnown::Timestamp) => text.parse::<prost_types::Timestamp>().is_ok(),
                Some(WellKnown::Duration) => text.parse::<prost_types::Duration>().is_ok(),
                Some(WellKnown::FieldMask) => !text.contains('_'),
                Some(WellKnown::Value) => true,
                _ => false,
            },
            _ => Number::parse(text).is_some_and(|number| self.takes_number(number)),
        }
    }

    /// Reads an object as a message.
    fn message<'de, A: MapAccess<'de>>(self, id: MessageId, mut object: A) -> Result<(), A::Error> {
        let message = self.schema.message(id);
        let (mut named, mut seen, mut oneofs) = (HashSet::new(), HashSet::new(), HashSet::new());
        while let Some(index) = object.next_key_seed(FieldName(message))? {
            let field = &message.fields[index];
            if !named.insert(index) {
                return Err(A::Error::custom(format_args!("field {} of {} is there twice", field.name, message.name)));
            }
            let shape = match field.cardinality {
                Cardinality::Repeated => Shape::List,
                Cardinality::Map => Shape::Map,
                Cardinality::Required | Cardinality::Optional => Shape::Single,
            };
            let present = object.next_value_seed(Slot { kind: field.kind, shape, nullable: true, ..self })?;
            if let Some(oneof) = field.oneof.as_ref().filter(|_| present)
                && !oneofs.insert(oneof)
            {
                return Err(A::Error::custom(format_args!("two fields of the oneof {oneof} of {} are there", message.name)));
            }
            if present && field.cardinality == Cardinality::Required {
                seen.insert(index);
            }
        }
        if seen.len() == message.required {
            return Ok(());
        }
        let missing = message.missing(&seen).map_or("", |field| &field.name);
        Err(A::Error::custom(format_args!("required field {missing} of {} is missing", message.name)))
    }

    /// Reads an object as a map; its entries are messages of a key and a value.
    fn map<'de, A: MapAccess<'de>>(self, entry: MessageId, mut object: A) -> Result<(), A::Error> {
        let kind_of = |number| {
            let message = self.schema.message(entry);
            message.by_number.get(&number).map(|index| message.fields[*index].kind)
        };
        let (Some(key), Some(value)) = (kind_of(1), kind_of(2)) else { return Err(A::Error::custom("not a map")) };
        let (key, value) = (Slot { kind: key, ..self.element() }, Slot { kind: value, ..self.element() });
        while object.next_key_seed(MapKey(key))?.is_some() {
            object.next_value_seed(value)?;
        }
        Ok(())
    }
}

/// Answers whether the field is present: null leaves it out.
impl<'de> DeserializeSeed<'de> for Slot<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Slot<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.shape, self.kind) {
            (Shape::List, _) => f.write_str("an array"),
            (Shape::Map, _) => f.write_str("an object with the entries of a map"),
            (_, Kind::Message(id) | Kind::Group(id)) => write!(f, "a {}", self.schema.message(id).name),
            (_, Kind::Enum(id)) => write!(f, "a value of {}", self.schema.enumeration(id).name),
            (_, Kind::String { .. }) => f.write_str("a string"),
            (_, Kind::Bytes) => f.write_str("a string of base64"),
            (_, kind) => write!(f, "a value of the type {}", format!("{kind:?}").to_lowercase()),
        }
    }

    fn visit_unit<E: Error>(self) -> Result<bool, E> {
        let is_null_value =
            |kind| matches!(kind, Kind::Enum(id) if self.schema.enumeration(id).name == "google.protobuf.NullValue");
        if self.well_known() == Some(WellKnown::Value) || self.shape == Shape::Single && is_null_value(self.kind) {
            return Ok(true);
        }
        if self.nullable { Ok(false) } else { Err(E::invalid_type(Unexpected::Unit, &self)) }
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<bool, E> {
        let slot = self.unwrapped();
        let fits = slot.well_known() == Some(WellKnown::Value) || slot.shape == Shape::Single && slot.kind == Kind::Bool;
        if fits { Ok(true) } else { Err(E::invalid_type(Unexpected::Bool(value), &self)) }
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<bool, E> {
        self.number(Number::Whole(value.into()), Unexpected::Signed(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<bool, E> {
        self.number(Number::Whole(value.into()), Unexpected::Unsigned(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<bool, E> {
        self.number(Number::Real(value), Unexpected::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<bool, E> {
        let slot = self.unwrapped();
        let fits = slot.shape == Shape::Single && slot.takes_text(value);
        if fits { Ok(true) } else { Err(E::invalid_value(Unexpected::Str(value), &self)) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<bool, A::Error> {
        if self.shape == Shape::List {
            while array.next_element_seed(self.element())?.is_some() {}
            return Ok(true);
        }
        match self.well_known() {
            Some(WellKnown::Value | WellKnown::ListValue) => {
                while array.next_element::<IgnoredAny>()?.is_some() {}
                Ok(true)
            }
            _ => Err(A::Error::invalid_type(Unexpected::Seq, &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<bool, A::Error> {
        match (self.shape, self.kind, self.well_known()) {
            (Shape::Map, Kind::Message(entry), _) => self.map(entry, object)?,
            (_, _, Some(WellKnown::Value | WellKnown::Struct)) => {
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            }
            (_, _, Some(WellKnown::Any)) => return Err(A::Error::custom("google.protobuf.Any is not supported")),
            (Shape::Single, Kind::Message(id) | Kind::Group(id), None) => self.message(id, object)?,
            _ => return Err(A::Error::invalid_type(Unexpected::Map, &self)),
        }
        Ok(true)
    }
}

/// A number as JSON or a string gives it.
#[derive(Clone, Copy)]
enum Number {
    Whole(i128),
    Real(f64),
}

impl Number {
    fn parse(text: &str) -> Option<Self> {
        // What Rust reads as a number beyond the digits, such as "inf" and "+1", is none here.
        let plain = |b: u8| b.is_ascii_digit() || matches!(b, b'-' | b'+' | b'.' | b'e' | b'E');
        if !text.bytes().all(plain) || text.starts_with(['+', '.']) {
            return None;
        }
        let real = || text.parse().ok().filter(|real: &f64| real.is_finite()).map(Self::Real);
        text.parse().ok().map(Self::Whole).or_else(real)
    }

    /// The value if it has no fraction.
    fn whole(self) -> Option<i128> {
        match self {
            Self::Whole(value) => Some(value),
            Self::Real(value) => (value.fract() == 0.0 && value.abs() < 2f64.powi(64)).then_some(value as i128),
        }
    }

    fn approximate(self) -> f64 {
        match self {
            Self::Whole(value) => value as f64,
            Self::Real(value) => value,
        }
    }
}

/// Both alphabets, padded or not.
fn is_base64(text: &str) -> bool {
    let config = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    [&STANDARD, &URL_SAFE].into_iter().any(|alphabet| GeneralPurpose::new(alphabet, config).decode(text).is_ok())
}

/// A key of a message's object; read as the field's index.
struct FieldName<'s>(&'s Message);

impl<'de> DeserializeSeed<'de> for FieldName<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for FieldName<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a field of {}", self.0.name)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<usize, E> {
        self.0.by_name.get(name).copied().ok_or_else(|| E::custom(format_args!("{} has no field {name:?}", self.0.name)))
    }
}

/// A key of a map's object, checked as its type demands.
struct MapKey<'s>(Slot<'s>);

impl<'de> DeserializeSeed<'de> for MapKey<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for MapKey<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<(), E> {
        let fits = match self.0.kind {
            Kind::Bool => matches!(key, "true" | "false"),
            _ => self.0.takes_text(key),
        };
        if fits { Ok(()) } else { Err(E::invalid_value(Unexpected::Str(key), &self)) }
    }
}
