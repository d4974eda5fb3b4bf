//! `landline import`: turns what `gcloud pubsub topics list --format=json` and its like print into a file for
//! `landline apply` and `PRELOAD_FILE`, and says what it leaves out.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Args;
use serde_json::{Map, Value, json};

use super::Error;
use crate::model::access::PermissionSet;

/// Fields of a topic that the server keeps.
const TOPIC_FIELDS: [&str; 7] =
    ["name", "labels", "messageRetentionDuration", "messageStoragePolicy", "kmsKeyName", "messageTransforms", "schemaSettings"];
/// Fields of a topic's schema settings that name revisions, whose ids differ from place to place.
const REVISION_FIELDS: [&str; 2] = ["firstRevisionId", "lastRevisionId"];
/// Fields of a subscription that the server keeps.
const SUBSCRIPTION_FIELDS: [&str; 14] = [
    "name",
    "topic",
    "labels",
    "pushConfig",
    "ackDeadlineSeconds",
    "retainAckedMessages",
    "messageRetentionDuration",
    "enableMessageOrdering",
    "expirationPolicy",
    "filter",
    "deadLetterPolicy",
    "retryPolicy",
    "enableExactlyOnceDelivery",
    "messageTransforms",
];
/// Fields that Google's service sets; nothing is lost without them.
const OUTPUT_FIELDS: [&str; 4] = ["state", "satisfiesPzs", "topicMessageRetentionDuration", "analyticsHubSubscriptionInfo"];
/// Fields that make a subscription write to another service.
const EXPORTS: [&str; 3] = ["bigqueryConfig", "cloudStorageConfig", "bigtableConfig"];
/// What stands for the topic of a subscription whose topic was deleted.
const DELETED_TOPIC: &str = "_deleted-topic_";

/// Arguments of `landline import`.
#[derive(Debug, Clone, Args)]
pub struct Import {
    /// Output of `gcloud pubsub topics list --format=json`; may be repeated
    #[arg(long, value_name = "FILE", required = true)]
    topics: Vec<PathBuf>,

    /// Output of `gcloud pubsub subscriptions list --format=json`; may be repeated
    #[arg(long, value_name = "FILE")]
    subscriptions: Vec<PathBuf>,

    /// Output of `gcloud pubsub schemas list --view=full --format=json`, or `list-revisions` of one schema; may be repeated
    #[arg(long, value_name = "FILE")]
    schemas: Vec<PathBuf>,

    /// A resource's full name, and the output of its `get-iam-policy --format=json`; may be repeated
    #[arg(long, value_name = "RESOURCE=FILE", value_parser = parse_policy)]
    policy: Vec<(String, PathBuf)>,

    /// Another name for a project; may be repeated
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_rename)]
    project: Vec<(String, String)>,
}

fn parse_rename(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err("must be OLD=NEW".into()),
    }
}

fn parse_policy(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((resource, file)) if resource.starts_with("projects/") && !file.is_empty() => Ok((resource.to_owned(), file.into())),
        _ => Err("must be RESOURCE=FILE, such as projects/shop/topics/orders=policy.json".into()),
    }
}

/// What gcloud printed.
#[derive(Default)]
struct Lists {
    topics: Vec<Map<String, Value>>,
    subscriptions: Vec<Map<String, Value>>,
    /// Revisions of schemas.
    schemas: Vec<Map<String, Value>>,
    policies: Vec<(String, Map<String, Value>)>,
}

/// Prints the file to standard output, and what it can't carry to standard error.
///
/// # Errors
/// When a list can't be read or the output can't be written.
pub fn run(import: &Import) -> Result<(), Error> {
    let mut lists = Lists {
        topics: read_all(&import.topics)?,
        subscriptions: read_all(&import.subscriptions)?,
        schemas: read_all(&import.schemas)?,
        policies: Vec::new(),
    };
    for (resource, path) in &import.policy {
        let policy = read_policy(path).map_err(|why| Error::Import(format!("{}: {why}", path.display())))?;
        lists.policies.push((resource.clone(), policy));
    }
    let (document, left_out) = convert(lists, &import.project);
    for line in left_out {
        eprintln!("left out: {line}");
    }
    let text = serde_json::to_string_pretty(&document).map_err(|e| Error::Import(e.to_string()))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Error::Output)
}

