//! Definitions: source text or compiled files to tables.

use std::collections::HashMap;

use prost::Message as _;
use prost_reflect::{
    Cardinality as ReflectCardinality, DescriptorPool, EnumDescriptor, ExtensionDescriptor, FieldDescriptor, Kind as ReflectKind,
    MessageDescriptor, Syntax,
};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumOptions, FieldDescriptorProto, FieldOptions, FileDescriptorProto,
    FileDescriptorSet, MessageOptions,
};
use protox::file::{File, FileResolver};

use super::{Cardinality, Enum, EnumId, Field, Kind, Message, MessageId, Schema, WellKnown, nesting};

/// What errors call the source.
const FILE: &str = "schema.proto";

type Result<T> = std::result::Result<T, String>;

pub(super) fn from_source(source: &str) -> Result<Schema> {
    nesting::check(source)?;
    // The debug form is the one that names line and column.
    let file = File::from_source(FILE, source).map_err(|e| format!("{e:?}"))?;
    if !file.file_descriptor_proto().dependency.is_empty() {
        return Err("imports are not supported, not even of google/protobuf".into());
    }
    let root = match file.file_descriptor_proto().message_type.as_slice() {
        [message] => message.name().to_owned(),
        messages => return Err(format!("there must be exactly one message at the top level, not {}", messages.len())),
    };
    let package = file.file_descriptor_proto().package().to_owned();
    let mut compiler = protox::Compiler::with_file_resolver(Only(file));
    compiler.open_file(FILE).map_err(|e| format!("{e:?}"))?;
    let root = if package.is_empty() { root } else { format!("{package}.{root}") };
    tabulate(&compiler.descriptor_pool(), &root)
}

/// Knows one file and nothing else.
struct Only(File);

impl FileResolver for Only {
    fn open_file(&self, name: &str) -> std::result::Result<File, protox::Error> {
        if name == FILE { Ok(self.0.clone()) } else { Err(protox::Error::file_not_found(name)) }
    }
}

pub(super) fn from_descriptors(files: &[u8], root_message: &str) -> Result<Schema> {
    let mut set = FileDescriptorSet::decode(files).map_err(|e| format!("compiled_bytes is not a FileDescriptorSet: {e}"))?;
    set.file.iter_mut().for_each(strip_file);
    let pool = DescriptorPool::from_file_descriptor_set(set).map_err(|e| format!("{e:?}"))?;
    tabulate(&pool, root_message.trim_start_matches('.'))
}

/// Keeps what a message check needs. Source locations and custom options are often large and never needed.
fn strip_file(file: &mut FileDescriptorProto) {
    file.source_code_info = None;
    file.options = None;
    file.service.clear();
    file.message_type.iter_mut().for_each(strip_message);
    file.enum_type.iter_mut().for_each(strip_enum);
    file.extension.iter_mut().for_each(strip_field);
}

fn strip_message(message: &mut DescriptorProto) {
    message.options = message.options.take().map(|o| MessageOptions {
        map_entry: o.map_entry,
        message_set_wire_format: o.message_set_wire_format,
        ..MessageOptions::default()
    });
    message.extension_range.iter_mut().for_each(|range| range.options = None);
    message.oneof_decl.iter_mut().for_each(|oneof| oneof.options = None);
    message.field.iter_mut().for_each(strip_field);
    message.extension.iter_mut().for_each(strip_field);
    message.enum_type.iter_mut().for_each(strip_enum);
    // Decoding has bounded how deep this goes.
    message.nested_type.iter_mut().for_each(strip_message);
}

fn strip_field(field: &mut FieldDescriptorProto) {
    field.options = field.options.take().map(|o| FieldOptions { packed: o.packed, ..FieldOptions::default() });
}

fn strip_enum(symbols: &mut EnumDescriptorProto) {
    symbols.options = symbols.options.take().map(|o| EnumOptions { allow_alias: o.allow_alias, ..EnumOptions::default() });
    symbols.value.iter_mut().for_each(|value| value.options = None);
}

fn tabulate(pool: &DescriptorPool, root: &str) -> Result<Schema> {
    let messages: HashMap<_, _> =
        pool.all_messages().enumerate().map(|(i, m)| (m.full_name().to_owned(), MessageId(i))).collect();
    let enums: HashMap<_, _> = pool.all_enums().enumerate().map(|(i, e)| (e.full_name().to_owned(), EnumId(i))).collect();
    let root = *messages.get(root).ok_or_else(|| format!("there is no message {root:?}"))?;
    let index = Index { messages, enums };
    let schema = Schema {
        messages: pool.all_messages().map(|message| index.message(&message)).collect::<Result<_>>()?,
        enums: pool.all_enums().map(|symbols| enumeration(&symbols)).collect(),
        root,
    };
    pool.all_messages().filter(|message| message.is_map_entry()).try_for_each(|entry| check_map_entry(&entry))?;
    Ok(schema)
}

/// Types by full name.
struct Index {
    messages: HashMap<String, MessageId>,
    enums: HashMap<String, EnumId>,
}

