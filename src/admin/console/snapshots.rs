//! Snapshots: the list.

use askama::Template;
use http::StatusCode;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format,
    names::{self, Found, Search},
};
use crate::{broker::Kind, model::Snapshot};

struct Row {
    path: String,
    project: String,
    id: String,
    topic: String,
    topic_path: String,
    expires: String,
}

#[derive(Template)]
#[template(path = "snapshots.html")]
struct List {
    frame: Frame,
    search: Search,
    rows: Vec<Row>,
    next: Option<String>,
}

/// The list.
pub async fn list(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let search = Search::new(&visit.ask.query);
    let found: Found<Snapshot> = names::find(visit.connector, Kind::Snapshot, "snapshots", &search).await?;
    let now_ms = visit.connector.broker().now_ms();
    let row = |snapshot: &Snapshot| Row {
        path: names::path_of("snapshots", snapshot.name.as_str()),
        project: snapshot.name.project().to_owned(),
        id: snapshot.name.id().to_owned(),
        topic: snapshot.topic.to_string(),
        topic_path: names::path_of("topics", snapshot.topic.as_str()),
        expires: format::time(snapshot.expire_time_ms),
    };
    // One whose time has come is gone, even where it was not cleared away yet.
    let rows = found.items.iter().filter(|snapshot| snapshot.expire_time_ms > now_ms).map(row).collect();
    let next = found.next.map(|after| search.next("snapshots", &after));
    Ok(render(StatusCode::OK, &List { frame: visit.frame("snapshots", "Snapshots"), search, rows, next }))
}
