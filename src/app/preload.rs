//! Brings the resources to the state that the settings ask for, before anything is answered.
//!
//! The planner of `landline apply` does it, by REST within the process, so that every check of the API applies.

use std::{convert::Infallible, sync::Arc};

use http::{Request, Response};
use serde_json::{Map, json};
use tonic::body::Body;
use tower::Service;

use super::{Error, dispatch, start};
use crate::{
    api::grpc::Gate,
    auth::Guard,
    broker::BrokerError,
    connector::Connector,
    resources::{Action, Caller, Document, Failure, Kind, Plan},
    settings::{PreloadExisting, Settings},
};

/// Creates what is missing; what exists is left as it is or changed, as the settings say.
///
/// # Errors
/// [`Error::Preload`] names the file, or the resource and what the API says against it; [`Error::Broker`] when the broker
/// went away.
pub async fn create(settings: &Settings, connector: &Arc<Connector>) -> Result<(), Error> {
    let document = document(settings)?;
    if document.resources.is_empty() {
        return Ok(());
    }
    // Whoever writes the settings may do everything.
    let gate = Gate::new(Guard::off(connector.clone()).map_err(Error::Auth)?);
    let rest = dispatch::within(start::services(connector, &gate)).map_err(|e| Error::Descriptors(e.to_string()))?;
    bring(&document, &Caller::within(rest), settings.preload_existing).await
}

/// The file, and the short list.
fn document(settings: &Settings) -> Result<Document, Error> {
    let mut document = Document::default();
    if !settings.preload_file.as_os_str().is_empty() {
        let wrong =
            |lines: Vec<String>| Error::Preload(format!("what {} asks for", settings.preload_file.display()), lines.join("\n"));
        document = Document::read(&settings.preload_file).map_err(wrong)?;
    }
    for (topic, subscriptions) in &settings.preload.topics {
        document.push(Kind::Topic, topic.as_str(), "PRELOAD", Map::new());
        for subscription in subscriptions {
            let fields = Map::from_iter([("topic".to_owned(), json!(topic.as_str()))]);
            document.push(Kind::Subscription, subscription.as_str(), "PRELOAD", fields);
        }
    }
    Ok(document)
}

async fn bring<S>(document: &Document, caller: &Caller<S>, existing: PreloadExisting) -> Result<(), Error>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let mut plan = Plan::make(document, caller, &[]).await.map_err(|(at, failure)| failed(at, failure))?;
    if existing == PreloadExisting::Keep {
        plan.steps.retain(|step| step.action != Action::Update);
    }
    for step in &plan.steps {
        let changes: Vec<_> = step.changes.iter().map(ToString::to_string).collect();
        if step.action == Action::Impossible {
            tracing::warn!(name = step.name, asked_for_by = step.place, "left as it is: {}", changes.join("; "));
        }
    }
    if let Err(failures) = plan.carry_out(caller).await
        && let Some((step, failure)) = failures.into_iter().next()
    {
        return Err(failed(format!("{} ({})", step.name, step.place), failure));
    }
    for step in plan.steps.iter().filter(|step| step.action != Action::Impossible) {
        let done = if step.action == Action::Create { "created" } else { "updated" };
        tracing::info!(name = step.name, kind = step.kind.list(), "{done}");
    }
    Ok(())
}

fn failed(at: String, failure: Failure) -> Error {
    match failure.status.as_str() {
        "UNAVAILABLE" => BrokerError::Unavailable(failure.message).into(),
        _ => Error::Preload(at, failure.message),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

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
