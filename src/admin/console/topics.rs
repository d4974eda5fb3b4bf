//! Topics: the list, and one with its settings and subscriptions.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use askama::Template;
use http::StatusCode;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format,
    names::{self, Found, Search},
    subscriptions::{self, Row as SubscriptionRow},
};
use crate::{
    broker::Kind,
    connector::{Connector, PageRequest, meters::TopicMeter},
    model::{Topic, TopicName},
};

struct Row {
    path: String,
    project: String,
    id: String,
    published: String,
    bytes: String,
    refused: String,
}

impl Row {
    fn new(connector: &Connector, name: &TopicName) -> Self {
        let meter = meter(connector, name);
        let of = |read: fn(&TopicMeter) -> String| meter.as_deref().map(read).unwrap_or_default();
        Self {
            path: names::path_of("topics", name.as_str()),
            project: name.project().to_owned(),
            id: name.id().to_owned(),
            published: of(|meter| meter.messages.load(Relaxed).to_string()),
            bytes: of(|meter| format::size(meter.bytes.load(Relaxed))),
            refused: of(|meter| (meter.invalid_requests.load(Relaxed) + meter.failed_requests.load(Relaxed)).to_string()),
        }
    }
}

/// The counters of a topic; none when it has none of its own.
fn meter(connector: &Connector, name: &TopicName) -> Option<Arc<TopicMeter>> {
    connector.meters().topics.own(&format!("{}/{}", name.project(), name.id()).into())
}

#[derive(Template)]
#[template(path = "topics.html")]
struct List {
    frame: Frame,
    search: Search,
    rows: Vec<Row>,
    next: Option<String>,
}

/// The list.
pub async fn list(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let search = Search::new(&visit.ask.query);
    let found: Found<Topic> = names::find(visit.connector, Kind::Topic, "topics", &search).await?;
    let rows = found.items.iter().map(|topic| Row::new(visit.connector, &topic.name)).collect();
    let next = found.next.map(|after| search.next("topics", &after));
    Ok(render(StatusCode::OK, &List { frame: visit.frame("topics", "Topics"), search, rows, next }))
}

#[derive(Template)]
#[template(path = "topic.html")]
struct Page {
    frame: Frame,
    name: String,
    path: String,
    row: Row,
    settings: Vec<(&'static str, String)>,
    labels: Vec<(String, String)>,
    transforms: Vec<(String, String)>,
    schema: Option<(String, String)>,
    subscriptions: Vec<SubscriptionRow>,
    next: Option<String>,
}

/// One topic.
pub async fn page(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let connector = visit.connector;
    let name = TopicName::new(project, id)?;
    let view = connector.get_topic(&name).await?;
    let token = visit.ask.query.get("page").cloned().unwrap_or_default();
    let attached = connector.list_topic_subscriptions(&name, &PageRequest { size: names::PAGE as i32, token }).await?;
    let topic = &view.topic;
    let row = Row::new(connector, &name);
    let path = row.path.clone();
    let schema = topic.schema_settings.as_ref().map(|settings| {
        let text = if view.schema_deleted { "deleted".to_owned() } else { settings.schema.to_string() };
        (text, names::path_of("schemas", settings.schema.as_str()))
    });
    let page = Page {
        frame: visit.frame("topics", name.id()),
        name: name.to_string(),
        next: (!attached.next_token.is_empty()).then(|| format!("{path}?page={}", names::segment(&attached.next_token))),
        path,
        row,
        settings: settings(topic),
        labels: topic.labels.clone().into_iter().collect(),
        transforms: topic.message_transforms.iter().map(|t| (t.function_name.clone(), t.code.clone())).collect(),
        schema,
        subscriptions: subscriptions::rows_of(connector, &attached.items).await?,
    };
    Ok(render(StatusCode::OK, &page))
}

fn settings(topic: &Topic) -> Vec<(&'static str, String)> {
    let retention = topic.message_retention_ms.map(|ms| format::duration(ms as f64 / 1000.0));
    let mut settings = vec![("Message retention", retention.unwrap_or_else(|| "as the subscriptions need".into()))];
    if !topic.kms_key_name.is_empty() {
        settings.push(("KMS key", topic.kms_key_name.clone()));
    }
    if let Some(schema) = &topic.schema_settings {
        settings.push(("Encoding", format!("{:?}", schema.encoding)));
    }
    settings
}
