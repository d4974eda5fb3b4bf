//! Collects the given values of each source, in the table's names, without judging them.

use std::path::Path;

use config::{File, FileFormat, Map, Source, Value, ValueKind};

use super::{
    Origin, Wrong,
    keys::{ENVIRONMENT_PREFIX, KEYS},
    shown,
};

/// One value as it was given.
#[derive(Debug, Clone)]
pub struct Given {
    /// The key as the table names it, if the table knows it.
    pub(super) key: String,
    pub(super) value: String,
    pub(super) origin: Origin,
    /// Where it was given, and by what name, for errors.
    pub(super) place: String,
}

/// Variables `PUBSUB_PROJECT1`, `PUBSUB_PROJECT2`, ... are read as further items of `PRELOAD`: compose files in use
/// name the topics of an emulator this way.
const PRELOAD_ALIAS: &str = "PUBSUB_PROJECT";

/// Values of the environment's variables with the prefix.
pub(super) fn environment(variables: impl IntoIterator<Item = (String, String)>, given: &mut Vec<Given>) {
    let mut projects: Vec<(u64, String, String)> = Vec::new();
    let mut variables: Vec<_> = variables.into_iter().collect();
    variables.sort();
    for (name, value) in variables {
        if let Some(key) = name.strip_prefix(ENVIRONMENT_PREFIX) {
            given.push(Given { key: key.to_owned(), value, origin: Origin::Environment, place: name.clone() });
        } else if let Some(number) = name.strip_prefix(PRELOAD_ALIAS).and_then(|number| number.parse().ok()) {
            projects.push((number, name, value));
        }
    }
    if projects.is_empty() {
        return;
    }
    projects.sort();
    let own = given.iter().rposition(|g| g.key == "PRELOAD" && g.origin == Origin::Environment).map(|at| given.remove(at));
    let (mut places, mut values) = own.map(|g| (vec![g.place], vec![g.value])).unwrap_or_default();
    for (_, name, value) in projects {
        places.push(name);
        values.push(value);
    }
    let (value, place) = (values.join(";"), places.join("+"));
    given.push(Given { key: "PRELOAD".into(), value, origin: Origin::Environment, place });
}

/// `KEY=VALUE` texts; the key may carry the environment's prefix and be in any case.
pub(super) fn command_line(overrides: &[String], given: &mut Vec<Given>, wrong: &mut Vec<Wrong>) {
    for text in overrides {
        let Some((key, value)) = text.split_once('=') else {
            wrong.push(Wrong(format!("--set {text:?}: must be KEY=VALUE")));
            continue;
        };
        let place = format!("--set {key}");
        given.push(Given { key: canonical(key), value: value.to_owned(), origin: Origin::CommandLine, place });
    }
}

/// Values of a YAML or TOML file.
pub(super) fn file(path: &Path, given: &mut Vec<Given>, wrong: &mut Vec<Wrong>) {
    let shown_path = path.display();
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    let format = match extension.as_str() {
        "yaml" | "yml" => FileFormat::Yaml,
        "toml" => FileFormat::Toml,
        _ => {
            wrong.push(Wrong(format!("{shown_path}: the name must end in .yaml, .yml or .toml")));
            return;
        }
    };
    let table = std::fs::read_to_string(path).map_err(|e| e.to_string());
    match table.and_then(|text| parse(&text, format)) {
        Ok(table) => flatten(&shown_path.to_string(), "", table, given, wrong),
        Err(error) => wrong.push(Wrong(format!("{shown_path}: {}", one_line(&error)))),
    }
}

fn parse(text: &str, format: FileFormat) -> Result<Map<String, Value>, String> {
    // A file of comments alone is empty, and the YAML reader wants a mapping.
    if text.lines().all(|line| line.trim().is_empty() || line.trim_start().starts_with('#')) {
        return Ok(Map::new());
    }
    File::from_str(text, format).collect().map_err(|e| e.to_string())
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Nested tables join their names with `_`, so `connectors.gcp.port` is `CONNECTORS_GCP_PORT` and thus `PORT`.
fn flatten(file: &str, outer: &str, table: Map<String, Value>, given: &mut Vec<Given>, wrong: &mut Vec<Wrong>) {
    let mut items: Vec<_> = table.into_iter().collect();
    items.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, value) in items {
        let name = if outer.is_empty() { name } else { format!("{outer}_{name}") };
        match value.kind {
            ValueKind::Table(inner) => flatten(file, &name, inner, given, wrong),
            kind => match plain(kind) {
                Some(value) => {
                    let place = format!("{file}: {name}");
                    given.push(Given { key: canonical(&name), value, origin: Origin::File, place });
                }
                None => wrong.push(Wrong(format!("{file}: {name}: must be a number, a text, a flag or a list of them"))),
            },
        }
    }
}

/// A scalar as text; a list joined with semicolons.
fn plain(kind: ValueKind) -> Option<String> {
    match kind {
        ValueKind::Nil => Some(String::new()),
        ValueKind::Table(_) => None,
        ValueKind::Array(items) => {
            let items: Option<Vec<_>> = items.into_iter().map(|item| plain(item.kind)).collect();
            items.map(|items| items.join(";"))
        }
        scalar => Some(scalar.to_string()),
    }
}

/// The table's spelling of a key.
fn canonical(name: &str) -> String {
    let name = name.to_ascii_uppercase().replace('-', "_");
    name.strip_prefix(ENVIRONMENT_PREFIX).map_or(name.clone(), str::to_owned)
}

/// The error for a key that the table does not know.
pub(super) fn unknown(given: &Given) -> String {
    let nearest = KEYS.iter().map(|key| (strsim::damerau_levenshtein(key.name, &given.key), key.name)).min();
    let value = shown(&given.key, &given.value);
    let keys = KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", ");
    match nearest {
        Some((distance, name)) if distance <= 3 => {
            format!("{}={value:?}: unknown key; did you mean {name}? The keys are {keys}", given.place)
        }
        _ => format!("{}={value:?}: unknown key; the keys are {keys}", given.place),
    }
}
