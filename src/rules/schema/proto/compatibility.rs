//! Whether one definition may follow another: optional fields may come and go, nothing else changes.

use std::collections::HashSet;

use super::{Cardinality, EnumId, Field, Kind, Message, MessageId, Schema};

/// Pairs of message types to compare before giving up; see the same bound for Avro.
const MAX_PAIRS: usize = 200_000;

/// # Errors
/// The first difference that is not allowed.
pub(in crate::rules::schema) fn check_change(new: &Schema, old: &Schema) -> Result<(), String> {
    let mut change = Change { new, old, seen: HashSet::new(), todo: Vec::new() };
    change.add(new.root, old.root)?;
    while let Some((new, old)) = change.todo.pop() {
        change.messages(new, old)?;
    }
    Ok(())
}

struct Change<'s> {
    new: &'s Schema,
    old: &'s Schema,
    seen: HashSet<(MessageId, MessageId)>,
    todo: Vec<(MessageId, MessageId)>,
}

impl Change<'_> {
    fn add(&mut self, new: MessageId, old: MessageId) -> Result<(), String> {
        if self.seen.len() >= MAX_PAIRS {
            return Err("the schemas are too complex to compare".into());
        }
        if self.seen.insert((new, old)) {
            self.todo.push((new, old));
        }
        Ok(())
    }

    fn messages(&mut self, new: MessageId, old: MessageId) -> Result<(), String> {
        let (new, old) = (self.new.message(new), self.old.message(old));
        for field in &old.fields {
            match new.by_number.get(&field.number) {
                Some(index) => self.fields(&new.fields[*index], field, new)?,
                None if field.cardinality == Cardinality::Required => {
                    return Err(format!("required field {} of {} is removed", field.name, old.name));
                }
                None => {}
            }
        }
        for field in new.fields.iter().filter(|field| !old.by_number.contains_key(&field.number)) {
            if let Some(index) = old.by_name.get(&field.name) {
                let number = old.fields[*index].number;
                return Err(format!("field {} of {} changes its number from {number} to {}", field.name, new.name, field.number));
            }
            if field.cardinality == Cardinality::Required {
                return Err(format!("required field {} of {} is added", field.name, new.name));
            }
        }
        Ok(())
    }

    fn fields(&mut self, new: &Field, old: &Field, message: &Message) -> Result<(), String> {
        let changed =
            |what: &str| Err(format!("field {} (number {}) of {} changes its {what}", old.name, old.number, message.name));
        if new.name != old.name {
            return changed("name");
        }
        if new.cardinality != old.cardinality {
            return changed("label");
        }
        if new.oneof != old.oneof {
            return changed("oneof");
        }
        match (new.kind, old.kind) {
            (Kind::Message(new), Kind::Message(old)) | (Kind::Group(new), Kind::Group(old)) => self.add(new, old),
            (Kind::Enum(new), Kind::Enum(old)) => self.enums(new, old),
            (Kind::String { .. }, Kind::String { .. }) => Ok(()),
            (new, old) if new == old => Ok(()),
            _ => changed("type"),
        }
    }

    /// Values may be added: older readers keep an unknown value as a number.
    fn enums(&self, new: EnumId, old: EnumId) -> Result<(), String> {
        let (new, old) = (self.new.enumeration(new), self.old.enumeration(old));
        match old.values.iter().find(|(name, number)| new.values.get(*name) != Some(number)) {
            None => Ok(()),
            Some((name, number)) => Err(format!("value {name} = {number} of {} is removed or changes", old.name)),
        }
    }
}
