//! The file: lists of schemas, topics, subscriptions and policies.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Map, Value, json};

use super::yaml::{Node, Place};
use crate::api::{proto::rpc::bad_request::FieldViolation, rest::Shape};

/// Fields that the service sets and shows; a file made from what it shows may have them, and they mean nothing.
const SHOWN_ONLY: [&str; 7] = [
    "state",
    "satisfiesPzs",
    "topicMessageRetentionDuration",
    "analyticsHubSubscriptionInfo",
    "revisionId",
    "revisionCreateTime",
    "etag",
];
/// Fields that `null` takes away.
const CLEARABLE: [&str; 5] = ["deadLetterPolicy", "retryPolicy", "pushConfig", "schemaSettings", "messageStoragePolicy"];
/// What the texts about the form of a request begin with.
const REQUEST_PREFIX: &str = "Invalid JSON payload received. ";

/// Kinds of resources, in the order they are made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Schema,
    Topic,
    Subscription,
    Policy,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Schema, Self::Topic, Self::Subscription, Self::Policy];

    /// The list of the file, and of the API.
    pub fn list(self) -> &'static str {
        match self {
            Self::Schema => "schemas",
            Self::Topic => "topics",
            Self::Subscription => "subscriptions",
            Self::Policy => "policies",
        }
    }

    /// One of them, in texts.
    pub fn noun(self) -> &'static str {
        match self {
            Self::Schema => "schema",
            Self::Topic => "topic",
            Self::Subscription => "subscription",
            Self::Policy => "policy of",
        }
    }

    /// The field that has the name.
    fn name_field(self) -> &'static str {
        if self == Self::Policy { "resource" } else { "name" }
    }

    fn is_name(self, name: &str) -> bool {
        let parts: Vec<_> = name.split('/').collect();
        let collection = match self {
            Self::Policy => parts.get(2).is_some_and(|c| ["topics", "subscriptions", "snapshots", "schemas"].contains(c)),
            kind => parts.get(2) == Some(&kind.list()),
        };
        parts.len() == 4 && parts[0] == "projects" && collection && !parts[1].is_empty() && !parts[3].is_empty()
    }
}

/// A resource as the file has it.
#[derive(Debug, Clone)]
pub struct Resource {
    pub kind: Kind,
    /// The full name.
    pub name: String,
    /// `resources.yaml:12:5`, or what else asks for it.
    pub place: String,
    /// Its fields in the API's spelling, without defaults.
    pub fields: Map<String, Value>,
    /// The fields that the file names, those with a default value included.
    pub named: Vec<String>,
    /// The definitions of a schema, the oldest first.
    pub revisions: Vec<Value>,
}

impl Resource {
    /// The project's id.
    pub fn project(&self) -> &str {
        self.name.split('/').nth(1).unwrap_or_default()
    }
}

/// What a file asks for, in the order it is made in.
#[derive(Debug, Clone, Default)]
pub struct Document {
    pub resources: Vec<Resource>,
}

impl Document {
    /// Reads a file.
    ///
    /// # Errors
    /// Everything that is wrong with it, each with its place, resource, field and value.
    pub fn read(path: &Path) -> Result<Self, Vec<String>> {
        let source = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| vec![format!("{source}: {e}")])?;
        Self::parse(&source, &text)
    }

    /// Reads a text; `source` is what errors call it.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn parse(source: &str, text: &str) -> Result<Self, Vec<String>> {
        let root = Node::read(text).map_err(|(place, why)| vec![format!("{source}:{place}: {why}")])?;
        let shapes = Shape::of([
            "google.pubsub.v1.Schema",
            "google.pubsub.v1.Topic",
            "google.pubsub.v1.Subscription",
            "google.iam.v1.Policy",
        ]);
        let shapes = shapes.map_err(|e| vec![e.to_string()])?;
        let mut reader = Reader { source, shapes, wrong: Vec::new(), seen: BTreeMap::new() };
        let mut document = Self::default();
        match root.entries() {
            None => reader.refuse(root.place, "must be a map with the lists schemas, topics, subscriptions and policies"),
            Some(lists) => {
                for (key, place, _) in lists.iter().filter(|(key, ..)| Kind::ALL.iter().all(|kind| kind.list() != key)) {
                    reader.refuse(*place, &format!("{key} is none of schemas, topics, subscriptions and policies"));
                }
                for kind in Kind::ALL {
                    let list = root.get(kind.list());
                    document.resources.extend(list.into_iter().flat_map(|list| reader.list(kind, list)));
                }
            }
        }
        if reader.wrong.is_empty() { Ok(document) } else { Err(reader.wrong) }
    }

    /// Adds a resource that something else than a file asks for, after those of its kind.
    pub fn push(&mut self, kind: Kind, name: &str, place: &str, fields: Map<String, Value>) {
        let at = self.resources.iter().take_while(|resource| resource.kind <= kind).count();
        let named = fields.keys().cloned().collect();
        let (name, place) = (name.to_owned(), place.to_owned());
        if !self.resources.iter().any(|resource| resource.kind == kind && resource.name == name) {
            self.resources.insert(at, Resource { kind, name, place, fields, named, revisions: Vec::new() });
        }
    }
}

struct Reader<'s> {
    source: &'s str,
    shapes: [Shape; 4],
    wrong: Vec<String>,
    seen: BTreeMap<(Kind, String), Place>,
}

