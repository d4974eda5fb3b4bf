//! Two nodes on one Redis, of which one never hears what the other changed: what was answered must be in force there all the
//! same.

use std::time::Duration;

use super::*;
use crate::{connector::pull::Pulled, model::SchemaName};

struct Nodes {
    a: Arc<Connector>,
    /// Hears nothing.
    deaf: Arc<Connector>,
}

impl Nodes {
    async fn new() -> Self {
        let url = empty_database();
        let open = async || {
            let broker = Redis::open(&url, StoreOptions::default()).await.unwrap();
            Connector::open(broker, Options::default()).await.unwrap()
        };
        let (a, deaf) = (open().await, open().await);
        // The task that follows the events is the first that a connector starts.
        deaf.tasks.lock()[0].abort();
        Self { a, deaf }
    }

    async fn update_topic(&self, field: &str, change: impl FnOnce(&mut TopicDraft)) {
        let mut draft = topic_draft("t11");
        change(&mut draft);
        self.a.update_topic(draft, &mask(&[field])).await.unwrap();
    }

    async fn update(&self, field: &str, change: impl FnOnce(&mut SubscriptionDraft)) {
        let mut draft = SubscriptionDraft { topic: String::new(), ..subscription_draft("s11", "") };
        change(&mut draft);
        self.a.update_subscription(draft, &mask(&[field])).await.unwrap();
    }

    /// Publishes on the node that hears nothing.
    async fn publish(&self, data: &str) -> Result<(), Error> {
        self.deaf.publish(&topic_name("t11"), vec![message(data)]).await.map(drop)
    }

    /// Pulls one message there.
    async fn pull(&self) -> Result<Pulled, Error> {
        self.deaf.pull(&subscription_name("s11"), 1, Duration::from_secs(5)).await
    }
}

