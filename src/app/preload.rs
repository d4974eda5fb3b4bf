//! Creates the resources that the settings ask for, before anything is answered.
//!
//! They are created as a client would, by REST within the process: a file holds them in the API's own JSON shape, and every
//! check applies. What exists is left as it is, so a restart changes nothing.

use std::{collections::BTreeMap, convert::Infallible, path::Path, sync::Arc};

use config::{File, FileFormat, Source};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::{Value, json};
use tonic::body::Body;
use tower::Service;

use super::{
    Error,
    dispatch::{self, Answer},
    start,
};
use crate::{api::grpc::Gate, auth::Guard, broker::BrokerError, connector::Connector, settings::Settings};

/// What a preload file holds.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Document {
    topics: Vec<Resource>,
    subscriptions: Vec<Resource>,
}

/// A resource in the shape of the REST API.
#[derive(Debug, Deserialize)]
struct Resource {
    /// The full name.
    name: String,
    #[serde(flatten)]
    fields: BTreeMap<String, Value>,
}

/// Creates everything, topics before subscriptions.
///
/// # Errors
/// [`Error::Preload`] names the file, or the resource and what the API says against it; [`Error::Broker`] when the broker
/// went away.
pub async fn create(settings: &Settings, connector: &Arc<Connector>) -> Result<(), Error> {
    let document = if settings.preload_file.as_os_str().is_empty() { Document::default() } else { read(&settings.preload_file)? };
    let mut resources = Vec::new();
    for (topic, _) in &settings.preload.topics {
        resources.push((topic.as_str().to_owned(), json!({})));
    }
    resources.extend(document.topics.into_iter().map(Resource::body));
    for (topic, subscriptions) in &settings.preload.topics {
        resources.extend(subscriptions.iter().map(|s| (s.as_str().to_owned(), json!({"topic": topic.as_str()}))));
    }
    resources.extend(document.subscriptions.into_iter().map(Resource::body));

    if resources.is_empty() {
        return Ok(());
    }
    // Whoever writes the settings may do everything.
    let gate = Gate::new(Guard::off(connector.clone()).map_err(Error::Auth)?);
    let mut rest = dispatch::within(start::services(connector, &gate)).map_err(|e| Error::Descriptors(e.to_string()))?;
    for (name, body) in resources {
        put(&mut rest, name, &body).await?;
    }
    Ok(())
}

impl Resource {
    fn body(self) -> (String, Value) {
        (self.name, self.fields.into_iter().collect())
    }
}

fn read(path: &Path) -> Result<Document, Error> {
    let wrong = |why: String| Error::Preload(format!("what {} asks for", path.display()), why);
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    // JSON is YAML as well.
    let table = File::from_str(&text, FileFormat::Yaml).collect().map_err(|e| wrong(e.to_string()))?;
    config::Value::from(table).try_deserialize().map_err(|e| wrong(e.to_string()))
}

async fn put(
    rest: &mut impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future = Answer>,
    name: String,
    body: &Value,
) -> Result<(), Error> {
    // Of the characters that names may have, only this one means something in a path.
    let uri = format!("/v1/{}", name.replace('%', "%25"));
    let request = Request::put(uri).body(Body::new(body.to_string())).map_err(|e| Error::Preload(name.clone(), e.to_string()))?;
    let Ok(answer) = rest.call(request).await;
    let status = answer.status();
    if status.is_success() {
        tracing::info!(name, "created");
        return Ok(());
    }
    let text = answer.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let error: Value = serde_json::from_slice(&text).unwrap_or_default();
    let message = error["error"]["message"].as_str().unwrap_or(status.as_str()).to_owned();
    match status {
        StatusCode::CONFLICT if error["error"]["status"] == "ALREADY_EXISTS" => Ok(()),
        StatusCode::SERVICE_UNAVAILABLE => Err(BrokerError::Unavailable(message).into()),
        _ => Err(Error::Preload(name, message)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        app::start,
        model::{SubscriptionName, TopicName},
        settings,
    };

    /// Opens the broker in a folder with a preload file.
    async fn open(folder: &Path, file: &str, list: &str) -> Result<start::Core, Error> {
        fs::write(folder.join("preload.yaml"), file).unwrap();
        let set = [
            format!("BROKER_URL=embedded:{}", folder.join("data").display()),
            format!("PRELOAD_FILE={}", folder.join("preload.yaml").display()),
            format!("PRELOAD={list}"),
        ];
        start::open(&settings::load(None, [], &set).unwrap().settings, 0).await
    }

    const FILE: &str = r#"
topics:
  - name: projects/p1/topics/dead
  - {"name": "projects/p1/topics/a%b~c", "labels": {"team_name": "x", "tier": "1"}}
subscriptions:
  - name: projects/p1/subscriptions/push
    topic: projects/p1/topics/a%b~c
    ackDeadlineSeconds: 30
    enableMessageOrdering: true
    pushConfig: { pushEndpoint: "http://127.0.0.1:9000/p?x=1" }
    deadLetterPolicy: { deadLetterTopic: projects/p1/topics/dead, maxDeliveryAttempts: 7 }
  - name: projects/p1/subscriptions/once
    topic: projects/p1/topics/a%b~c
    enableExactlyOnceDelivery: true
"#;

    #[tokio::test]
    async fn resources_of_list_and_file_exist_once_the_core_is_open_also_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let core = open(folder.path(), FILE, "p2,short:sub1:sub2,lone").await.unwrap();
            let find = async |name: &str| core.connector.subscription(&SubscriptionName::parse(name).unwrap()).await.unwrap();
            let push = find("projects/p1/subscriptions/push").await;
            assert_eq!((push.subscription.ack_deadline_seconds, push.subscription.enable_message_ordering), (30, true));
            assert_eq!(push.subscription.dead_letter_policy.as_ref().unwrap().max_delivery_attempts, 7);
            assert!(find("projects/p1/subscriptions/once").await.subscription.enable_exactly_once_delivery);
            assert_eq!(find("projects/p2/subscriptions/sub2").await.subscription.topic.as_str(), "projects/p2/topics/short");
            let topic = core.connector.topic(&TopicName::parse("projects/p1/topics/a%b~c").unwrap()).await.unwrap();
            assert_eq!(topic.topic.labels.get("team_name").map(String::as_str), Some("x"), "keys are no field names");
            core.connector.topic(&TopicName::parse("projects/p2/topics/lone").unwrap()).await.unwrap();
            core.broker.close().await;
        }
    }

    #[tokio::test]
    async fn a_mistake_in_the_file_stops_the_start_and_is_named() {
        let folder = tempfile::tempdir().unwrap();
        for (file, named) in [
            ("topics:\n  - name: projects/p1/topics/x", "projects/p1/topics/x"),
            ("topics:\n  - name: projects/p1/topics/abc\n    colour: red", "colour"),
            ("subscriptions:\n  - name: projects/p1/subscriptions/abc\n    topic: projects/p1/topics/none", "none"),
            ("topics:\n  - labels: {}", "name"),
            ("tropics: []", "tropics"),
            ("topics: [", "preload.yaml"),
        ] {
            let error = open(folder.path(), file, "").await.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(named), "{file}: {error}");
        }
    }
}