fn read_all(paths: &[PathBuf]) -> Result<Vec<Map<String, Value>>, Error> {
    let mut resources = Vec::new();
    for path in paths {
        resources.extend(read(path).map_err(|why| Error::Import(format!("{}: {why}", path.display())))?);
    }
    Ok(resources)
}

fn read(path: &Path) -> Result<Vec<Map<String, Value>>, String> {
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    match serde_json::from_str(&text).map_err(|e| e.to_string())? {
        Value::Array(items) => items
            .into_iter()
            .map(|item| match item {
                Value::Object(resource) if resource.get("name").is_some_and(Value::is_string) => Ok(resource),
                other => Err(format!("an item is no resource with a name: {other}")),
            })
            .collect(),
        _ => Err("must be a list, as gcloud prints it with --format=json".into()),
    }
}

fn read_policy(path: &Path) -> Result<Map<String, Value>, String> {
    let text = fs::read_to_string(path).map_err(|e| e.to_string())?;
    match serde_json::from_str(&text).map_err(|e| e.to_string())? {
        Value::Object(policy)
            if policy.keys().all(|key| ["bindings", "etag", "version", "auditConfigs"].contains(&key.as_str())) =>
        {
            Ok(policy)
        }
        _ => Err("must be a policy, as gcloud prints it with --format=json".into()),
    }
}

/// The file's content, and what is not in it, a line each.
fn convert(lists: Lists, renames: &[(String, String)]) -> (Value, Vec<String>) {
    let Lists { topics, subscriptions, schemas, policies } = lists;
    let mut left_out = Vec::new();
    let mut missing = vec!["messages", "snapshots"];
    missing.extend(schemas.is_empty().then_some("schemas"));
    missing.extend(policies.is_empty().then_some("access policies"));
    let schemas = group(schemas, renames, &mut left_out);
    let known: BTreeSet<String> = schemas.iter().map(|schema| text(schema, "name").to_owned()).collect();
    let topic = |topic| with_schema(keep(renamed(topic, renames), &TOPIC_FIELDS, &mut left_out), &known, &mut left_out);
    let topics: Vec<_> = topics.into_iter().map(topic).collect();
    let known: BTreeSet<String> = topics.iter().map(|topic| text(topic, "name").to_owned()).collect();
    let mut kept = Vec::new();
    for subscription in subscriptions {
        let subscription = renamed(subscription, renames);
        match refusal(&subscription, &known) {
            Some(why) => left_out.push(format!("{}: {why}", text(&subscription, "name"))),
            None => kept.push(keep(subscription, &SUBSCRIPTION_FIELDS, &mut left_out)),
        }
    }
    for subscription in &kept {
        let dead = subscription.get("deadLetterPolicy").and_then(|policy| policy["deadLetterTopic"].as_str());
        if let Some(dead) = dead.filter(|dead| !known.contains(*dead)) {
            left_out.push(format!("{dead}: the dead-letter topic of {} is in none of the lists", text(subscription, "name")));
        }
    }
    let policies: Vec<_> =
        policies.into_iter().filter_map(|(resource, policy)| bindings(resource, policy, renames, &mut left_out)).collect();
    let last = missing.pop().unwrap_or_default();
    left_out.push(format!("{} and {last}: they are not in these lists", missing.join(", ")));
    let mut document = Map::from_iter([("topics".to_owned(), json!(topics)), ("subscriptions".to_owned(), json!(kept))]);
    for (list, items) in [("schemas", schemas), ("policies", policies)] {
        if !items.is_empty() {
            document.insert(list.to_owned(), json!(items));
        }
    }
    (Value::Object(document), left_out)
}

