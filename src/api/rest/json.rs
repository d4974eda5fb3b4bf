//! JSON requests into messages, by the proto3 JSON mapping and with the error texts of Google's front end.
//!
//! Field names may be camelCase or as in the proto. Base64 may be of either alphabet, padded or not. Enums are names or
//! numbers, 64-bit integers strings or numbers, a field mask one string of either spelling. `null` means unset.

use std::fmt::Write;

use base64::{
    Engine,
    alphabet::{self, Alphabet},
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use bytes::Bytes;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, ReflectMessage, Value};
use serde_json::{Map, Value as Json};

use crate::{api::proto::rpc::bad_request::FieldViolation, model::text::clipped};

/// Faults listed in one answer. More would not help, and a long bad list must not make a long answer.
const MAX_VIOLATIONS: usize = 20;
/// Bytes of their descriptions after which no more are listed.
const MAX_VIOLATION_BYTES: usize = 2000;
/// Start of the texts about the form of a request.
const PREFIX: &str = "Invalid JSON payload received.";

/// Reads a body into a message whose fields may be set already, by the query; the body wins. An empty body is `{}`.
pub fn read_body(target: &mut DynamicMessage, body: &[u8]) -> Result<(), Vec<FieldViolation>> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(());
    }
    let root = serde_json::from_slice::<Json>(body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body))
        .map_err(|error| vec![violation("", format!("{PREFIX} {}", capitalized(&error.to_string())))])?;
    let mut reader = Reader::default();
    match root {
        Json::Object(fields) => reader.message(target, &fields),
        _ => reader.refuse_at("", format!("{PREFIX} Unknown name \"\": Root element must be a message.")),
    }
    reader.finish()
}

/// Walks a JSON value along a message and gathers what is wrong.
#[derive(Debug, Default)]
pub struct Reader {
    violations: Vec<FieldViolation>,
    /// Where the walk is: `messages[0].data`.
    path: String,
}

impl Reader {
    /// What was wrong, if anything.
    pub fn finish(self) -> Result<(), Vec<FieldViolation>> {
        if self.violations.is_empty() { Ok(()) } else { Err(self.violations) }
    }

    fn refuse_at(&mut self, field: &str, description: String) {
        let listed: usize = self.violations.iter().map(|violation| violation.description.len()).sum();
        if self.violations.len() < MAX_VIOLATIONS && listed < MAX_VIOLATION_BYTES {
            self.violations.push(violation(field, description));
        }
    }

    /// Notes a fault of the request itself rather than of a value.
    pub fn refuse(&mut self, text: String) {
        let path = self.path.clone();
        self.refuse_at(&path, format!("{PREFIX} {text}"));
    }

    /// Notes a value that does not fit its field.
    fn refuse_value(&mut self, kind: &Kind, problem: &str) {
        let path = self.path.clone();
        self.refuse_at(&path, format!("Invalid value at '{path}' ({}), {problem}", type_name(kind)));
    }

    /// Goes into a part of the message for one step.
    fn within<T>(&mut self, part: impl std::fmt::Display, step: impl FnOnce(&mut Self) -> T) -> T {
        let length = self.path.len();
        // Writing to a string can't fail.
        let _ = write!(self.path, "{part}");
        let result = step(self);
        self.path.truncate(length);
        result
    }

    fn within_field<T>(&mut self, field: &FieldDescriptor, step: impl FnOnce(&mut Self) -> T) -> T {
        let dot = if self.path.is_empty() { "" } else { "." };
        self.within(format_args!("{dot}{}", field.name()), step)
    }

    /// Sets the fields of a message.
    fn message(&mut self, target: &mut DynamicMessage, fields: &Map<String, Json>) {
        let descriptor = target.descriptor();
        let mut seen: Vec<FieldDescriptor> = Vec::new();
        for (name, value) in fields {
            let Some(field) = field_by_any_name(&descriptor, name) else {
                self.refuse_name(name);
                continue;
            };
            if value.is_null() && !takes_null(&field) {
                continue;
            }
            if let Some(other) = seen.iter().find(|other| shares_oneof(other, &field)) {
                self.refuse_second_of_oneof(&field, other);
                continue;
            }
            if let Some(value) = self.within_field(&field, |reader| reader.field(&field, value)) {
                target.set_field(&field, value);
            }
            seen.push(field);
        }
    }

    fn refuse_name(&mut self, name: &str) {
        let place = if self.path.is_empty() { String::new() } else { format!(" at '{}'", self.path) };
        self.refuse(format!("Unknown name \"{}\"{place}: Cannot find field.", clipped(name)));
    }

    fn refuse_second_of_oneof(&mut self, field: &FieldDescriptor, other: &FieldDescriptor) {
        let oneof = field.containing_oneof().map(|oneof| oneof.name().to_owned()).unwrap_or_default();
        let (path, name) = (self.path.clone(), field.name());
        let text = format!(
            "Invalid value at '{path}' (oneof), oneof field '{oneof}' is already set to '{}'. Cannot set '{name}'",
            other.name()
        );
        self.refuse_at(&path, text);
    }

