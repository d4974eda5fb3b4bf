//! Schemas and topics that have one.

use landline::api::proto::pubsub::{
    CommitSchemaRequest, CreateSchemaRequest, DeleteSchemaRequest, DeleteSchemaRevisionRequest, Encoding, GetSchemaRequest,
    ListSchemaRevisionsRequest, ListSchemasRequest, RollbackSchemaRequest, Schema, SchemaSettings, SchemaView, Topic,
    UpdateTopicRequest, ValidateMessageRequest, ValidateSchemaRequest, schema::Type, validate_message_request::SchemaSpec,
};
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture, api::publish_request, mask, message},
    for_every_backend, for_one_backend,
};

for_one_backend!(
    avro_unions_need_their_branch_name,
    avro_json_values_follow_the_specification,
    bad_definitions_are_refused,
    protobuf_definitions_have_one_message_and_no_imports,
    views_show_or_hide_the_definition,
);
for_every_backend!(
    revisions_come_go_and_bound_a_topic,
    a_deleted_schema_stops_its_topics,
    a_topic_with_a_schema_refuses_other_messages,
);

fn avro(fields: &str) -> Schema {
    let definition = format!(r#"{{"type":"record","name":"Order","fields":[{fields}]}}"#);
    Schema { r#type: Type::Avro as i32, definition, ..Default::default() }
}

fn proto(definition: &str) -> Schema {
    Schema { r#type: Type::ProtocolBuffer as i32, definition: definition.into(), ..Default::default() }
}

async fn create(api: &Api, id: &str, schema: Schema) -> Schema {
    api.ok(CreateSchemaRequest { parent: api.parent(), schema: Some(schema), schema_id: id.into() }).await
}

/// Whether a message follows a schema.
async fn valid(api: &Api, schema: &Schema, encoding: Encoding, message: &[u8]) -> bool {
    let request = ValidateMessageRequest {
        parent: api.parent(),
        message: message.to_vec().into(),
        encoding: encoding as i32,
        schema_spec: Some(SchemaSpec::Schema(schema.clone())),
    };
    match api.call(request).await {
        Ok(_) => true,
        Err(failure) => {
            assert_eq!(failure.code, Code::InvalidArgument, "{failure:?}");
            false
        }
    }
}

async fn check(api: &Api, schema: &Schema, cases: &[(&str, bool)]) {
    for (text, expected) in cases {
        let got = valid(api, schema, Encoding::Json, text.as_bytes()).await;
        assert_eq!(got, *expected, "{text} with {}", schema.definition);
    }
}

/// C130
async fn avro_unions_need_their_branch_name(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let schema = avro(r#"{"name":"f","type":["null","string"]}"#);
        let cases =
            [(r#"{"f":"x"}"#, false), (r#"{"f":{"string":"x"}}"#, true), (r#"{"f":null}"#, true), (r#"{"f":{"int":1}}"#, false)];
        check(&api, &schema, &cases).await;
        let record = r#"{"type":"record","name":"R","namespace":"com.x","fields":[{"name":"a","type":"int"}]}"#;
        let schema = avro(&format!(r#"{{"name":"f","type":["null",{record}]}}"#));
        let cases = [(r#"{"f":{"com.x.R":{"a":1}}}"#, true), (r#"{"f":{"a":1}}"#, false), (r#"{"f":null}"#, true)];
        check(&api, &schema, &cases).await;
    }
}

/// C131
async fn avro_json_values_follow_the_specification(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let cases: [(&str, &[(&str, bool)]); 8] = [
        (r#"{"name":"f","type":"bytes"}"#, &[(r#"{"f":"\u00ff"}"#, true), (r#"{"f":"\u0100"}"#, false), (r#"{"f":1}"#, false)]),
        (
            r#"{"name":"f","type":{"type":"fixed","name":"F","size":2}}"#,
            &[(r#"{"f":"ab"}"#, true), (r#"{"f":"a"}"#, false), (r#"{"f":"abc"}"#, false)],
        ),
        (
            r#"{"name":"f","type":{"type":"enum","name":"E","symbols":["A","B"]}}"#,
            &[(r#"{"f":"A"}"#, true), (r#"{"f":"C"}"#, false)],
        ),
        (r#"{"name":"f","type":"string","default":"x"}"#, &[(r#"{"f":"y"}"#, true), ("{}", false)]),
        (
            r#"{"name":"f","type":{"type":"long","logicalType":"timestamp-millis"}}"#,
            &[(r#"{"f":1700000000000}"#, true), (r#"{"f":"2024-01-01"}"#, false)],
        ),
        (
            r#"{"name":"f","type":{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}}"#,
            &[(r#"{"f":"\u0001\u0002"}"#, true), (r#"{"f":1.5}"#, false)],
        ),
        (
            r#"{"name":"f","type":"int"}"#,
            &[(r#"{"f":1}"#, true), (r#"{"f":1,"g":2}"#, false), (r#"{"f":3000000000}"#, false), (r#"{"f":"1"}"#, false)],
        ),
        (
            r#"{"name":"f","type":{"type":"array","items":"boolean"}}"#,
            &[(r#"{"f":[true,false]}"#, true), (r#"{"f":[1]}"#, false)],
        ),
    ];
    for (fields, cases) in cases {
        check(&api, &avro(fields), cases).await;
    }
    // Binary: one datum and nothing after it.
    let schema = avro(r#"{"name":"f","type":"string"}"#);
    for (bytes, expected) in [(&[2, b'x'][..], true), (&[2, b'x', 0], false), (&[4, b'x'], false), (&[], false)] {
        assert_eq!(valid(&api, &schema, Encoding::Binary, bytes).await, expected, "{bytes:?}");
    }
}

/// C133
async fn bad_definitions_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let of =
            |kind: Type, definition: &str| Schema { r#type: kind as i32, definition: definition.into(), ..Default::default() };
        let bad = [
            of(Type::Avro, r#"{"not_actually":"avro"}"#),
            of(Type::Avro, "plain text"),
            of(Type::Avro, ""),
            of(Type::Avro, "\"string\""),
            of(Type::Unspecified, &avro(r#"{"name":"f","type":"string"}"#).definition),
            of(Type::ProtocolBuffer, "nonsense"),
            of(Type::ProtocolBuffer, ""),
        ];
        for schema in bad {
            let request = ValidateSchemaRequest { parent: api.parent(), schema: Some(schema.clone()) };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "validate {schema:?}");
            let request = CreateSchemaRequest { parent: api.parent(), schema: Some(schema.clone()), schema_id: "bad".into() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument, "create {schema:?}");
        }
        let good = ValidateSchemaRequest { parent: api.parent(), schema: Some(avro(r#"{"name":"f","type":"string"}"#)) };
        api.ok(good).await;
        let listed = api.ok(ListSchemasRequest { parent: api.parent(), ..Default::default() }).await.schemas;
        assert!(listed.is_empty());
    }
}

/// C134
async fn protobuf_definitions_have_one_message_and_no_imports(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let outcome = async |schema: Schema| {
        let request = ValidateSchemaRequest { parent: api.parent(), schema: Some(schema) };
        api.call(request).await.map(|_| ()).map_err(|f| f.code)
    };
    let import = "syntax = \"proto3\"; import \"google/protobuf/timestamp.proto\"; message M { string f = 1; }";
    assert_eq!(outcome(proto(import)).await, Err(Code::InvalidArgument));
    let two = "syntax = \"proto3\"; message M { string f = 1; } message N { string f = 1; }";
    assert_eq!(outcome(proto(two)).await, Err(Code::InvalidArgument));
    assert_eq!(outcome(proto("syntax = \"proto3\"; message M { string f = ; }")).await, Err(Code::InvalidArgument));
    let nested = proto(
        "syntax = \"proto3\"; message M { message N { int32 a = 1; } enum E { Z = 0; O = 1; } N n = 1; E e = 2; string f = 3; }",
    );
    assert_eq!(outcome(nested.clone()).await, Ok(()));
    check(
        &api,
        &nested,
        &[(r#"{"n":{"a":1},"e":"O","f":"x"}"#, true), ("{}", true), (r#"{"f":1}"#, false), (r#"{"g":"x"}"#, false)],
    )
    .await;
    let required = proto("syntax = \"proto2\"; message M { required string f = 1; optional int32 g = 2; }");
    assert_eq!(outcome(required.clone()).await, Ok(()));
    check(&api, &required, &[(r#"{"f":"x"}"#, true), (r#"{"g":1}"#, false)]).await;
    for (bytes, expected) in [(&[0x0a, 1, b'x'][..], true), (&[0x10, 1], false), (&[0x0a, 5, b'x'], false)] {
        assert_eq!(valid(&api, &required, Encoding::Binary, bytes).await, expected, "{bytes:?}");
    }
}

fn with_schema(api: &Api, schema: &str, encoding: Encoding) -> Topic {
    let settings = SchemaSettings { schema: schema.into(), encoding: encoding as i32, ..Default::default() };
    Topic { name: api.topic("shaped"), schema_settings: Some(settings), ..Default::default() }
}

/// C044 with a schema, and what a good message gets.
async fn a_topic_with_a_schema_refuses_other_messages(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        assert_eq!(api.fails(with_schema(&api, &api.schema("none"), Encoding::Json)).await, Code::NotFound);
        let schema = create(&api, "shape", avro(r#"{"name":"f","type":"string"}"#)).await;
        assert_eq!(api.fails(with_schema(&api, &schema.name, Encoding::Unspecified)).await, Code::InvalidArgument);
        let topic = api.ok(with_schema(&api, &schema.name, Encoding::Json)).await;
        let subscription = api.create_subscription("billing", &topic.name).await;
        let good = || message(r#"{"f":"x"}"#);
        let failure = api.failure(publish_request(&topic.name, [good(), message(r#"{"g":"x"}"#)])).await;
        assert_eq!(failure.code, Code::InvalidArgument);
        let info = failure.info.expect("an ErrorInfo");
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("INVALID_JSON_AVRO_MESSAGE", "pubsub.googleapis.com"));
        api.publish(&topic.name, [good()]).await;
        let received = api.take(&subscription).await;
        let attribute = |name: &str| received.message.attributes.get(name).map(String::as_str);
        assert_eq!(attribute("googclient_schemaencoding"), Some("JSON"));
        assert_eq!(attribute("googclient_schemaname"), Some(schema.name.as_str()));
        assert_eq!(attribute("googclient_schemarevisionid"), Some(schema.revision_id.as_str()));
        assert!(api.pull_now(&subscription, 10).await.is_empty());
    }
}

/// C136
async fn revisions_come_go_and_bound_a_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let one = avro(r#"{"name":"f","type":"string"}"#);
        let two = avro(r#"{"name":"f","type":"string"},{"name":"g","type":"int","default":0}"#);
        let first = create(&api, "shape", one.clone()).await;
        assert!(first.revision_id.len() == 8 && first.revision_id.bytes().all(|b| b.is_ascii_hexdigit()), "{first:?}");
        assert_eq!(first.definition, one.definition);
        let name = first.name.clone();
        let commit = |schema: Schema| CommitSchemaRequest { name: name.clone(), schema: Some(schema) };
        let second = api.ok(commit(Schema { name: name.clone(), ..two.clone() })).await;
        assert_ne!(second.revision_id, first.revision_id);
        let other_type = Schema { name: name.clone(), ..proto("syntax = \"proto3\"; message M { string f = 1; }") };
        assert_eq!(api.fails(commit(other_type)).await, Code::InvalidArgument);
        let incompatible = Schema { name: name.clone(), ..avro(r#"{"name":"f","type":"int"}"#) };
        assert_eq!(api.fails(commit(incompatible)).await, Code::InvalidArgument);
        let third = api.ok(RollbackSchemaRequest { name: name.clone(), revision_id: first.revision_id.clone() }).await;
        assert!(third.revision_id != first.revision_id && third.definition == one.definition, "{third:?}");

        let list = ListSchemaRevisionsRequest { name: name.clone(), view: SchemaView::Full as i32, ..Default::default() };
        let listed = api.ok(list).await.schemas;
        let ids: Vec<_> = listed.iter().map(|s| s.revision_id.as_str()).collect();
        assert_eq!(ids, [&third, &second, &first].map(|s| s.revision_id.as_str()), "newest first");
        let get = |revision: &str| GetSchemaRequest { name: format!("{name}@{revision}"), view: 0 };
        assert_eq!(api.ok(get(&second.revision_id)).await.definition, two.definition);
        assert_eq!(api.fails(get("00000000")).await, Code::NotFound);

        // The topic takes the first revision up to the second, not the third.
        let mut topic = with_schema(&api, &name, Encoding::Json);
        let settings = topic.schema_settings.as_mut().unwrap();
        settings.first_revision_id = first.revision_id.clone();
        settings.last_revision_id = second.revision_id.clone();
        let topic = api.ok(topic).await.name;
        api.publish(&topic, [message(r#"{"f":"x"}"#), message(r#"{"f":"x","g":1}"#)]).await;
        api.ok(DeleteSchemaRevisionRequest { name: format!("{name}@{}", third.revision_id), ..Default::default() }).await;
        assert_eq!(api.fails(get(&third.revision_id)).await, Code::NotFound);
        api.ok(DeleteSchemaRevisionRequest { name: format!("{name}@{}", first.revision_id), ..Default::default() }).await;
        let last = DeleteSchemaRevisionRequest { name: format!("{name}@{}", second.revision_id), ..Default::default() };
        let refused = api.fails(last).await;
        assert!([Code::FailedPrecondition, Code::InvalidArgument].contains(&refused), "{refused:?}");
    }
}

/// C137
async fn views_show_or_hide_the_definition(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let schema = create(&api, "shape", avro(r#"{"name":"f","type":"string"}"#)).await;
        for (view, shown) in [(SchemaView::Unspecified, false), (SchemaView::Basic, false), (SchemaView::Full, true)] {
            let request = ListSchemasRequest { parent: api.parent(), view: view as i32, ..Default::default() };
            let listed = api.ok(request).await.schemas;
            assert_eq!(listed.len(), 1);
            assert_eq!((listed[0].definition == schema.definition, listed[0].definition.is_empty()), (shown, !shown), "{view:?}");
            assert_eq!((&listed[0].name, listed[0].r#type), (&schema.name, schema.r#type));
        }
        for (view, shown) in [(SchemaView::Unspecified, true), (SchemaView::Basic, false), (SchemaView::Full, true)] {
            let got = api.ok(GetSchemaRequest { name: schema.name.clone(), view: view as i32 }).await;
            assert_eq!(!got.definition.is_empty(), shown, "{view:?}");
        }
    }
}

/// C139
async fn a_deleted_schema_stops_its_topics(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let schema = create(&api, "shape", avro(r#"{"name":"f","type":"string"}"#)).await.name;
        let topic = api.ok(with_schema(&api, &schema, Encoding::Json)).await.name;
        api.ok(DeleteSchemaRequest { name: schema.clone() }).await;
        assert_eq!(api.fails(GetSchemaRequest { name: schema.clone(), view: 0 }).await, Code::NotFound);
        let settings = api.get_topic(&topic).await.unwrap().schema_settings.unwrap();
        assert_eq!(settings.schema, "_deleted-schema_");
        let refused = api.fails(publish_request(&topic, [message(r#"{"f":"x"}"#)])).await;
        assert!([Code::FailedPrecondition, Code::InvalidArgument, Code::NotFound].contains(&refused), "{refused:?}");
        let cleared = Topic { name: topic.clone(), ..Default::default() };
        api.ok(UpdateTopicRequest { topic: Some(cleared), update_mask: Some(mask(&["schema_settings"])) }).await;
        api.publish(&topic, [message("anything")]).await;
        // A new schema of the old name does not come back into the topic.
        create(&api, "shape", avro(r#"{"name":"f","type":"string"}"#)).await;
        assert_eq!(api.get_topic(&topic).await.unwrap().schema_settings, None);
    }
}