/// Schemas with their revisions, the oldest first.
fn group(
    revisions: Vec<Map<String, Value>>,
    renames: &[(String, String)],
    left_out: &mut Vec<String>,
) -> Vec<Map<String, Value>> {
    let mut schemas = BTreeMap::<String, Vec<Map<String, Value>>>::new();
    for revision in revisions {
        let revision = renamed(revision, renames);
        // A revision may be named SCHEMA@REVISION.
        let name = text(&revision, "name").split('@').next().unwrap_or_default().to_owned();
        let known = schemas.entry(name).or_default();
        if !known.iter().any(|other| text(other, "revisionId") == text(&revision, "revisionId")) {
            known.push(revision);
        }
    }
    let mut kept = Vec::new();
    for (name, mut revisions) in schemas {
        if revisions.iter().any(|revision| text(revision, "definition").is_empty()) {
            left_out.push(format!("{name}: its definition; the list must be made with --view=full"));
            continue;
        }
        // Times of one form and zone: their order is that of the texts.
        revisions.sort_by_key(|revision| text(revision, "revisionCreateTime").to_owned());
        let kind = revisions[0].get("type").cloned().unwrap_or_default();
        let definitions: Vec<_> = revisions.iter().map(|revision| json!({"definition": text(revision, "definition")})).collect();
        kept.push(Map::from_iter([
            ("name".to_owned(), json!(name)),
            ("type".to_owned(), kind),
            ("revisions".to_owned(), json!(definitions)),
        ]));
    }
    kept
}

/// A topic whose schema, if it has one, will be there.
fn with_schema(mut topic: Map<String, Value>, known: &BTreeSet<String>, left_out: &mut Vec<String>) -> Map<String, Value> {
    let name = text(&topic, "name").to_owned();
    let Some(Value::Object(settings)) = topic.get_mut("schemaSettings") else { return topic };
    for field in REVISION_FIELDS {
        if settings.remove(field).is_some() {
            left_out.push(format!("{name}: schemaSettings.{field}: ids of revisions differ from place to place"));
        }
    }
    let schema = text(settings, "schema").to_owned();
    if !known.contains(&schema) {
        topic.remove("schemaSettings");
        left_out.push(format!("{name}: schemaSettings: {schema} is in none of the lists"));
    }
    topic
}

/// A policy as the file has it.
fn bindings(
    mut resource: String,
    policy: Map<String, Value>,
    renames: &[(String, String)],
    left_out: &mut Vec<String>,
) -> Option<Map<String, Value>> {
    rename(&mut resource, renames);
    let mut kept = Vec::new();
    for binding in policy.get("bindings").and_then(Value::as_array).into_iter().flatten() {
        let role = binding["role"].as_str().unwrap_or_default();
        if !binding["condition"].is_null() {
            left_out.push(format!("{resource}: {role} under a condition"));
        } else if !role.starts_with("roles/pubsub.") || PermissionSet::of_role(role).is_none() {
            left_out.push(format!("{resource}: {role}: it is no predefined role of Pub/Sub"));
        } else {
            kept.push(binding.clone());
        }
    }
    (!kept.is_empty()).then(|| Map::from_iter([("resource".to_owned(), json!(resource)), ("bindings".to_owned(), json!(kept))]))
}

/// Why a subscription can't be carried over.
fn refusal(subscription: &Map<String, Value>, topics: &BTreeSet<String>) -> Option<String> {
    let topic = text(subscription, "topic");
    if let Some(export) = EXPORTS.iter().find(|field| subscription.contains_key(**field)) {
        return Some(format!("it exports to another service ({export})"));
    }
    if topic == DELETED_TOPIC {
        return Some("its topic was deleted".into());
    }
    if subscription.get("detached") == Some(&Value::Bool(true)) {
        return Some("it is detached".into());
    }
    (!topics.contains(topic)).then(|| format!("its topic {topic} is in none of the lists"))
}

/// A resource with the known fields only.
fn keep(resource: Map<String, Value>, fields: &[&str], left_out: &mut Vec<String>) -> Map<String, Value> {
    let name = text(&resource, "name").to_owned();
    let mut kept = Map::new();
    for (field, value) in resource {
        // An empty push configuration is how a list shows that there is none; an empty expiration policy means never.
        let empty = value.is_null() || value == json!({}) && field != "expirationPolicy";
        if fields.contains(&field.as_str()) {
            if !empty {
                kept.insert(field, value);
            }
        } else if !OUTPUT_FIELDS.contains(&field.as_str()) && !empty && value != Value::Bool(false) {
            left_out.push(format!("{name}: {field}"));
        }
    }
    kept
}

