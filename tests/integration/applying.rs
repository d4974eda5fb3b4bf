//! `landline apply` and the file at the start: one file, one planner.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use landline::api::proto::pubsub::{DeleteTopicRequest, GetSchemaRequest, SchemaView};
use serde_json::{Value, json};

use crate::{
    fixture::{Api, Backend, Fixture, node::binary},
    for_every_backend, for_one_backend,
};

for_every_backend!(a_file_is_applied_once_and_changes_are_shown_field_by_field);
for_one_backend!(
    what_the_file_does_not_have_is_deleted_only_on_demand,
    mistakes_in_the_file_are_named_with_their_place,
    a_wish_that_cannot_be_fulfilled_changes_nothing,
    the_file_at_the_start_updates_what_exists_only_where_that_is_asked_for,
);

const FILE: &str = r#"
schemas:
  - name: projects/P/schemas/order
    type: AVRO
    revisions:
      - definition: '{"type":"record","name":"Order","fields":[{"name":"id","type":"string"}]}'
      - definition: '{"type":"record","name":"Order","fields":[{"name":"id","type":"string"},{"name":"n","type":"int","default":0}]}'
topics:
  - name: projects/P/topics/orders
    labels: { team: shop }
    schemaSettings: { schema: projects/P/schemas/order, encoding: JSON }
  - name: projects/P/topics/a%b~c+d
    messageRetentionDuration: 3600s
subscriptions:
  - name: projects/P/subscriptions/billing
    topic: projects/P/topics/orders
    ack_deadline_seconds: 30
    retainAckedMessages: false
    enableMessageOrdering: true
    expirationPolicy: {}
    retryPolicy: { minimumBackoff: 5s }
    deadLetterPolicy: { deadLetterTopic: projects/P/topics/a%b~c+d, maxDeliveryAttempts: 7 }
  - name: projects/P/subscriptions/push
    topic: projects/P/topics/orders
    pushConfig: { pushEndpoint: "http://127.0.0.1:9/x?y=z" }
policies:
  - resource: projects/P/topics/orders
    bindings:
      - role: roles/pubsub.publisher
        members: ["serviceAccount:b@shop.example", "user:a@shop.example"]
"#;