    fn field(&mut self, field: &FieldDescriptor, value: &Json) -> Option<Value> {
        if field.is_map() {
            return self.map(field, value);
        }
        if !field.is_list() {
            return self.value(&field.kind(), value);
        }
        let Some(items) = value.as_array() else {
            self.refuse_value(&field.kind(), &format!("an array was expected, not {}", shown(value)));
            return None;
        };
        let kind = field.kind();
        let mut list = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let item = self.within(format_args!("[{index}]"), |reader| reader.value(&kind, item));
            // Once something is wrong the list is not used.
            list.extend(item);
        }
        Some(Value::List(list))
    }

    fn map(&mut self, field: &FieldDescriptor, value: &Json) -> Option<Value> {
        let Kind::Message(entry) = field.kind() else { return None };
        let (key_kind, value_kind) = (entry.map_entry_key_field().kind(), entry.map_entry_value_field().kind());
        let Some(fields) = value.as_object() else {
            self.refuse_value(&Kind::Message(entry), &format!("an object was expected, not {}", shown(value)));
            return None;
        };
        let mut map = std::collections::HashMap::with_capacity(fields.len());
        for (name, value) in fields {
            let entry = self.within(format_args!("[{:?}]", clipped(name)), |reader| {
                Some((reader.map_key(&key_kind, name)?, reader.value(&value_kind, value)?))
            });
            map.extend(entry);
        }
        Some(Value::Map(map))
    }

    fn map_key(&mut self, kind: &Kind, name: &str) -> Option<MapKey> {
        self.value(kind, &Json::String(name.to_owned()))?.into_map_key()
    }

    /// Reads one value. Notes a fault and returns `None` if it does not fit.
    fn value(&mut self, kind: &Kind, json: &Json) -> Option<Value> {
        let value = match kind {
            Kind::Message(descriptor) if descriptor.package_name() == "google.protobuf" => {
                return self.well_known(descriptor, json);
            }
            Kind::Message(descriptor) => json.as_object().map(|fields| {
                let mut message = DynamicMessage::new(descriptor.clone());
                self.message(&mut message, fields);
                Value::Message(message)
            }),
            Kind::Enum(named) => match json.as_str().and_then(|name| named.get_value_by_name(name)) {
                Some(value) => Some(Value::EnumNumber(value.number())),
                None => integer(json).and_then(|number| number.try_into().ok()).map(Value::EnumNumber),
            },
            Kind::String => json.as_str().map(|text| Value::String(text.to_owned())),
            Kind::Bytes => {
                let bytes = json.as_str().and_then(decode_base64);
                if bytes.is_none() && json.is_string() {
                    self.refuse_value(kind, &format!("Base64 decoding failed for {}", shown(json)));
                    return None;
                }
                bytes.map(Value::Bytes)
            }
            Kind::Bool => match json {
                Json::Bool(flag) => Some(Value::Bool(*flag)),
                Json::String(text) => text.parse().ok().map(Value::Bool),
                _ => None,
            },
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
                integer(json).and_then(|number| number.try_into().ok()).map(Value::I32)
            }
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                integer(json).and_then(|number| number.try_into().ok()).map(Value::I64)
            }
            Kind::Uint32 | Kind::Fixed32 => integer(json).and_then(|number| number.try_into().ok()).map(Value::U32),
            Kind::Uint64 | Kind::Fixed64 => integer(json).and_then(|number| number.try_into().ok()).map(Value::U64),
            Kind::Float => float(json).map(|number| Value::F32(number as f32)),
            Kind::Double => float(json).map(Value::F64),
        };
        if value.is_none() {
            self.refuse_value(kind, &shown(json));
        }
        value
    }

    /// Reads one value that is at a path of its own, as query parameters are.
    pub fn value_at(&mut self, path: &str, kind: &Kind, json: &Json) -> Option<Value> {
        self.within(path, |reader| reader.value(kind, json))
    }

    /// Messages with a JSON form of their own.
    fn well_known(&mut self, descriptor: &MessageDescriptor, json: &Json) -> Option<Value> {
        let result = match (descriptor.name(), json) {
            ("FieldMask", Json::String(mask)) => return Some(field_mask(descriptor, mask)),
            ("Timestamp", Json::String(text)) if !is_rfc3339(text) => {
                Err("RFC 3339 was expected, as in 2026-01-31T12:00:00Z".into())
            }
            ("Timestamp" | "Duration", Json::String(_)) | ("Struct" | "Value" | "ListValue", _) => {
                DynamicMessage::deserialize(descriptor.clone(), json).map_err(|error| clipped(&error.to_string()).into_owned())
            }
            ("Duration", _) => Err("a string was expected, as in \"600s\"".to_owned()),
            ("Timestamp", _) => Err("a string was expected".to_owned()),
            _ => DynamicMessage::deserialize(descriptor.clone(), json).map_err(|error| clipped(&error.to_string()).into_owned()),
        };
        match result {
            Ok(message) => Some(Value::Message(message)),
            Err(problem) => {
                self.refuse_value(&Kind::Message(descriptor.clone()), &format!("{}: {problem}", shown(json)));
                None
            }
        }
    }
}

