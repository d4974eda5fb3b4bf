//! Definitions: JSON to types. Nesting is bounded by the JSON parser, which gives up after 128 levels.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::{Decimal, Enum, Field, Name, Record, Schema, Type, TypeId, Union, json};

/// A type's name and how it is made.
type Primitive = (&'static str, fn() -> Type);
/// The types every schema has, in the order of their indexes.
const PRIMITIVES: [Primitive; 8] = [
    ("null", || Type::Null),
    ("boolean", || Type::Boolean),
    ("int", || Type::Int),
    ("long", || Type::Long),
    ("float", || Type::Float),
    ("double", || Type::Double),
    ("bytes", || Type::Bytes { decimal: None }),
    ("string", || Type::String),
];
/// Largest `fixed`; the reference implementation keeps sizes in 32 bits.
const MAX_FIXED_BYTES: u64 = i32::MAX as u64;

type Result<T> = std::result::Result<T, String>;
type Object = Map<String, Value>;

pub(super) fn parse(text: &str) -> Result<Schema> {
    let json: Value = serde_json::from_str(text).map_err(|e| format!("not a JSON text: {e}"))?;
    let mut parser =
        Parser { types: PRIMITIVES.iter().map(|(_, make)| make()).collect(), names: HashMap::new(), defaults: Vec::new() };
    let root = parser.schema(&json, "")?;
    let Parser { types, defaults, .. } = parser;
    let schema = Schema { types, root };
    if !matches!(schema.get(root), Type::Record(_)) {
        return Err(format!("the outermost type must be a record, not {}", schema.get(root).branch_name()));
    }
    for default in defaults {
        json::check_default(&schema, default.schema, default.value).map_err(|e| format!("default of {}: {e}", default.place))?;
    }
    Ok(schema)
}

struct Parser<'a> {
    types: Vec<Type>,
    /// Defined names, each with its namespace.
    names: HashMap<String, TypeId>,
    /// Checked at the end, when every type is known.
    defaults: Vec<Default<'a>>,
}

struct Default<'a> {
    schema: TypeId,
    value: &'a Value,
    place: String,
}

impl<'a> Parser<'a> {
    /// Reads any schema; `space` is the namespace that surrounds it.
    fn schema(&mut self, json: &'a Value, space: &str) -> Result<TypeId> {
        match json {
            Value::String(name) => self.reference(name, space),
            Value::Array(branches) => self.union(branches, space),
            Value::Object(object) => match object.get("type") {
                Some(Value::String(kind)) => self.complex(kind, object, space),
                Some(inner @ (Value::Array(_) | Value::Object(_))) => self.schema(inner, space),
                Some(_) => Err("'type' must be a name, an array or an object".into()),
                None => Err("an object without 'type' is not a schema".into()),
            },
            other => Err(format!("{other} is not a schema")),
        }
    }

    fn complex(&mut self, kind: &str, object: &'a Object, space: &str) -> Result<TypeId> {
        match kind {
            "record" => self.record(object, space),
            "enum" => self.enumeration(object, space),
            "fixed" => self.fixed(object, space),
            "array" => {
                let items = self.schema(object.get("items").ok_or("an array needs 'items'")?, space)?;
                self.add(Type::Array(items))
            }
            "map" => {
                let values = self.schema(object.get("values").ok_or("a map needs 'values'")?, space)?;
                self.add(Type::Map(values))
            }
            // A logical type that makes no sense is ignored, as the specification asks.
            "bytes" => match decimal(object) {
                None => self.reference(kind, space),
                decimal => self.add(Type::Bytes { decimal }),
            },
            _ => self.reference(kind, space),
        }
    }

    fn add(&mut self, schema: Type) -> Result<TypeId> {
        self.types.push(schema);
        Ok(TypeId(self.types.len() as u32 - 1))
    }

    /// Looks a name up: a primitive, a name with its namespace, one of the surrounding namespace, or one without any.
    fn reference(&self, name: &str, space: &str) -> Result<TypeId> {
        if let Some(index) = PRIMITIVES.iter().position(|(primitive, _)| *primitive == name) {
            return Ok(TypeId(index as u32));
        }
        let local = self.names.get(&qualify(name, space));
        local.or_else(|| self.names.get(name)).copied().ok_or_else(|| format!("the type {name:?} is not defined"))
    }

    fn union(&mut self, branches: &'a [Value], space: &str) -> Result<TypeId> {
        if branches.is_empty() {
            return Err("a union needs at least one branch".into());
        }
        let mut union = Union { branches: Vec::with_capacity(branches.len()), by_name: HashMap::new() };
        for branch in branches {
            let id = self.schema(branch, space)?;
            let schema = &self.types[id.0 as usize];
            if matches!(schema, Type::Union(_)) {
                return Err("a union can't be a branch of a union".into());
            }
            let name = schema.branch_name();
            if union.by_name.insert(name.to_owned(), id).is_some() {
                return Err(format!("a union has the branch {name:?} twice"));
            }
            union.branches.push(id);
        }
        self.add(Type::Union(union))
    }

    fn record(&mut self, object: &'a Object, space: &str) -> Result<TypeId> {
        let (name, space) = name_of(object, space)?;
        let id = self.define(&name, Type::Record(Record { name: name.clone(), ..Record::default() }))?;
        let in_record = |e: String| format!("record {}: {e}", name.full);
        let list = object.get("fields").and_then(Value::as_array).ok_or("no array 'fields'").map_err(|e| in_record(e.into()))?;
        let mut fields = Vec::with_capacity(list.len());
        let mut positions = HashMap::with_capacity(list.len());
        for json in list {
            let field = self.field(json, &name.full, &space).map_err(in_record)?;
            if positions.insert(field.name.clone(), fields.len()).is_some() {
                return Err(in_record(format!("the field {:?} is defined twice", field.name)));
            }
            fields.push(field);
        }
        self.types[id.0 as usize] = Type::Record(Record { name, fields, positions });
        Ok(id)
    }

