//! Schemas and the topics that use them, on the embedded broker.

use bytes::Bytes;

use super::{Detail, SchemaSpec, SchemaView, parse_revision_name};
use crate::{
    connector::{
        Error, PageRequest,
        draft::{CompiledDraft, DefinitionDraft, SchemaDraft, TopicDraft},
        rig::Rig,
    },
    model::{EncodedMessage, Encoding, SchemaName, SchemaType, TopicName, limits::MAX_SCHEMA_REVISIONS},
};

fn avro(fields: &str) -> DefinitionDraft {
    let text = format!(r#"{{"type":"record","name":"R","fields":[{fields}]}}"#);
    DefinitionDraft { kind: Some(SchemaType::Avro), text, compiled: None }
}

fn proto(fields: &str) -> DefinitionDraft {
    let text = format!("syntax = \"proto3\"; message M {{ {fields} }}");
    DefinitionDraft { kind: Some(SchemaType::ProtocolBuffer), text, compiled: None }
}

const A: &str = r#"{"name":"a","type":"int"}"#;
const A_AND_B: &str = r#"{"name":"a","type":"int"},{"name":"b","type":"int","default":0}"#;

fn name(id: &str) -> SchemaName {
    SchemaName::new("p1", id).unwrap()
}

fn topic() -> TopicName {
    TopicName::new("p1", "checked").unwrap()
}

fn draft(schema: &str, first: &str, last: &str) -> TopicDraft {
    TopicDraft {
        name: topic().to_string(),
        schema_settings: Some(SchemaDraft {
            schema: schema.to_owned(),
            encoding: Some(Encoding::Json),
            first_revision_id: first.to_owned(),
            last_revision_id: last.to_owned(),
        }),
        ..TopicDraft::default()
    }
}

impl Rig {
    async fn create(&self, id: &str, definition: DefinitionDraft) -> SchemaView {
        self.connector.create_schema("projects/p1", id, definition).await.unwrap()
    }

    async fn send(&self, data: &str) -> Result<(), Error> {
        let message = EncodedMessage::encode(data.as_bytes(), [("own", "1")], "").wire().clone();
        self.connector.publish(&topic(), vec![message]).await.map(drop)
    }

    async fn revisions(&self, id: &str) -> Vec<String> {
        let page = self.connector.list_revisions(&name(id), &PageRequest::default(), Detail::Basic).await.unwrap();
        page.items.into_iter().map(|view| view.revision_id).collect()
    }
}

#[tokio::test]
async fn a_schema_is_created_once_and_read_with_or_without_its_revision() {
    let rig = Rig::new().await;
    let created = rig.create("sch", avro(A)).await;
    assert_eq!(created.name, name("sch"));
    assert!(created.definition.is_some());
    let full = rig.connector.get_schema("projects/p1/schemas/sch", Detail::Full).await.unwrap();
    assert_eq!(full, created);
    let by_revision = format!("projects/p1/schemas/sch@{}", created.revision_id);
    assert_eq!(rig.connector.get_schema(&by_revision, Detail::Full).await.unwrap(), created);
    let basic = rig.connector.get_schema(&by_revision, Detail::Basic).await.unwrap();
    assert_eq!(basic, SchemaView { definition: None, ..created });
    let again = rig.connector.create_schema("projects/p1", "sch", avro(A)).await;
    assert_eq!(again, Err(Error::Exists("sch".into())));
    for missing in ["projects/p1/schemas/other", "projects/p2/schemas/sch", "projects/p1/schemas/sch@00000000"] {
        assert!(matches!(rig.connector.get_schema(missing, Detail::Full).await, Err(Error::NotFound(_))), "{missing}");
    }
}

#[test]
fn a_revision_is_eight_lower_case_hexadecimal_digits() {
    let (schema, revision) = parse_revision_name("projects/p1/schemas/sch@0a1b2c3d").unwrap();
    assert_eq!((schema, revision.as_deref()), (name("sch"), Some("0a1b2c3d")));
    assert_eq!(parse_revision_name("projects/p1/schemas/sch").unwrap(), (name("sch"), None));
    for bad in ["sch@", "sch@0A1B2C3D", "sch@0a1b2c3", "sch@0a1b2c3d4", "sch@0a1b2c3g", "s@0a1b2c3d", "sch@x@0a1b2c3d"] {
        let text = format!("projects/p1/schemas/{bad}");
        let error = parse_revision_name(&text).unwrap_err().to_string();
        assert!(error.contains(&format!("(name={text})")), "{error}");
    }
}

#[tokio::test]
async fn a_definition_needs_a_type_and_one_source() {
    let rig = Rig::new().await;
    let compiled = Some(CompiledDraft { root_message: "M".into(), files: vec![1] });
    for (draft, expected) in [
        (DefinitionDraft { kind: None, ..avro(A) }, "the type must be"),
        (DefinitionDraft { compiled: compiled.clone(), ..avro(A) }, "compiled_proto_schema needs"),
        (DefinitionDraft { compiled, ..proto("") }, "must not both"),
        (DefinitionDraft { text: String::new(), ..avro(A) }, "is empty"),
        (DefinitionDraft { text: "{\"not_actually\":\"avro\"}".into(), ..avro(A) }, "The schema definition is invalid"),
    ] {
        for outcome in [
            rig.connector.validate_schema("projects/p1", draft.clone()).await,
            rig.connector.create_schema("projects/p1", "sch", draft).await.map(drop),
        ] {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
    }
    assert_eq!(rig.connector.validate_schema("projects/p1", proto("int32 a = 1;")).await, Ok(()));
    assert!(rig.connector.validate_schema("p1", proto("")).await.is_err());
    let bad_id = rig.connector.create_schema("projects/p1", "x", avro(A)).await.unwrap_err().to_string();
    assert!(bad_id.contains("(name=projects/p1/schemas/x)"), "{bad_id}");
}

#[tokio::test]
async fn revisions_are_listed_newest_first_and_copied_by_a_rollback() {
    let rig = Rig::new().await;
    let first = rig.create("sch", avro(A)).await;
    let second = rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap();
    let third = rig.connector.rollback_schema(&name("sch"), &first.revision_id).await.unwrap();
    assert_eq!(third.definition, first.definition);
    assert_eq!(rig.revisions("sch").await, [&third, &second, &first].map(|view| view.revision_id.clone()));
    let newest = rig.connector.get_schema("projects/p1/schemas/sch", Detail::Full).await.unwrap();
    assert_eq!(newest, third);
    let missing = rig.connector.rollback_schema(&name("sch"), "00000000").await;
    assert_eq!(missing, Err(Error::NotFound("sch@00000000".into())));

    let mut page = PageRequest { size: 2, token: String::new() };
    let start = rig.connector.list_revisions(&name("sch"), &page, Detail::Full).await.unwrap();
    assert_eq!(start.items, [third.clone(), second.clone()]);
    // A page goes on behind the last revision it gave, even when that one is gone.
    rig.connector.delete_revision(&name("sch"), &second.revision_id).await.unwrap();
    page.token = start.next_token;
    let rest = rig.connector.list_revisions(&name("sch"), &page, Detail::Full).await.unwrap();
    assert_eq!((rest.items, rest.next_token.as_str()), (vec![first], ""));
}

#[tokio::test]
async fn a_revision_that_does_not_go_with_the_newest_one_is_refused() {
    let rig = Rig::new().await;
    rig.create("sch", avro(A)).await;
    let other_type = rig.connector.commit_schema(&name("sch"), avro(r#"{"name":"a","type":"string"}"#)).await;
    assert!(other_type.unwrap_err().to_string().contains("incompatible"));
    let other_language = rig.connector.commit_schema(&name("sch"), proto("int32 a = 1;")).await;
    assert!(other_language.unwrap_err().to_string().contains("type of a schema can't change"));
    assert_eq!(rig.revisions("sch").await.len(), 1);

    rig.create("pro", proto("int32 a = 1;")).await;
    assert!(rig.connector.commit_schema(&name("pro"), proto("int64 a = 1;")).await.is_err());
    assert!(rig.connector.commit_schema(&name("pro"), proto("int32 a = 1; string b = 2;")).await.is_ok());
}

#[tokio::test]
async fn a_schema_has_one_to_twenty_revisions() {
    let rig = Rig::new().await;
    let only = rig.create("sch", avro(A)).await;
    let refused = rig.connector.delete_revision(&name("sch"), &only.revision_id).await;
    assert_eq!(refused, Err(Error::LastRevision));
    for _ in 1..MAX_SCHEMA_REVISIONS {
        rig.connector.commit_schema(&name("sch"), avro(A)).await.unwrap();
    }
    assert_eq!(rig.connector.commit_schema(&name("sch"), avro(A)).await, Err(Error::TooManyRevisions));
    assert_eq!(rig.connector.rollback_schema(&name("sch"), &only.revision_id).await, Err(Error::TooManyRevisions));
    let newest = rig.revisions("sch").await[0].clone();
    let left = rig.connector.delete_revision(&name("sch"), &newest).await.unwrap();
    assert_eq!(left.revision_id, rig.revisions("sch").await[0]);
    assert_eq!(rig.revisions("sch").await.len(), MAX_SCHEMA_REVISIONS - 1);
    assert!(rig.connector.commit_schema(&name("sch"), avro(A)).await.is_ok());
}

#[tokio::test]
async fn schemas_are_listed_by_name_with_their_newest_revision() {
    let rig = Rig::new().await;
    for id in (0..20).map(|n| format!("sch{n:02}")) {
        rig.create(&id, avro(A)).await;
    }
    rig.connector.create_schema("projects/p2", "sch", avro(A)).await.unwrap();
    let newest = rig.connector.commit_schema(&name("sch03"), avro(A_AND_B)).await.unwrap();
    let all = rig.connector.list_schemas("projects/p1", &PageRequest::default(), Detail::Basic).await.unwrap();
    assert_eq!(all.items.len(), 20);
    assert_eq!(all.items[3], SchemaView { definition: None, ..newest.clone() });
    let page = PageRequest { size: 4, token: String::new() };
    let page = rig.connector.list_schemas("projects/p1", &page, Detail::Full).await.unwrap();
    assert_eq!(page.items[3], newest);
    let page = PageRequest { size: 100, token: page.next_token };
    let rest = rig.connector.list_schemas("projects/p1", &page, Detail::Full).await.unwrap();
    assert_eq!((rest.items.len(), rest.items[0].name.id(), rest.next_token.as_str()), (16, "sch04", ""));
}

#[tokio::test]
async fn a_topic_takes_settings_whose_schema_and_revisions_exist_in_this_order() {
    let rig = Rig::new().await;
    let first = rig.create("sch", avro(A)).await.revision_id;
    let second = rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap().revision_id;
    let full = name("sch").to_string();
    let unencoded = |mut draft: TopicDraft| {
        if let Some(settings) = &mut draft.schema_settings {
            settings.encoding = None;
        }
        draft
    };
    for (draft, expected) in [
        (draft("projects/p1/schemas/none", "", ""), "Resource not found (resource=none)."),
        (draft("", "", ""), "Invalid resource name given (name=)."),
        (unencoded(draft(&full, "", "")), "Invalid schema encoding provided"),
        (draft(&full, "00000000", ""), "Resource not found (resource=sch@00000000)."),
        (draft(&full, "", "00000000"), "Resource not found (resource=sch@00000000)."),
        (draft(&full, &second, &first), "first_revision_id is newer"),
    ] {
        let text = rig.connector.create_topic(draft).await.unwrap_err().to_string();
        assert!(text.starts_with(expected) || text.contains(expected), "{text}");
    }
    let created = rig.connector.create_topic(draft(&full, &first, &second)).await.unwrap();
    assert!(!created.schema_deleted);
    let settings = created.topic.schema_settings.clone().unwrap();
    assert_eq!((settings.first_revision_id, settings.last_revision_id), (first.clone(), second));
    assert_eq!(rig.connector.get_topic(&topic()).await.unwrap(), created);
    // One half alone can be changed.
    let mask = ["schema_settings.last_revision_id".to_owned()];
    let updated = rig.connector.update_topic(draft("ignored", "ignored", &first), &mask).await.unwrap();
    let settings = updated.topic.schema_settings.unwrap();
    assert_eq!((settings.schema, settings.last_revision_id), (name("sch"), first));
}

#[tokio::test]
async fn published_messages_follow_the_newest_revision_that_fits_and_say_which() {
    let rig = Rig::new().await;
    let first = rig.create("sch", avro(A)).await.revision_id;
    let second = rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap().revision_id;
    rig.connector.create_topic(draft(name("sch").as_str(), "", "")).await.unwrap();
    let entry = rig.connector.topic(&topic()).await.unwrap();
    let messages: Vec<_> =
        [r#"{"a":1}"#, r#"{"a":1,"b":2}"#].map(|data| EncodedMessage::encode(data.as_bytes(), [("own", "1")], "k")).into();
    let named = rig.connector.named_schema(&entry.topic).await.unwrap();
    let checked = rig.connector.follow_schema(&entry.topic, &named, messages).await.unwrap();
    for (message, revision) in checked.iter().zip([&first, &second]) {
        let attributes = message.attribute_map();
        assert_eq!(attributes["googclient_schemaencoding"], "JSON");
        assert_eq!(attributes["googclient_schemaname"], "projects/p1/schemas/sch");
        assert_eq!(&attributes["googclient_schemarevisionid"], revision);
        assert_eq!((attributes["own"].as_str(), message.ordering_key()), ("1", "k"));
    }
    assert_eq!(rig.send(r#"{"a":1}"#).await, Ok(()));

    let Err(Error::SchemaViolation(violation)) = rig.send(r#"{"a":"x"}"#).await else { panic!("not refused") };
    assert_eq!(violation.reason, "INVALID_JSON_AVRO_MESSAGE");
    let expected = format!(
        "Could not validate message with any schema revision for schema: projects/p1/schemas/sch, last checked revision: revision_id={first} failed with status: "
    );
    assert!(violation.revision_info.starts_with(&expected), "{}", violation.revision_info);
    // One bad message fails the request.
    let wires = [r#"{"a":1}"#, "x"].map(|data| EncodedMessage::encode(data.as_bytes(), [], "").wire().clone());
    assert!(matches!(rig.connector.publish(&topic(), wires.into()).await, Err(Error::SchemaViolation(_))));
    // So does one without data.
    let wire = EncodedMessage::encode(b"", [("a", "1")], "").wire().clone();
    assert!(matches!(rig.connector.publish(&topic(), vec![wire]).await, Err(Error::SchemaViolation(_))));
}

#[tokio::test]
async fn revisions_outside_the_range_do_not_count_even_after_its_ends_are_deleted() {
    let rig = Rig::new().await;
    let first = rig.create("sch", avro(A)).await.revision_id;
    let second = rig.connector.commit_schema(&name("sch"), avro(A)).await.unwrap().revision_id;
    rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap();
    rig.connector.create_topic(draft(name("sch").as_str(), &first, &second)).await.unwrap();
    assert_eq!(rig.send(r#"{"a":1}"#).await, Ok(()));
    assert!(matches!(rig.send(r#"{"a":1,"b":2}"#).await, Err(Error::SchemaViolation(_))));

    rig.connector.delete_revision(&name("sch"), &second).await.unwrap();
    assert_eq!(rig.send(r#"{"a":1}"#).await, Ok(()));
    assert!(matches!(rig.send(r#"{"a":1,"b":2}"#).await, Err(Error::SchemaViolation(_))));
    rig.connector.delete_revision(&name("sch"), &first).await.unwrap();
    let Err(Error::SchemaViolation(violation)) = rig.send(r#"{"a":1}"#).await else { panic!("not refused") };
    assert!(violation.revision_info.contains("allows no revision"), "{}", violation.revision_info);

    // Without ends, a revision counts from the moment it is committed.
    rig.connector.update_topic(draft(name("sch").as_str(), "", ""), &["schema_settings".to_owned()]).await.unwrap();
    assert_eq!(rig.send(r#"{"a":1,"b":2}"#).await, Ok(()));
}

#[tokio::test]
async fn large_messages_are_checked_too() {
    let rig = Rig::new().await;
    rig.create("sch", avro(r#"{"name":"a","type":"string"}"#)).await;
    rig.connector.create_topic(draft(name("sch").as_str(), "", "")).await.unwrap();
    let filling = "x".repeat(1_000_000);
    assert_eq!(rig.send(&format!(r#"{{"a":"{filling}"}}"#)).await, Ok(()));
    assert!(matches!(rig.send(&format!(r#"{{"b":"{filling}"}}"#)).await, Err(Error::SchemaViolation(_))));
}

#[tokio::test]
async fn a_deleted_schema_stops_its_topics_until_their_settings_change() {
    let rig = Rig::new().await;
    rig.create("sch", avro(A)).await;
    rig.connector.create_topic(draft(name("sch").as_str(), "", "")).await.unwrap();
    rig.connector.delete_schema(&name("sch")).await.unwrap();
    assert_eq!(rig.connector.delete_schema(&name("sch")).await, Err(Error::NotFound("sch".into())));
    assert!(rig.connector.get_topic(&topic()).await.unwrap().schema_deleted);
    let listed = rig.connector.list_topics("projects/p1", &PageRequest::default()).await.unwrap();
    assert!(listed.items.iter().find(|view| view.topic.name == topic()).unwrap().schema_deleted);
    assert_eq!(rig.send(r#"{"a":1}"#).await, Err(Error::SchemaDeleted));
    // Another schema of the same name is another schema.
    rig.create("sch", avro(A)).await;
    assert!(rig.connector.get_topic(&topic()).await.unwrap().schema_deleted);
    assert_eq!(rig.send(r#"{"a":1}"#).await, Err(Error::SchemaDeleted));

    let cleared = TopicDraft { name: topic().to_string(), ..TopicDraft::default() };
    let view = rig.connector.update_topic(cleared, &["schema_settings".to_owned()]).await.unwrap();
    assert_eq!((view.topic.schema_settings, view.schema_deleted), (None, false));
    assert_eq!(rig.send("anything").await, Ok(()));
}

#[tokio::test]
async fn another_node_follows_the_revisions_of_this_one() {
    let rig = Rig::new().await;
    let other = rig.node("n2", |_| {}).await;
    rig.create("sch", avro(A)).await;
    rig.connector.create_topic(draft(name("sch").as_str(), "", "")).await.unwrap();
    let wire = EncodedMessage::encode(br#"{"a":1,"b":2}"#, [], "").wire().clone();
    assert!(other.publish(&topic(), vec![wire.clone()]).await.is_err());
    rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap();
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    while let Err(error) = other.publish(&topic(), vec![wire.clone()]).await {
        assert!(tokio::time::Instant::now() < deadline, "{error}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_message_is_tried_against_a_stored_or_a_given_definition() {
    let rig = Rig::new().await;
    let first = rig.create("sch", avro(A)).await.revision_id;
    rig.connector.commit_schema(&name("sch"), avro(A_AND_B)).await.unwrap();
    let named = |text: &str| Some(SchemaSpec::Name(text.to_owned()));
    let full = name("sch").to_string();
    let old = format!("{full}@{first}");
    let json = Some(Encoding::Json);
    for (spec, data, encoding, expected) in [
        (named(&full), r#"{"a":1,"b":2}"#, json, None),
        (named(&full), r#"{"a":1}"#, json, Some("Message failed schema validation.")),
        (named(&old), r#"{"a":1}"#, json, None),
        (named("projects/p1/schemas/none"), "{}", json, Some("Resource not found")),
        (named(&full), "{}", None, Some("Invalid schema encoding provided")),
        (None, "{}", json, Some("a name or a schema must be given")),
        (Some(SchemaSpec::Definition(proto("int32 a = 1;"))), r#"{"a":1}"#, json, None),
        (Some(SchemaSpec::Definition(proto("int32 a = 1;"))), "\u{8}\u{1}", Some(Encoding::Binary), None),
        (Some(SchemaSpec::Definition(avro("x"))), "{}", json, Some("The schema definition is invalid")),
    ] {
        let outcome = rig.connector.validate_message("projects/p1", spec, Bytes::from(data), encoding).await;
        match (outcome, expected) {
            (Ok(()), None) => {}
            (Err(error), Some(text)) => assert!(error.to_string().contains(text), "{error}"),
            (outcome, expected) => panic!("{data}: {outcome:?} instead of {expected:?}"),
        }
    }
}