impl Index {
    fn message(&self, message: &MessageDescriptor) -> Result<Message> {
        let name = message.full_name();
        if message.descriptor_proto().options.as_ref().is_some_and(|o| o.message_set_wire_format()) {
            return Err(format!("{name}: the message set format is not supported"));
        }
        let mut table = Message {
            name: name.to_owned(),
            fields: Vec::new(),
            by_number: HashMap::new(),
            by_name: HashMap::new(),
            required: 0,
            well_known: well_known(name),
        };
        for field in message.fields() {
            let names = [field.name().to_owned(), field.json_name().to_owned()];
            add(&mut table, self.field(&field)?, names);
        }
        for extension in message.extensions() {
            let name = extension.json_name().to_owned();
            add(&mut table, self.extension(&extension)?, [name]);
        }
        Ok(table)
    }

    fn field(&self, field: &FieldDescriptor) -> Result<Field> {
        let cardinality = if field.is_map() { Cardinality::Map } else { cardinality(field.cardinality()) };
        let oneof = field.containing_oneof().filter(|oneof| !oneof.is_synthetic()).map(|oneof| oneof.name().to_owned());
        let utf8 = field.parent_file().syntax() == Syntax::Proto3;
        let kind = self.kind(&field.kind(), field.is_group(), utf8)?;
        Ok(Field { name: field.name().to_owned(), number: field.number(), kind, cardinality, oneof })
    }

    fn extension(&self, field: &ExtensionDescriptor) -> Result<Field> {
        let cardinality = if field.is_map() { Cardinality::Map } else { cardinality(field.cardinality()) };
        let utf8 = field.parent_file().syntax() == Syntax::Proto3;
        let kind = self.kind(&field.kind(), field.is_group(), utf8)?;
        Ok(Field { name: field.full_name().to_owned(), number: field.number(), kind, cardinality, oneof: None })
    }

    fn kind(&self, kind: &ReflectKind, is_group: bool, utf8: bool) -> Result<Kind> {
        Ok(match kind {
            ReflectKind::Double => Kind::Double,
            ReflectKind::Float => Kind::Float,
            ReflectKind::Int32 => Kind::Int32,
            ReflectKind::Int64 => Kind::Int64,
            ReflectKind::Uint32 => Kind::Uint32,
            ReflectKind::Uint64 => Kind::Uint64,
            ReflectKind::Sint32 => Kind::Sint32,
            ReflectKind::Sint64 => Kind::Sint64,
            ReflectKind::Fixed32 => Kind::Fixed32,
            ReflectKind::Fixed64 => Kind::Fixed64,
            ReflectKind::Sfixed32 => Kind::Sfixed32,
            ReflectKind::Sfixed64 => Kind::Sfixed64,
            ReflectKind::Bool => Kind::Bool,
            ReflectKind::String => Kind::String { utf8 },
            ReflectKind::Bytes => Kind::Bytes,
            ReflectKind::Message(message) => {
                let id = *self.messages.get(message.full_name()).ok_or_else(|| unknown(message.full_name()))?;
                if is_group { Kind::Group(id) } else { Kind::Message(id) }
            }
            ReflectKind::Enum(symbols) => {
                Kind::Enum(*self.enums.get(symbols.full_name()).ok_or_else(|| unknown(symbols.full_name()))?)
            }
        })
    }
}

fn unknown(name: &str) -> String {
    format!("the type {name:?} is not defined")
}

fn add(message: &mut Message, field: Field, names: impl IntoIterator<Item = String>) {
    let index = message.fields.len();
    message.required += usize::from(field.cardinality == Cardinality::Required);
    message.by_number.insert(field.number, index);
    message.by_name.extend(names.into_iter().map(|name| (name, index)));
    message.fields.push(field);
}

fn cardinality(cardinality: ReflectCardinality) -> Cardinality {
    match cardinality {
        ReflectCardinality::Optional => Cardinality::Optional,
        ReflectCardinality::Required => Cardinality::Required,
        ReflectCardinality::Repeated => Cardinality::Repeated,
    }
}

fn enumeration(symbols: &EnumDescriptor) -> Enum {
    Enum {
        name: symbols.full_name().to_owned(),
        values: symbols.values().map(|value| (value.name().to_owned(), value.number())).collect(),
        numbers: symbols.values().map(|value| value.number()).collect(),
        closed: symbols.parent_file().syntax() == Syntax::Proto2,
    }
}

/// A map entry in compiled files may be anything; one from a source is made by the parser.
fn check_map_entry(entry: &MessageDescriptor) -> Result<()> {
    let single = |number| entry.get_field(number).filter(|field| field.cardinality() == ReflectCardinality::Optional);
    let legal_key = |kind: ReflectKind| {
        use ReflectKind::{Bytes, Double, Enum, Float, Message};
        !matches!(kind, Double | Float | Bytes | Message(_) | Enum(_))
    };
    match (single(1), single(2)) {
        (Some(key), Some(_)) if legal_key(key.kind()) && entry.fields().len() == 2 => Ok(()),
        _ => Err(format!("{} is not the entry of a map", entry.full_name())),
    }
}

fn well_known(name: &str) -> Option<WellKnown> {
    Some(match name.strip_prefix("google.protobuf.")? {
        "Any" => WellKnown::Any,
        "Timestamp" => WellKnown::Timestamp,
        "Duration" => WellKnown::Duration,
        "FieldMask" => WellKnown::FieldMask,
        "Struct" => WellKnown::Struct,
        "Value" => WellKnown::Value,
        "ListValue" => WellKnown::ListValue,
        "DoubleValue" | "FloatValue" | "Int64Value" | "UInt64Value" | "Int32Value" | "UInt32Value" | "BoolValue"
        | "StringValue" | "BytesValue" => WellKnown::Wrapper,
        _ => return None,
    })
}