/// Runs `landline apply` on a text in which `P` is the client's project.
fn apply(server: &Fixture, api: &Api, text: &str, arguments: &[&str]) -> (Option<i32>, String, String) {
    let path = server.folder.path().join("resources.yaml");
    fs::write(&path, text.replace("projects/P/", &format!("projects/{}/", api.project))).unwrap();
    let output = run(&path, &server.nodes[0].address.to_string(), arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace(&api.project, "P");
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn run(path: &Path, endpoint: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(["apply", "-f", path.to_str().unwrap(), "--endpoint", endpoint]).args(arguments);
    command.output().unwrap()
}

async fn a_file_is_applied_once_and_changes_are_shown_field_by_field(backend: Backend) {
    let server = Fixture::start(backend).await;
    let api = server.api().await;
    let (code, shown, _) = apply(&server, &api, FILE, &["--dry-run"]);
    assert_eq!(code, Some(2), "{shown}");
    assert!(shown.contains("+ subscription projects/P/subscriptions/billing\n"), "{shown}");
    assert!(
        shown.ends_with("6 to create, 0 to update, 0 that can't be changed, 0 to delete; 0 already as in the file\n"),
        "{shown}"
    );
    assert!(api.get_topic(&api.topic("orders")).await.is_err(), "a dry run creates nothing");

    let (code, shown, told) = apply(&server, &api, FILE, &[]);
    assert_eq!((code, told.as_str()), (Some(0), ""), "{shown}");
    let nothing = "0 to create, 0 to update, 0 that can't be changed, 0 to delete; 6 already as in the file\n";
    for arguments in [&["--dry-run"][..], &[]] {
        assert_eq!(apply(&server, &api, FILE, arguments), (Some(0), nothing.into(), String::new()));
    }
    let request = GetSchemaRequest { name: api.schema("order"), view: SchemaView::Full as i32 };
    assert!(api.ok(request).await.definition.contains("\"n\""), "the last revision is the newest");

    let changed = FILE
        .replace("team: shop", "tier: '1'")
        .replace("seconds: 30", "seconds: 45")
        .replace("minimumBackoff: 5s", "minimumBackoff: 6s")
        .replace(", \"user:a@shop.example\"", "");
    let expected = "\
~ topic projects/P/topics/orders
    labels.tier: (none) -> \"1\"
    labels.team: \"shop\" -> (none)
~ subscription projects/P/subscriptions/billing
    ackDeadlineSeconds: 30 -> 45
    retryPolicy.minimumBackoff: \"5s\" -> \"6s\"
~ policy of projects/P/topics/orders
    roles/pubsub.publisher: [\"serviceAccount:b@shop.example\",\"user:a@shop.example\"] -> [\"serviceAccount:b@shop.example\"]
0 to create, 3 to update, 0 that can't be changed, 0 to delete; 3 already as in the file
";
    assert_eq!(apply(&server, &api, &changed, &[]), (Some(0), expected.into(), String::new()));
    let (code, shown, _) = apply(&server, &api, &changed, &["--dry-run"]);
    assert_eq!((code, shown.as_str()), (Some(0), nothing));
    let billing = api.get_subscription(&api.subscription("billing")).await.unwrap();
    assert_eq!(billing.dead_letter_policy.unwrap().max_delivery_attempts, 7, "what is not named in a change stays");
}

async fn what_the_file_does_not_have_is_deleted_only_on_demand(backend: Backend) {
    let server = Fixture::start(backend).await;
    let api = server.api().await;
    let other = server.api().await;
    let kept = other.create_topic("kept").await;
    let topic = api.create_topic("old").await;
    api.create_subscription("old", &topic).await;
    let (code, shown, _) = apply(&server, &api, FILE, &[]);
    assert!(code == Some(0) && !shown.contains("\n- "), "{shown}");
    let (code, shown, _) = apply(&server, &api, FILE, &["--prune", &api.project, "--dry-run"]);
    assert_eq!(code, Some(2));
    assert!(shown.starts_with("- subscription projects/P/subscriptions/old\n- topic projects/P/topics/old\n"), "{shown}");
    api.get_topic(&topic).await.unwrap();
    let (code, ..) = apply(&server, &api, FILE, &["--prune", &api.project]);
    assert_eq!(code, Some(0));
    assert!(api.get_topic(&topic).await.is_err() && api.get_subscription(&api.subscription("old")).await.is_err());
    api.get_subscription(&api.subscription("billing")).await.unwrap();
    api.get_topic(&kept).await.unwrap();
}

async fn mistakes_in_the_file_are_named_with_their_place(backend: Backend) {
    let server = Fixture::start(backend).await;
    let api = server.api().await;
    for (text, told) in [
        ("topics:\n  - name: projects/P/topics/abc\n    colour: red", "3:5: projects/P/topics/abc: Unknown name \"colour\""),
        ("tropics: []", "1:1: tropics is none of schemas, topics, subscriptions and policies"),
        ("topics:\n  - labels: {}", "2:5: an item of topics has no name: {\"labels\":{}}"),
        ("topics:\n  - name: orders", "2:11: name: \"orders\" is no name like projects/PROJECT/topics/ID"),
        ("topics: [", "resources.yaml:"),
        (
            "subscriptions:\n  - name: projects/P/subscriptions/abc\n    topic: projects/P/topics/abc\n    ackDeadlineSeconds: soon",
            "4:25: projects/P/subscriptions/abc: Invalid value at 'ack_deadline_seconds' (TYPE_INT32), \"soon\"",
        ),
        ("topics:\n  - name: projects/P/topics/abc\n    labels:", "3:5: projects/P/topics/abc: labels has no value"),
        (
            "topics:\n  - name: projects/P/topics/abc\n  - name: projects/P/topics/abc",
            "3:11: projects/P/topics/abc is here for the second time, after line 2",
        ),
        // What only the server can say.
        ("topics:\n  - name: projects/P/topics/x", "resources.yaml:2:11: projects/P/topics/x: INVALID_ARGUMENT"),
        (
            "subscriptions:\n  - name: projects/P/subscriptions/abc\n    topic: projects/P/topics/none",
            "resources.yaml:2:11: subscription projects/P/subscriptions/abc: NOT_FOUND",
        ),
    ] {
        let (code, _, error) = apply(&server, &api, text, &[]);
        assert!(code == Some(1) && error.contains(told), "{text}:\n{error}");
    }
    let nowhere = run(&server.folder.path().join("resources.yaml"), "127.0.0.1:1", &["--dry-run"]);
    assert_eq!(nowhere.status.code(), Some(1));
}

async fn a_wish_that_cannot_be_fulfilled_changes_nothing(backend: Backend) {
    let server = Fixture::start(backend).await;
    let api = server.api().await;
    assert_eq!(apply(&server, &api, FILE, &[]).0, Some(0));
    let text = FILE.replace("enableMessageOrdering: true", "filter: attributes:x").replace("team: shop", "team: other");
    let (code, shown, told) = apply(&server, &api, &text, &[]);
    assert_eq!(code, Some(1));
    let filter = "    filter: (none) -> \"attributes:x\" (can't be changed: delete it and make it anew, or keep the old value)\n";
    assert!(shown.contains(&format!("! subscription projects/P/subscriptions/billing\n{filter}")), "{shown}");
    assert!(told.contains("nothing was changed"), "{told}");
    assert_eq!(api.get_topic(&api.topic("orders")).await.unwrap().labels["team"], "shop");
}

async fn the_file_at_the_start_updates_what_exists_only_where_that_is_asked_for(backend: Backend) {
    for (mode, seconds) in [("keep", 30), ("update", 45)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resources.yaml");
        let settings = [("PRELOAD_FILE", path.to_str().unwrap()), ("PRELOAD_EXISTING", mode)];
        fs::write(&path, FILE.replace("/P/", "/shop/")).unwrap();
        let mut server = Fixture::start_with(backend, &settings).await;
        let text = FILE.replace("/P/", "/shop/").replace("seconds: 30", "seconds: 45");
        fs::write(&path, text).unwrap();
        let api = Api::connect(&[server.nodes[0].address], "shop".into(), crate::fixture::Transport::Grpc).await;
        api.ok(DeleteTopicRequest { topic: api.topic("a%b~c+d") }).await;
        server.nodes[0].restart();
        let api = Api::connect(&[server.nodes[0].address], "shop".into(), crate::fixture::Transport::Grpc).await;
        let billing = api.get_subscription(&api.subscription("billing")).await.unwrap();
        assert_eq!(billing.ack_deadline_seconds, seconds, "{mode}");
        api.get_topic(&api.topic("a%b~c+d")).await.unwrap();
        let url = format!("http://{}/v1/{}:getIamPolicy", server.nodes[0].address, api.topic("orders"));
        let policy: Value = serde_json::from_str(&reqwest::get(url).await.unwrap().text().await.unwrap()).unwrap();
        assert_eq!(policy["bindings"][0]["role"], json!("roles/pubsub.publisher"));
    }
}