/// The same resource in renamed projects.
fn renamed(mut resource: Map<String, Value>, renames: &[(String, String)]) -> Map<String, Value> {
    for field in ["name", "topic"] {
        if let Some(Value::String(name)) = resource.get_mut(field) {
            rename(name, renames);
        }
    }
    for (field, inner) in [("deadLetterPolicy", "deadLetterTopic"), ("schemaSettings", "schema")] {
        if let Some(Value::String(name)) = resource.get_mut(field).and_then(|object| object.get_mut(inner)) {
            rename(name, renames);
        }
    }
    resource
}

fn rename(name: &mut String, renames: &[(String, String)]) {
    let found = name.strip_prefix("projects/").and_then(|rest| {
        let (project, rest) = rest.split_once('/')?;
        let (_, new) = renames.iter().find(|(old, _)| old == project)?;
        Some(format!("projects/{new}/{rest}"))
    });
    if let Some(new) = found {
        *name = new;
    }
}

fn text<'a>(resource: &'a Map<String, Value>, field: &str) -> &'a str {
    resource.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn resources(list: Value) -> Vec<Map<String, Value>> {
        serde_json::from_value(list).unwrap()
    }

    #[test]
    fn what_the_server_keeps_is_carried_and_the_rest_is_named() {
        let topics = resources(json!([
            {"name": "projects/old/topics/orders", "labels": {"a": "b"}, "state": "ACTIVE", "ingestionDataSourceSettings": {"x": 1}},
            {"name": "projects/old/topics/dead", "schemaSettings": {"schema": "projects/old/schemas/s"}},
        ]));
        let subscriptions = resources(json!([
            {
                "name": "projects/old/subscriptions/billing", "topic": "projects/old/topics/orders", "state": "ACTIVE",
                "ackDeadlineSeconds": 30, "pushConfig": {}, "expirationPolicy": {}, "filter": "attributes:x", "detached": false,
                "deadLetterPolicy": {"deadLetterTopic": "projects/old/topics/dead", "maxDeliveryAttempts": 5}
            },
            {"name": "projects/old/subscriptions/export", "topic": "projects/old/topics/orders", "bigqueryConfig": {"table": "t"}},
            {"name": "projects/old/subscriptions/orphan", "topic": "_deleted-topic_"},
            {"name": "projects/old/subscriptions/off", "topic": "projects/old/topics/orders", "detached": true},
            {"name": "projects/old/subscriptions/far", "topic": "projects/other/topics/t"},
        ]));
        let lists = Lists { topics, subscriptions, ..Lists::default() };
        let (document, left_out) = convert(lists, &[("old".into(), "new".into())]);
        let expected = json!({
            "topics": [{"name": "projects/new/topics/orders", "labels": {"a": "b"}}, {"name": "projects/new/topics/dead"}],
            "subscriptions": [{
                "name": "projects/new/subscriptions/billing", "topic": "projects/new/topics/orders", "ackDeadlineSeconds": 30,
                "expirationPolicy": {}, "filter": "attributes:x",
                "deadLetterPolicy": {"deadLetterTopic": "projects/new/topics/dead", "maxDeliveryAttempts": 5}
            }],
        });
        assert_eq!(document, expected);
        assert_eq!(
            left_out,
            [
                "projects/new/topics/orders: ingestionDataSourceSettings",
                "projects/new/topics/dead: schemaSettings: projects/new/schemas/s is in none of the lists",
                "projects/new/subscriptions/export: it exports to another service (bigqueryConfig)",
                "projects/new/subscriptions/orphan: its topic was deleted",
                "projects/new/subscriptions/off: it is detached",
                "projects/new/subscriptions/far: its topic projects/other/topics/t is in none of the lists",
                "messages, snapshots, schemas and access policies: they are not in these lists",
            ]
        );
    }

    #[test]
    fn a_dead_letter_topic_that_is_missing_is_named() {
        let topics = resources(json!([{"name": "projects/p/topics/t"}]));
        let subscriptions = resources(json!([{
            "name": "projects/p/subscriptions/s", "topic": "projects/p/topics/t",
            "deadLetterPolicy": {"deadLetterTopic": "projects/q/topics/dead"}
        }]));
        let (document, left_out) = convert(Lists { topics, subscriptions, ..Lists::default() }, &[]);
        assert_eq!(document["subscriptions"].as_array().unwrap().len(), 1);
        assert_eq!(
            left_out[0],
            "projects/q/topics/dead: the dead-letter topic of projects/p/subscriptions/s is in none of the lists"
        );
    }

    #[test]
    fn a_file_that_is_no_list_of_resources_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for (content, why) in [("{}", "must be a list"), ("[1]", "no resource with a name"), ("[", "EOF")] {
            let path = folder.path().join("list.json");
            fs::write(&path, content).unwrap();
            let error = read_all(&[path]).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("list.json"), "{error}");
        }
    }

    #[test]
    fn schemas_are_carried_with_their_revisions_and_policies_with_known_roles() {
        let revision = |id: &str, day: &str, text: &str| {
            json!({"name": format!("projects/old/schemas/s@{id}"), "type": "AVRO", "definition": text, "revisionId": id,
                   "revisionCreateTime": format!("2026-01-{day}T00:00:00Z")})
        };
        let lists = Lists {
            topics: resources(json!([{
                "name": "projects/old/topics/t",
                "schemaSettings": {"schema": "projects/old/schemas/s", "encoding": "JSON", "firstRevisionId": "1"}
            }])),
            subscriptions: Vec::new(),
            schemas: resources(json!([
                revision("2", "02", "newer"), revision("1", "01", "older"), revision("2", "02", "newer"),
                {"name": "projects/old/schemas/basic", "type": "AVRO", "revisionId": "9"},
            ])),
            policies: vec![(
                "projects/old/topics/t".into(),
                serde_json::from_value(json!({"etag": "x", "bindings": [
                    {"role": "roles/pubsub.publisher", "members": ["user:a@x.example"]},
                    {"role": "roles/pubsub.viewer", "members": ["user:a@x.example"], "condition": {"expression": "true"}},
                    {"role": "roles/editor", "members": ["user:a@x.example"]},
                ]}))
                .unwrap(),
            )],
        };
        let (document, left_out) = convert(lists, &[("old".into(), "new".into())]);
        let expected = json!({
            "schemas": [{
                "name": "projects/new/schemas/s", "type": "AVRO",
                "revisions": [{"definition": "older"}, {"definition": "newer"}]
            }],
            "topics": [{
                "name": "projects/new/topics/t", "schemaSettings": {"schema": "projects/new/schemas/s", "encoding": "JSON"}
            }],
            "subscriptions": [],
            "policies": [{
                "resource": "projects/new/topics/t",
                "bindings": [{"role": "roles/pubsub.publisher", "members": ["user:a@x.example"]}]
            }],
        });
        assert_eq!(document, expected);
        assert_eq!(
            left_out,
            [
                "projects/new/schemas/basic: its definition; the list must be made with --view=full",
                "projects/new/topics/t: schemaSettings.firstRevisionId: ids of revisions differ from place to place",
                "projects/new/topics/t: roles/pubsub.viewer under a condition",
                "projects/new/topics/t: roles/editor: it is no predefined role of Pub/Sub",
                "messages and snapshots: they are not in these lists",
            ]
        );
    }

    #[test]
    fn a_rename_is_two_names() {
        assert!(parse_policy("orders=x").is_err() && parse_policy("projects/p/topics/t=x").is_ok());
        assert_eq!(parse_rename("a=b"), Ok(("a".into(), "b".into())));
        assert!(["a", "=b", "a=", ""].into_iter().all(|text| parse_rename(text).is_err()));
    }
}
