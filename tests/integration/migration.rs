//! Moving topics and subscriptions from one place to another: gcloud prints what the API lists, and `landline import` makes
//! of it what a server takes.

use std::{fs, process::Command};

use landline::api::proto::pubsub::{DeadLetterPolicy, ExpirationPolicy, PushConfig, RetryPolicy};
use serde_json::{Value, json};

use crate::{
    fixture::{Backend, Fixture, node::binary, seconds},
    for_one_backend,
};

for_one_backend!(lists_of_one_server_become_resources_of_another, a_list_that_is_none_is_refused);

async fn get(server: &Fixture, path: &str) -> Value {
    let answer = reqwest::get(format!("http://{}/v1/{path}", server.nodes[0].address)).await.unwrap();
    assert!(answer.status().is_success(), "{path}: {answer:?}");
    serde_json::from_str(&answer.text().await.unwrap()).unwrap()
}

async fn put(server: &Fixture, resource: &Value) {
    let url = format!("http://{}/v1/{}", server.nodes[0].address, resource["name"].as_str().unwrap().replace('%', "%25"));
    let answer = reqwest::Client::new().put(url).body(resource.to_string()).send().await.unwrap();
    assert!(answer.status().is_success(), "{resource}: {}", answer.text().await.unwrap());
}

async fn lists_of_one_server_become_resources_of_another(backend: Backend) {
    let (old, new) = (Fixture::start(backend).await, Fixture::start(backend).await);
    let api = old.api().await;
    let dead = api.create_topic("dead").await;
    let topic = api.create_topic("orders").await;
    let odd = api.create_topic("a%b~c+d").await;
    let subscriptions = [
        api.create_subscription("plain", &odd).await,
        api.create_subscription_with("full", &topic, |s| {
            s.ack_deadline_seconds = 30;
            s.retain_acked_messages = true;
            s.enable_message_ordering = true;
            s.enable_exactly_once_delivery = true;
            s.filter = "attributes:x AND NOT attributes.y = \"z\"".into();
            s.labels.insert("team".into(), "shop".into());
            s.expiration_policy = Some(ExpirationPolicy { ttl: None });
            s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(seconds(20)), maximum_backoff: Some(seconds(60)) });
            s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 7 });
        })
        .await,
        api.create_subscription_with("push", &topic, |s| {
            s.push_config = Some(PushConfig { push_endpoint: "http://127.0.0.1:9/x?y=z".into(), ..PushConfig::default() });
        })
        .await,
    ];
    // The lists as gcloud prints them: the items alone.
    let folder = tempfile::tempdir().unwrap();
    for collection in ["topics", "subscriptions"] {
        let list = get(&old, &format!("projects/{}/{collection}", api.project)).await;
        fs::write(folder.path().join(format!("{collection}.json")), list[collection].to_string()).unwrap();
    }
    let made = Command::new(binary())
        .args(["import", "--topics", "topics.json", "--subscriptions", "subscriptions.json"])
        .args(["--project", &format!("{}=moved-project", api.project)])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let told = String::from_utf8(made.stderr).unwrap();
    assert!(made.status.success(), "{told}");
    assert_eq!(told, "left out: messages, snapshots, schemas and access policies: they are not in these lists\n");
    let document: Value = serde_json::from_slice(&made.stdout).unwrap();
    for resource in document["topics"].as_array().unwrap().iter().chain(document["subscriptions"].as_array().unwrap()) {
        put(&new, resource).await;
    }
    for name in subscriptions.iter().chain([&topic, &odd, &dead]) {
        let path = name.replace('%', "%25");
        let before = get(&old, &path).await.to_string().replace(&api.project, "moved-project");
        let after = get(&new, &path.replace(&api.project, "moved-project")).await;
        assert_eq!(after, serde_json::from_str::<Value>(&before).unwrap(), "{name}");
    }
}

async fn a_list_that_is_none_is_refused(_: Backend) {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("topics.json"), json!({"topics": []}).to_string()).unwrap();
    let refused = Command::new(binary()).args(["import", "--topics", "topics.json"]).current_dir(folder.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let told = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(told, "landline: import: topics.json: must be a list, as gcloud prints it with --format=json\n");
}