    fn field(&mut self, json: &'a Value, record: &str, space: &str) -> Result<Field> {
        let object = json.as_object().ok_or_else(|| format!("{json} is not a field"))?;
        let name = text(object, "name")?.ok_or("a field needs a 'name'")?;
        check_word(name)?;
        let in_field = |e: String| format!("field {name}: {e}");
        let schema = object.get("type").ok_or("no 'type'").map_err(|e| in_field(e.into()))?;
        let schema = self.schema(schema, space).map_err(in_field)?;
        if let Some(order) = text(object, "order").map_err(in_field)?
            && !["ascending", "descending", "ignore"].contains(&order)
        {
            return Err(in_field(format!("{order:?} is not an order")));
        }
        let aliases = words(object, "aliases").map_err(in_field)?;
        aliases.iter().try_for_each(|alias| check_word(alias)).map_err(in_field)?;
        if let Some(value) = object.get("default") {
            self.defaults.push(Default { schema, value, place: format!("{record}.{name}") });
        }
        Ok(Field { name: name.to_owned(), aliases, schema, has_default: object.contains_key("default") })
    }

    fn enumeration(&mut self, object: &Object, space: &str) -> Result<TypeId> {
        let (name, _) = name_of(object, space)?;
        let in_enum = |e: String| format!("enum {}: {e}", name.full);
        if !object.contains_key("symbols") {
            return Err(in_enum("no array 'symbols'".into()));
        }
        let mut symbols = HashSet::new();
        for symbol in words(object, "symbols").map_err(in_enum)? {
            check_word(&symbol).map_err(in_enum)?;
            if let Some(twice) = symbols.replace(symbol) {
                return Err(in_enum(format!("the symbol {twice:?} is there twice")));
            }
        }
        let default = text(object, "default").map_err(in_enum)?;
        if let Some(default) = default
            && !symbols.contains(default)
        {
            return Err(in_enum(format!("the default {default:?} is not among the symbols")));
        }
        self.define(&name, Type::Enum(Enum { name: name.clone(), symbols, has_default: default.is_some() }))
    }

    fn fixed(&mut self, object: &Object, space: &str) -> Result<TypeId> {
        let (name, _) = name_of(object, space)?;
        let size = object.get("size").and_then(Value::as_u64).filter(|size| *size <= MAX_FIXED_BYTES);
        let size = size.ok_or_else(|| format!("fixed {}: 'size' must be a number from 0 to {MAX_FIXED_BYTES}", name.full))?;
        self.define(&name, Type::Fixed { name: name.clone(), size: size as usize, decimal: decimal(object) })
    }

    /// Adds a named type; its own parts may refer to it.
    fn define(&mut self, name: &Name, schema: Type) -> Result<TypeId> {
        if PRIMITIVES.iter().any(|(primitive, _)| *primitive == name.short()) {
            return Err(format!("the name {:?} is that of a primitive type", name.full));
        }
        let id = self.add(schema)?;
        match self.names.insert(name.full.clone(), id) {
            None => Ok(id),
            Some(_) => Err(format!("the type {:?} is defined twice", name.full)),
        }
    }
}

/// The full name and the aliases of a definition, and the namespace for what is inside it.
fn name_of(object: &Object, space: &str) -> Result<(Name, String)> {
    let name = text(object, "name")?.ok_or("a named type needs a 'name'")?;
    let own_space = text(object, "namespace")?.unwrap_or(space);
    let full = qualify(name, own_space);
    check_full_name(&full)?;
    let space = full.rsplit_once('.').map_or("", |(space, _)| space).to_owned();
    let aliases = words(object, "aliases")?.iter().map(|alias| qualify(alias, &space)).collect::<Vec<_>>();
    aliases.iter().try_for_each(|alias| check_full_name(alias))?;
    Ok((Name { full, aliases }, space))
}

fn qualify(name: &str, space: &str) -> String {
    if name.contains('.') || space.is_empty() { name.to_owned() } else { format!("{space}.{name}") }
}

fn check_full_name(name: &str) -> Result<()> {
    name.split('.').try_for_each(check_word).map_err(|_| format!("{name:?} is not a legal name"))
}

fn check_word(word: &str) -> Result<()> {
    let legal = word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') && !word.starts_with(|c: char| c.is_ascii_digit());
    if legal && !word.is_empty() { Ok(()) } else { Err(format!("{word:?} is not a legal name")) }
}

fn text<'v>(object: &'v Object, key: &str) -> Result<Option<&'v str>> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(format!("'{key}' must be a string, not {other}")),
    }
}

/// An array of strings; empty when it is missing.
fn words(object: &Object, key: &str) -> Result<Vec<String>> {
    let error = || format!("'{key}' must be an array of strings");
    match object.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(|v| v.as_str().map(str::to_owned).ok_or_else(error)).collect(),
        Some(_) => Err(error()),
    }
}

/// The logical type `decimal`, if it is there and makes sense.
fn decimal(object: &Object) -> Option<Decimal> {
    if object.get("logicalType")?.as_str()? != "decimal" {
        return None;
    }
    let precision = object.get("precision")?.as_u64()?;
    let scale = object.get("scale").map_or(Some(0), Value::as_u64)?;
    (precision > 0 && scale <= precision).then_some(Decimal { precision, scale })
}