fn avro(field: &str) -> DefinitionDraft {
    let text = format!(r#"{{"type":"record","name":"R","fields":[{field}]}}"#);
    DefinitionDraft { kind: Some(crate::model::SchemaType::Avro), text, compiled: None }
}

#[cfg(feature = "schemas")]
#[tokio::test]
async fn a_changed_schema_of_a_topic_is_in_force_on_a_node_that_was_not_told() {
    let nodes = Nodes::new().await;
    let (name, encoding) = (SchemaName::new("p1", "sch").unwrap(), Some(crate::model::Encoding::Json));
    nodes.a.create_topic(topic_draft("t11")).await.unwrap();
    nodes.a.create_subscription(subscription_draft("s11", "t11")).await.unwrap();
    assert_eq!(nodes.publish("anything").await, Ok(()));
    nodes.a.create_schema("projects/p1", "sch", avro(r#"{"name":"a","type":"int"}"#)).await.unwrap();
    let settings = || Some(SchemaDraft { schema: name.to_string(), encoding, ..SchemaDraft::default() });
    nodes.update_topic("schema_settings", |t| t.schema_settings = settings()).await;
    assert!(matches!(nodes.publish("anything").await, Err(Error::SchemaViolation(_))));
    assert_eq!(nodes.publish(r#"{"a":1}"#).await, Ok(()));

    // What only the newest revision allows, and what only a revision allowed that is no more.
    let second = avro(r#"{"name":"a","type":"int"},{"name":"b","type":"int","default":0}"#);
    let second = nodes.a.commit_schema(&name, second).await.unwrap().revision_id;
    assert_eq!(nodes.publish(r#"{"a":1,"b":2}"#).await, Ok(()));
    nodes.a.delete_revision(&name, &second).await.unwrap();
    assert!(matches!(nodes.publish(r#"{"a":1,"b":2}"#).await, Err(Error::SchemaViolation(_))));
    assert_eq!(nodes.publish(r#"{"a":2}"#).await, Ok(()));

    nodes.update_topic("schema_settings", |t| t.schema_settings = None).await;
    assert_eq!(nodes.publish("anything again").await, Ok(()));
    nodes.update_topic("schema_settings", |t| t.schema_settings = settings()).await;
    assert_eq!(nodes.publish(r#"{"a":3}"#).await, Ok(()));
    nodes.a.delete_schema(&name).await.unwrap();
    assert_eq!(nodes.publish(r#"{"a":4}"#).await, Err(Error::SchemaDeleted));

    let mut texts = Vec::new();
    while texts.len() < 6 {
        texts.extend(nodes.pull().await.unwrap().messages.iter().map(|m| payload(&m.message)));
    }
    assert_eq!(texts, ["anything", r#"{"a":1}"#, r#"{"a":1,"b":2}"#, r#"{"a":2}"#, "anything again", r#"{"a":3}"#]);
    nodes.a.delete_topic(&topic_name("t11")).await.unwrap();
    assert_eq!(nodes.publish("late").await, Err(Error::NotFound("t11".into())));
}

#[cfg(feature = "transforms")]
#[tokio::test]
async fn changed_transforms_are_in_force_on_a_node_that_was_not_told() {
    let nodes = Nodes::new().await;
    nodes.a.create_topic(topic_draft("t11")).await.unwrap();
    nodes.a.create_subscription(subscription_draft("s11", "t11")).await.unwrap();
    let adds = |what: &str| {
        let code = format!("function f(m) {{ if (m.data === 'x') return null; m.data += '{what}'; return m; }}");
        vec![TransformDraft {
            kind: TransformKind::JavaScript { function_name: "f".into(), code },
            disabled: false,
            enabled: false,
        }]
    };
    let mut expected = Vec::new();
    for round in ["a", "b", "c"] {
        nodes.update_topic("message_transforms", |t| t.message_transforms = adds(round)).await;
        nodes.publish("m").await.unwrap();
        expected.push(format!("m{round}"));
        // Dropped, so that nothing of it reaches the broker.
        nodes.publish("x").await.unwrap();
        nodes.update_topic("message_transforms", |t| t.message_transforms.clear()).await;
        nodes.publish("x").await.unwrap();
        expected.push("x".into());
    }
    let mut texts = Vec::new();
    while texts.len() < expected.len() {
        texts.extend(nodes.pull().await.unwrap().messages.iter().map(|m| payload(&m.message)));
    }
    assert_eq!(texts, expected);
    for round in ["a", "b", "c"] {
        nodes.publish("m").await.unwrap();
        nodes.update("message_transforms", |s| s.message_transforms = adds(round)).await;
        assert_eq!(payload(&nodes.pull().await.unwrap().messages[0].message), format!("m{round}"));
    }
}

#[tokio::test]
async fn a_changed_subscription_is_in_force_on_a_node_that_was_not_told() {
    let nodes = Nodes::new().await;
    let name = subscription_name("s11");
    for id in ["t11", "dead"] {
        nodes.a.create_topic(topic_draft(id)).await.unwrap();
    }
    nodes.a.create_subscription(subscription_draft("s11", "t11")).await.unwrap();
    for data in ["a", "b", "c", "d", "e"] {
        nodes.publish(data).await.unwrap();
    }
    let first = nodes.pull().await.unwrap().messages;
    assert_eq!(first[0].delivery_attempt, 0);

    let policy = DeadLetterDraft { dead_letter_topic: topic_name("dead").to_string(), ..DeadLetterDraft::default() };
    nodes.update("dead_letter_policy", |s| s.dead_letter_policy = Some(policy)).await;
    assert_eq!(nodes.pull().await.unwrap().messages[0].delivery_attempt, 1);

    nodes.update("ack_deadline_seconds", |s| s.ack_deadline_seconds = 600).await;
    nodes.pull().await.unwrap();
    let entry = nodes.deaf.subscription(&name).await.unwrap();
    assert_eq!(entry.subscription.ack_deadline_seconds, 600);

    // The first lease ends by a nack; its id is of no use then, which only exactly-once delivery tells.
    let id = std::slice::from_ref(&first[0].ack_id);
    nodes.deaf.modify_ack_deadline(&name, id, 0).await.unwrap();
    assert_eq!(nodes.deaf.modify_ack_deadline(&name, id, 20).await, Ok(()));
    nodes.update("enable_exactly_once_delivery", |s| s.enable_exactly_once_delivery = true).await;
    assert!(matches!(nodes.deaf.modify_ack_deadline(&name, id, 20).await, Err(Error::AckIds(_))));

    nodes.a.detach_subscription(&name).await.unwrap();
    assert!(matches!(nodes.pull().await.err(), Some(Error::Detached(_))));
    nodes.a.delete_subscription(&name).await.unwrap();
    assert_eq!(nodes.pull().await.err(), Some(Error::NotFound("s11".into())));
    assert_eq!(nodes.deaf.acknowledge(&name, id).await, Err(Error::NotFound("s11".into())));
}
