//! Messages in the wire format: every field is known, of its declared type, and the required ones are there.

use std::{collections::HashSet, str};

use super::{Cardinality, Field, Kind, MessageId, Schema};

/// Messages inside each other; what Google's own parsers allow.
const MAX_DEPTH: usize = 100;

const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const LENGTH: u8 = 2;
const START_GROUP: u8 = 3;
const END_GROUP: u8 = 4;
const FIXED32: u8 = 5;

type Result<T> = std::result::Result<T, String>;

pub(super) fn validate(schema: &Schema, data: &[u8]) -> Result<()> {
    let mut input = Input { data, at: 0, end: data.len() };
    message(schema, schema.root, &mut input, None, MAX_DEPTH)
}

/// Reads a message up to the end of the input, or a group up to its end tag. A singular message that is split in several
/// occurrences must be complete in each of them.
fn message(schema: &Schema, id: MessageId, input: &mut Input<'_>, group: Option<u32>, depth: usize) -> Result<()> {
    let message = schema.message(id);
    let depth = depth.checked_sub(1).ok_or_else(|| format!("messages nest deeper than {MAX_DEPTH} levels"))?;
    let mut seen = HashSet::new();
    loop {
        if input.at == input.end {
            match group {
                None => break,
                Some(number) => return Err(input.error(&format!("the group of field {number} has no end"))),
            }
        }
        let (number, wire_type) = input.tag()?;
        if wire_type == END_GROUP {
            match group {
                Some(open) if open == number => break,
                _ => return Err(input.error("the end of a group that is not open")),
            }
        }
        let index = *message
            .by_number
            .get(&number)
            .ok_or_else(|| input.error(&format!("{} has no field with the number {number}", message.name)))?;
        let field = &message.fields[index];
        if field.cardinality == Cardinality::Required {
            seen.insert(index);
        }
        value(schema, field, wire_type, input, depth).map_err(|e| in_field(&message.name, &field.name, e))?;
    }
    if seen.len() == message.required {
        return Ok(());
    }
    let missing = message.missing(&seen).map_or("", |field| &field.name);
    Err(format!("required field {missing} of {} is missing", message.name))
}

/// Names the innermost field only: the path could be long.
fn in_field(message: &str, field: &str, error: String) -> String {
    if error.starts_with("field ") || error.starts_with("required field ") {
        error
    } else {
        format!("field {field} of {message}: {error}")
    }
}

fn value(schema: &Schema, field: &Field, wire_type: u8, input: &mut Input<'_>, depth: usize) -> Result<()> {
    let declared = field.kind.wire_type();
    if wire_type == declared {
        return single(schema, field, input, depth);
    }
    if wire_type == LENGTH && field.cardinality == Cardinality::Repeated && matches!(declared, VARINT | FIXED32 | FIXED64) {
        let mut packed = input.nested()?;
        while packed.at < packed.end {
            single(schema, field, &mut packed, depth)?;
        }
        return Ok(());
    }
    Err(input.error(&format!("wire type {wire_type} instead of {declared}")))
}

fn single(schema: &Schema, field: &Field, input: &mut Input<'_>, depth: usize) -> Result<()> {
    match field.kind {
        Kind::Message(id) => {
            let mut nested = input.nested()?;
            message(schema, id, &mut nested, None, depth)
        }
        Kind::Group(id) => message(schema, id, input, Some(field.number), depth),
        Kind::String { utf8 } => {
            let bytes = input.nested()?.rest();
            if utf8 && str::from_utf8(bytes).is_err() {
                return Err(input.error("the string is not UTF-8"));
            }
            Ok(())
        }
        Kind::Bytes => input.nested().map(drop),
        Kind::Enum(id) => {
            let number = input.varint()? as i32;
            let symbols = schema.enumeration(id);
            if symbols.has(number) { Ok(()) } else { Err(input.error(&format!("{} has no value {number}", symbols.name))) }
        }
        _ => match field.kind.wire_type() {
            FIXED64 => input.skip(8),
            FIXED32 => input.skip(4),
            _ => input.varint().map(drop),
        },
    }
}

impl Kind {
    fn wire_type(self) -> u8 {
        match self {
            Self::Double | Self::Fixed64 | Self::Sfixed64 => FIXED64,
            Self::Float | Self::Fixed32 | Self::Sfixed32 => FIXED32,
            Self::String { .. } | Self::Bytes | Self::Message(_) => LENGTH,
            Self::Group(_) => START_GROUP,
            Self::Int32
            | Self::Int64
            | Self::Uint32
            | Self::Uint64
            | Self::Sint32
            | Self::Sint64
            | Self::Bool
            | Self::Enum(_) => VARINT,
        }
    }
}

/// A part of the message; positions count from the message's start.
struct Input<'a> {
    data: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Input<'a> {
    fn error(&self, text: &str) -> String {
        format!("{text} (at byte {})", self.at)
    }

    fn rest(&self) -> &'a [u8] {
        &self.data[self.at..self.end]
    }

    fn skip(&mut self, length: usize) -> Result<()> {
        let end = self.at.checked_add(length).filter(|end| *end <= self.end);
        self.at = end.ok_or_else(|| self.error(&format!("{length} bytes are expected, {} are left", self.end - self.at)))?;
        Ok(())
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for index in 0..10 {
            let byte = *self.rest().first().ok_or_else(|| self.error("a number is cut off"))?;
            // The tenth byte has room for one bit.
            if index == 9 && byte > 1 {
                break;
            }
            self.at += 1;
            value |= u64::from(byte & 0x7f) << (7 * index);
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.error("a number is too long"))
    }

    fn tag(&mut self) -> Result<(u32, u8)> {
        let tag = self.varint()?;
        match u32::try_from(tag) {
            Ok(tag) if tag >> 3 > 0 => Ok((tag >> 3, (tag & 7) as u8)),
            _ => Err(self.error("not a field")),
        }
    }

    /// Steps over bytes with their length before them and answers them.
    fn nested(&mut self) -> Result<Input<'a>> {
        let length = self.varint()?;
        let start = self.at;
        self.skip(usize::try_from(length).unwrap_or(usize::MAX))?;
        Ok(Input { data: self.data, at: start, end: self.at })
    }
}
