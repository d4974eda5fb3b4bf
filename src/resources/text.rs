//! A plan for people to read.

use std::fmt;

use serde_json::Value;

use super::{
    compare::Change,
    plan::{Action, Plan, Step},
};

/// Characters of a value that are shown.
const MAX_SHOWN_CHARS: usize = 200;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| write!(f, "{step}"))?;
        let counts = [
            (Action::Create, "to create"),
            (Action::Update, "to update"),
            (Action::Impossible, "that can't be changed"),
            (Action::Delete, "to delete"),
        ];
        let counts = counts.map(|(action, words)| format!("{} {words}", self.count(action)));
        writeln!(f, "{}; {} already as in the file", counts.join(", "), self.unchanged)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match self.action {
            Action::Create => '+',
            Action::Update => '~',
            Action::Impossible => '!',
            Action::Delete => '-',
        };
        writeln!(f, "{sign} {} {}", self.kind.noun(), self.name)?;
        for change in &self.changes {
            match self.action {
                Action::Create => writeln!(f, "    {}: {}", change.field, shown(&change.new, &change.old))?,
                _ => writeln!(f, "    {change}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} -> {}", self.field, shown(&self.old, &self.new), shown(&self.new, &self.old))?;
        if self.fixed { write!(f, " (can't be changed: delete it and make it anew, or keep the old value)") } else { Ok(()) }
    }
}

/// A value; where there is none, what it is by default next to the other one.
fn shown(value: &Value, other: &Value) -> String {
    let text = match (value, other) {
        (Value::Null, Value::Bool(_)) => "false".to_owned(),
        (Value::Null, Value::Number(_)) => "0".to_owned(),
        (Value::Null, _) => "(none)".to_owned(),
        (value, _) => value.to_string(),
    };
    match text.char_indices().nth(MAX_SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
