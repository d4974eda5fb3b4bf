//! What differs between a resource of the file and the one that is there.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::document::{Kind, Resource};

/// Fields that are replaced as a whole; of the others, only the parts that the file names are compared and changed.
const WHOLE: [&str; 4] = ["labels", "expirationPolicy", "pushConfig", "messageTransforms"];
/// Fields of a topic that can't be changed.
const FIXED_TOPIC: [&str; 1] = ["kmsKeyName"];
/// Fields of a subscription that can't be changed.
const FIXED_SUBSCRIPTION: [&str; 3] = ["topic", "filter", "enableMessageOrdering"];

/// One difference.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// The field, `labels.team`.
    pub field: String,
    /// What is there; null for nothing.
    pub old: Value,
    /// What the file wants.
    pub new: Value,
    /// The field can't be changed.
    pub fixed: bool,
}

/// The differences of a topic or a subscription, and the fields to send, with their names, where some can be changed.
pub fn fields(resource: &Resource, have: &Map<String, Value>) -> (Vec<Change>, Map<String, Value>, Vec<String>) {
    let (mut changes, mut body, mut mask) = (Vec::new(), Map::new(), Vec::new());
    let fixed: &[&str] = if resource.kind == Kind::Topic { &FIXED_TOPIC } else { &FIXED_SUBSCRIPTION };
    for field in resource.named.iter().filter(|field| *field != "name") {
        let want = resource.fields.get(field).cloned().unwrap_or_default();
        let old = have.get(field).cloned().unwrap_or_default();
        // Zero stands for the default, whatever that is.
        if want.is_null() && field == "ackDeadlineSeconds" {
            continue;
        }
        let whole = WHOLE.contains(&field.as_str());
        let before = changes.len();
        if field == "pushConfig" {
            differences(field, &without_defaults(&want), &without_defaults(&old), whole, &mut changes);
        } else {
            differences(field, &want, &old, whole, &mut changes);
        }
        if changes.len() == before {
            continue;
        }
        if fixed.contains(&field.as_str()) {
            changes[before..].iter_mut().for_each(|change| change.fixed = true);
            continue;
        }
        mask.push(field.clone());
        let merged = if whole || want.is_null() { want } else { merged(old, want) };
        if !merged.is_null() {
            body.insert(field.clone(), merged);
        }
    }
    (changes, body, mask)
}

fn differences(path: &str, want: &Value, have: &Value, whole: bool, changes: &mut Vec<Change>) {
    match (want, have) {
        (Value::Object(wanted), Value::Object(had)) => {
            let others = had.keys().filter(|key| whole && !wanted.contains_key(*key));
            for key in wanted.keys().chain(others) {
                let (want, have) = (wanted.get(key).unwrap_or(&Value::Null), had.get(key).unwrap_or(&Value::Null));
                differences(&format!("{path}.{key}"), want, have, whole, changes);
            }
        }
        // No labels are as good as an empty map; an empty policy is something else than none.
        (Value::Object(empty), Value::Null) | (Value::Null, Value::Object(empty))
            if empty.is_empty() && (path == "labels" || path == "pushConfig") => {}
        (want, have) if want == have => {}
        (want, have) => {
            changes.push(Change { field: path.to_owned(), old: have.clone(), new: want.clone(), fixed: false });
        }
    }
}

/// A push configuration without what a service adds to it by itself.
fn without_defaults(config: &Value) -> Value {
    let mut config = config.clone();
    if let Value::Object(fields) = &mut config {
        if let Some(Value::Object(attributes)) = fields.get_mut("attributes") {
            attributes.remove("x-goog-version");
        }
        let empty = |value: &Value| *value == json!({});
        fields.retain(|key, value| !(empty(value) && (key == "attributes" || key == "pubsubWrapper")));
        if let (Some(endpoint), Some(Value::Object(token))) = (fields.get("pushEndpoint").cloned(), fields.get_mut("oidcToken"))
            && token.get("audience") == Some(&endpoint)
        {
            token.remove("audience");
        }
    }
    config
}

/// What is there, with what the file names laid over it.
fn merged(have: Value, want: Value) -> Value {
    match (have, want) {
        (Value::Object(mut have), Value::Object(want)) => {
            for (key, value) in want {
                let old = have.remove(&key).unwrap_or_default();
                have.insert(key, merged(old, value));
            }
            Value::Object(have)
        }
        (_, want) => want,
    }
}

/// The differences of two policies: the members of each role.
pub fn policies(want: &Value, have: &Value) -> Vec<Change> {
    let (want, have) = (roles(want), roles(have));
    let mut keys: Vec<_> = want.keys().chain(have.keys()).collect();
    keys.sort();
    keys.dedup();
    let members = |roles: &BTreeMap<String, Vec<String>>, key: &str| roles.get(key).map_or(Value::Null, |members| json!(members));
    keys.into_iter()
        .map(|key| Change { field: key.clone(), old: members(&have, key), new: members(&want, key), fixed: false })
        .filter(|change| change.old != change.new)
        .collect()
}

/// The members of each role, sorted; roles under a condition are told apart by it.
fn roles(policy: &Value) -> BTreeMap<String, Vec<String>> {
    let mut roles = BTreeMap::<_, Vec<_>>::new();
    for binding in policy["bindings"].as_array().into_iter().flatten() {
        let role = binding["role"].as_str().unwrap_or_default();
        let key = if binding["condition"].is_null() { role.to_owned() } else { format!("{role} if {}", binding["condition"]) };
        let members = binding["members"].as_array().into_iter().flatten();
        roles.entry(key).or_default().extend(members.filter_map(|member| member.as_str().map(str::to_owned)));
    }
    for members in roles.values_mut() {
        members.sort();
        members.dedup();
    }
    roles.retain(|_, members| !members.is_empty());
    roles
}