impl Reader<'_> {
    fn refuse(&mut self, place: Place, why: &str) {
        self.wrong.push(format!("{}:{place}: {why}", self.source));
    }

    fn list(&mut self, kind: Kind, list: &Node) -> Vec<Resource> {
        if list.value().is_null() {
            return Vec::new();
        }
        match list.items() {
            Some(items) => items.iter().filter_map(|item| self.resource(kind, item)).collect(),
            None => {
                self.refuse(list.place, &format!("{} must be a list", kind.list()));
                Vec::new()
            }
        }
    }

    fn resource(&mut self, kind: Kind, node: &Node) -> Option<Resource> {
        let field = kind.name_field();
        let Some(name) = node.get(field).map(|name| name.value()) else {
            let why = format!("an item of {} has no {field}: {}", kind.list(), clipped(&node.value()));
            self.refuse(node.place, &why);
            return None;
        };
        let at = node.find(field);
        let Some(name) = name.as_str().filter(|name| kind.is_name(name)).map(str::to_owned) else {
            let like = if kind == Kind::Policy { "topics" } else { kind.list() };
            self.refuse(at, &format!("{field}: {name} is no name like projects/PROJECT/{like}/ID"));
            return None;
        };
        if let Some(first) = self.seen.insert((kind, name.clone()), at) {
            self.refuse(at, &format!("{name} is here for the second time, after line {}", first.line));
            return None;
        }
        let place = format!("{}:{at}", self.source);
        let mut resource = Resource { kind, name, place, fields: Map::new(), named: Vec::new(), revisions: Vec::new() };
        let before = self.wrong.len();
        match kind {
            Kind::Schema => self.schema(&mut resource, node),
            _ => self.fields(&mut resource, node),
        }
        (self.wrong.len() == before).then_some(resource)
    }

    /// Everything but a schema: fields of the API, and for a policy the name of its resource.
    fn fields(&mut self, resource: &mut Resource, node: &Node) {
        let shape = self.shapes[resource.kind as usize].clone();
        let mut object = Map::new();
        for (key, place, value) in node.entries().unwrap_or_default() {
            let name = shape.json_name(key).unwrap_or_else(|| key.clone());
            let skipped = SHOWN_ONLY.contains(&name.as_str()) || key == "resource" && resource.kind == Kind::Policy;
            if skipped || name == "detached" && value.value() == json!(false) {
                continue;
            }
            if name == "detached" {
                self.refuse(*place, &format!("{}: detached: a subscription can't be made detached", resource.name));
            }
            let content = value.value();
            if content.is_null() && !CLEARABLE.contains(&name.as_str()) {
                let why = format!(
                    "{}: {key} has no value; leave the field out to keep what is there, or write an empty one",
                    resource.name
                );
                self.refuse(*place, &why);
            }
            object.insert(key.clone(), content);
            resource.named.push(name);
        }
        resource.fields = self.canonical(&shape, &resource.name, node, &Value::Object(object));
    }

    /// A schema: one definition, or a list of them.
    fn schema(&mut self, resource: &mut Resource, node: &Node) {
        let shape = self.shapes[Kind::Schema as usize].clone();
        let mut common = Map::new();
        for (key, _, value) in node.entries().unwrap_or_default().iter().filter(|(key, ..)| key != "revisions") {
            if !SHOWN_ONLY.contains(&shape.json_name(key).unwrap_or_default().as_str()) {
                common.insert(key.clone(), value.value());
            }
        }
        let Some(revisions) = node.get("revisions") else {
            let revision = self.canonical(&shape, &resource.name, node, &Value::Object(common));
            resource.revisions = vec![definition(revision)];
            return;
        };
        let items = revisions.items().unwrap_or_default();
        if items.is_empty() || common.contains_key("definition") {
            let why =
                format!("{}: revisions must be a list of definitions, the oldest first, and stand for definition", resource.name);
            self.refuse(revisions.place, &why);
        }
        for item in items {
            let mut object = common.clone();
            match item.value() {
                Value::Object(fields) => {
                    object.extend(
                        fields
                            .into_iter()
                            .filter(|(key, _)| !SHOWN_ONLY.contains(&shape.json_name(key).unwrap_or_default().as_str())),
                    );
                }
                text => _ = object.insert("definition".into(), text),
            }
            let revision = self.canonical(&shape, &resource.name, item, &Value::Object(object));
            resource.revisions.push(definition(revision));
        }
    }

    fn canonical(&mut self, shape: &Shape, name: &str, node: &Node, object: &Value) -> Map<String, Value> {
        match shape.canonical(object) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) => Map::new(),
            Err(violations) => {
                for FieldViolation { field, description, .. } in violations {
                    let text = description.strip_prefix(REQUEST_PREFIX).unwrap_or(&description);
                    let unknown = text.strip_prefix("Unknown name \"").and_then(|rest| rest.split('"').next());
                    let place = unknown.and_then(|key| node.find_key(key)).unwrap_or_else(|| node.find(&field));
                    self.refuse(place, &format!("{name}: {text}"));
                }
                Map::new()
            }
        }
    }
}

/// What makes a revision: everything but the schema's name.
fn definition(mut revision: Map<String, Value>) -> Value {
    revision.remove("name");
    Value::Object(revision)
}

fn clipped(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
