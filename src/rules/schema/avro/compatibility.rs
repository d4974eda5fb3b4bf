//! Whether what was written with one schema can be read with another (schema resolution).

use std::collections::HashSet;

use super::{Enum, Field, Name, Record, Schema, Type, TypeId, Union};

/// Pairs of types to compare before giving up. Two recursive schemas of the largest size can have a hundred million, any
/// that are written by hand some hundreds.
const MAX_PAIRS: usize = 200_000;

/// Checks that each schema can read what the other wrote.
///
/// # Errors
/// The direction, the place and the reason.
pub(in crate::rules::schema) fn check_mutual(new: &Schema, old: &Schema) -> Result<(), String> {
    check(new, old).map_err(|e| format!("it can't read messages of the previous revision: {e}"))?;
    check(old, new).map_err(|e| format!("the previous revision can't read its messages: {e}"))
}

/// Checks that `reader` can read what `writer` wrote.
fn check(reader: &Schema, writer: &Schema) -> Result<(), String> {
    let mut work = Resolution { reader, writer, seen: HashSet::new(), todo: Vec::new() };
    work.add(reader.root, writer.root)?;
    // Pairs that were seen are taken for readable: only then can a type that contains itself be compared.
    while let Some((r, w)) = work.todo.pop() {
        work.resolve(r, w)?;
    }
    Ok(())
}

struct Resolution<'s> {
    reader: &'s Schema,
    writer: &'s Schema,
    seen: HashSet<(TypeId, TypeId)>,
    todo: Vec<(TypeId, TypeId)>,
}

impl Resolution<'_> {
    fn add(&mut self, reader: TypeId, writer: TypeId) -> Result<(), String> {
        if self.seen.len() >= MAX_PAIRS {
            return Err("the schemas are too complex to compare".into());
        }
        if self.seen.insert((reader, writer)) {
            self.todo.push((reader, writer));
        }
        Ok(())
    }

    /// Checks one pair and notes the pairs it depends on.
    fn resolve(&mut self, reader: TypeId, writer: TypeId) -> Result<(), String> {
        let (r, w) = (self.reader.get(reader), self.writer.get(writer));
        match (r, w) {
            (_, Type::Union(written)) => written.branches.iter().try_for_each(|branch| self.add(reader, *branch)),
            (Type::Union(union), _) => {
                let branch = self.choose(union, w).ok_or_else(|| format!("no branch of the union reads {}", w.branch_name()))?;
                self.add(branch, writer)
            }
            (Type::Array(r), Type::Array(w)) | (Type::Map(r), Type::Map(w)) => self.add(*r, *w),
            (Type::Record(r), Type::Record(w)) if same_name(&r.name, &w.name) => self.fields(r, w),
            (Type::Enum(r), Type::Enum(w)) if same_name(&r.name, &w.name) => symbols(r, w),
            _ if matches(r, w) => Ok(()),
            _ => Err(format!("{} can't be read as {}", describe(w), describe(r))),
        }
    }

    /// The branch that reads a value of type `writer`: one of the same full name, else the first that matches.
    fn choose(&self, union: &Union, writer: &Type) -> Option<TypeId> {
        let same = union.by_name.get(writer.branch_name());
        same.or_else(|| union.branches.iter().find(|id| matches(self.reader.get(**id), writer))).copied()
    }

    fn fields(&mut self, reader: &Record, writer: &Record) -> Result<(), String> {
        for field in &reader.fields {
            match counterpart(field, writer) {
                Some(written) => self.add(field.schema, written.schema)?,
                None if field.has_default => {}
                None => return Err(format!("field {} of {} has no default value", field.name, reader.name.full)),
            }
        }
        Ok(())
    }
}

/// The writer's field that a reader's field takes its value from.
fn counterpart<'w>(field: &Field, writer: &'w Record) -> Option<&'w Field> {
    let position = |name: &String| writer.positions.get(name);
    position(&field.name).or_else(|| field.aliases.iter().find_map(position)).map(|at| &writer.fields[*at])
}

fn symbols(reader: &Enum, writer: &Enum) -> Result<(), String> {
    if reader.has_default {
        return Ok(());
    }
    match writer.symbols.iter().find(|symbol| !reader.symbols.contains(*symbol)) {
        None => Ok(()),
        Some(symbol) => Err(format!("{} has no symbol {symbol}", reader.name.full)),
    }
}

/// Whether two types go together, their parts aside.
fn matches(reader: &Type, writer: &Type) -> bool {
    match (reader, writer) {
        (Type::Null, Type::Null)
        | (Type::Boolean, Type::Boolean)
        | (Type::Int, Type::Int)
        | (Type::Long, Type::Long | Type::Int)
        | (Type::Float, Type::Float | Type::Long | Type::Int)
        | (Type::Double, Type::Double | Type::Float | Type::Long | Type::Int)
        | (Type::String, Type::String | Type::Bytes { .. })
        | (Type::Bytes { .. }, Type::String)
        | (Type::Array(_), Type::Array(_))
        | (Type::Map(_), Type::Map(_)) => true,
        // Numbers of another precision or scale would be read as other numbers.
        (Type::Bytes { decimal: r }, Type::Bytes { decimal: w }) => r.is_none() || w.is_none() || r == w,
        (Type::Fixed { name: r, size: r_size, decimal: rd }, Type::Fixed { name: w, size: w_size, decimal: wd }) => {
            same_name(r, w) && r_size == w_size && (rd.is_none() || wd.is_none() || rd == wd)
        }
        (Type::Record(r), Type::Record(w)) => same_name(&r.name, &w.name),
        (Type::Enum(r), Type::Enum(w)) => same_name(&r.name, &w.name),
        _ => false,
    }
}

/// Namespaces may differ; an alias is a full name.
fn same_name(reader: &Name, writer: &Name) -> bool {
    reader.short() == writer.short() || reader.aliases.contains(&writer.full)
}

fn describe(schema: &Type) -> String {
    match schema {
        Type::Fixed { name, size, .. } => format!("{} of {size} bytes", name.full),
        Type::Bytes { decimal: Some(decimal) } => format!("a decimal ({}, {})", decimal.precision, decimal.scale),
        other => other.branch_name().to_owned(),
    }
}