/// The field of either spelling.
pub fn field_by_any_name(message: &MessageDescriptor, name: &str) -> Option<FieldDescriptor> {
    message.get_field_by_json_name(name).or_else(|| message.get_field_by_name(name))
}

/// Whether `null` is a value of the field rather than its absence.
fn takes_null(field: &FieldDescriptor) -> bool {
    matches!(field.kind(), Kind::Message(message) if message.full_name() == "google.protobuf.Value")
}

/// Whether setting one field takes away the other. A field shares no oneof with itself.
fn shares_oneof(one: &FieldDescriptor, other: &FieldDescriptor) -> bool {
    let oneof = other.containing_oneof();
    one != other && oneof.is_some() && one.containing_oneof() == oneof
}

/// `labels,pushConfig.pushEndpoint` as a mask with the names of the proto. Such names are taken too.
fn field_mask(descriptor: &MessageDescriptor, mask: &str) -> Value {
    let paths = mask.split(',').map(str::trim).filter(|path| !path.is_empty());
    let paths = paths.map(|path| Value::String(snake_case(path))).collect();
    let mut message = DynamicMessage::new(descriptor.clone());
    message.set_field_by_name("paths", Value::List(paths));
    Value::Message(message)
}

fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for letter in name.chars() {
        if letter.is_ascii_uppercase() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// A date alone, or a time without an offset, is read by the library but is not RFC 3339.
fn is_rfc3339(text: &str) -> bool {
    let Some((_, time)) = text.split_once(['T', 't']) else { return false };
    time.ends_with(['Z', 'z']) || time.contains(['+', '-'])
}

/// An integer, also as a string or with a zero fraction.
fn integer(json: &Json) -> Option<i128> {
    let whole = |number: f64| (number.fract() == 0.0 && number.abs() < 2f64.powi(64)).then_some(number as i128);
    match json {
        Json::Number(number) => {
            let exact = number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from));
            exact.or_else(|| number.as_f64().and_then(whole))
        }
        Json::String(text) => text.parse().ok().or_else(|| text.parse().ok().and_then(whole)),
        _ => None,
    }
}

fn float(json: &Json) -> Option<f64> {
    match json {
        Json::Number(number) => number.as_f64(),
        Json::String(text) => text.parse().ok(),
        _ => None,
    }
}

const fn lenient(alphabet: &Alphabet) -> GeneralPurpose {
    let config = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    GeneralPurpose::new(alphabet, config)
}

/// Base64 of either alphabet, padded or not. White space is skipped: some encoders break lines.
fn decode_base64(text: &str) -> Option<Bytes> {
    const STANDARD: GeneralPurpose = lenient(&alphabet::STANDARD);
    const URL_SAFE: GeneralPurpose = lenient(&alphabet::URL_SAFE);
    let decode = |text: &[u8]| match URL_SAFE.decode(text) {
        Ok(bytes) if text.contains(&b'-') || text.contains(&b'_') => Some(bytes),
        _ => STANDARD.decode(text).ok(),
    };
    let bytes = decode(text.as_bytes()).or_else(|| {
        let packed: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        (packed.len() != text.len()).then(|| decode(&packed)).flatten()
    });
    bytes.map(Bytes::from)
}

/// The type as Google's texts name it: `TYPE_INT32`, or the URL of a message or enum.
fn type_name(kind: &Kind) -> String {
    match kind {
        Kind::Message(message) if message.is_map_entry() => "map".to_owned(),
        Kind::Message(message) => format!("type.googleapis.com/{}", message.full_name()),
        Kind::Enum(named) => format!("type.googleapis.com/{}", named.full_name()),
        scalar => format!("TYPE_{scalar:?}").to_uppercase(),
    }
}

/// A bad value as JSON, clipped.
fn shown(json: &Json) -> String {
    match json {
        Json::Object(_) => "an object".to_owned(),
        Json::Array(_) => "an array".to_owned(),
        Json::String(text) => Json::from(clipped(text)).to_string(),
        scalar => scalar.to_string(),
    }
}

fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map(|first| first.to_uppercase().chain(letters).collect()).unwrap_or_default()
}

fn violation(field: &str, description: String) -> FieldViolation {
    FieldViolation { field: field.to_owned(), description, ..Default::default() }
}

#[cfg(test)]
mod tests;
