//! `landline import`: turns what `gcloud pubsub topics list --format=json` and its like print into a file for
//! `PRELOAD_FILE`, and says what it leaves out.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use clap::Args;
use serde_json::{Map, Value, json};

use super::Error;

/// Fields of a topic that the server keeps.
const TOPIC_FIELDS: [&str; 6] =
    ["name", "labels", "messageRetentionDuration", "messageStoragePolicy", "kmsKeyName", "messageTransforms"];
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

/// Prints the file to standard output, and what it can't carry to standard error.
///
/// # Errors
/// When a list can't be read or the output can't be written.
pub fn run(import: &Import) -> Result<(), Error> {
    let (topics, subscriptions) = (read_all(&import.topics)?, read_all(&import.subscriptions)?);
    let (document, left_out) = convert(topics, subscriptions, &import.project);
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

/// The file's content, and what is not in it, a line each.
fn convert(
    topics: Vec<Map<String, Value>>,
    subscriptions: Vec<Map<String, Value>>,
    renames: &[(String, String)],
) -> (Value, Vec<String>) {
    let mut left_out = Vec::new();
    let topics: Vec<_> = topics.into_iter().map(|topic| keep(renamed(topic, renames), &TOPIC_FIELDS, &mut left_out)).collect();
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
    left_out.push("messages, snapshots, schemas and access policies: they are not in these lists".into());
    (json!({"topics": topics, "subscriptions": kept}), left_out)
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
    if let Some(Value::String(name)) = resource.get_mut("deadLetterPolicy").and_then(|policy| policy.get_mut("deadLetterTopic")) {
        rename(name, renames);
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
        let (document, left_out) = convert(topics, subscriptions, &[("old".into(), "new".into())]);
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
                "projects/new/topics/dead: schemaSettings",
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
        let (document, left_out) = convert(topics, subscriptions, &[]);
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
    fn a_rename_is_two_names() {
        assert_eq!(parse_rename("a=b"), Ok(("a".into(), "b".into())));
        assert!(["a", "=b", "a=", ""].into_iter().all(|text| parse_rename(text).is_err()));
    }
}
