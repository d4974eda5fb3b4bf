//! Schemas: the list, and one with its revisions and a definition.

use askama::Template;
use http::StatusCode;

use super::{
    Visit,
    exchange::{Answer, Failure, Frame, render},
    format,
    names::{self, Found, Search},
};
use crate::{
    broker::Kind,
    connector::record,
    model::{Definition, Schema, SchemaName, SchemaType},
};

/// Characters of a definition that are shown.
const MAX_DEFINITION: usize = 256 * 1024;

struct Row {
    path: String,
    project: String,
    id: String,
    language: &'static str,
    revisions: usize,
    newest: String,
}

fn language(definition: &Definition) -> &'static str {
    match definition.kind() {
        SchemaType::Avro => "Avro",
        SchemaType::ProtocolBuffer => "Protocol Buffers",
    }
}

#[derive(Template)]
#[template(path = "schemas.html")]
struct List {
    frame: Frame,
    search: Search,
    rows: Vec<Row>,
    next: Option<String>,
}

/// The list.
pub async fn list(visit: &Visit<'_>) -> Result<Answer, Failure> {
    let search = Search::new(&visit.ask.query);
    let found: Found<Schema> = names::find(visit.connector, Kind::Schema, "schemas", &search).await?;
    let row = |schema: &Schema| Row {
        path: names::path_of("schemas", schema.name.as_str()),
        project: schema.name.project().to_owned(),
        id: schema.name.id().to_owned(),
        language: schema.revisions.last().map_or("", |revision| language(&revision.definition)),
        revisions: schema.revisions.len(),
        newest: schema.revisions.last().map(|revision| format::time(revision.create_time_ms)).unwrap_or_default(),
    };
    let rows = found.items.iter().map(row).collect();
    let next = found.next.map(|after| search.next("schemas", &after));
    Ok(render(StatusCode::OK, &List { frame: visit.frame("schemas", "Schemas"), search, rows, next }))
}

struct Revision {
    id: String,
    path: String,
    created: String,
    size: String,
    is_shown: bool,
}

#[derive(Template)]
#[template(path = "schema.html")]
struct Page {
    frame: Frame,
    name: String,
    language: &'static str,
    revisions: Vec<Revision>,
    definition: String,
    is_cut: bool,
}

/// One schema: the newest revision, or the one that the query names.
pub async fn page(visit: &Visit<'_>, project: &str, id: &str) -> Result<Answer, Failure> {
    let name = SchemaName::new(project, id)?;
    let found = visit.connector.broker().get(Kind::Schema, name.as_str()).await.map_err(crate::connector::Error::from)?;
    let schema: Schema = record::decode(&found.ok_or_else(Failure::nothing)?)?;
    let wanted = visit.ask.query.get("revision");
    let shown = schema.revisions.iter().rev().find(|revision| wanted.is_none_or(|id| *id == revision.id));
    let shown = shown.ok_or_else(Failure::nothing)?;
    let path = names::path_of("schemas", name.as_str());
    let revisions = schema.revisions.iter().rev().map(|revision| Revision {
        id: revision.id.clone(),
        path: format!("{path}?revision={}", revision.id),
        created: format::time(revision.create_time_ms),
        size: format::size(revision.definition.len() as u64),
        is_shown: revision.id == shown.id,
    });
    let text = match &shown.definition {
        Definition::Avro(text) | Definition::Proto(text) => text.clone(),
        Definition::CompiledProto { root_message, files } => {
            format!("compiled, {} bytes, message {root_message}", files.len())
        }
    };
    let definition: String = text.chars().take(MAX_DEFINITION).collect();
    let page = Page {
        frame: visit.frame("schemas", name.id()),
        name: name.to_string(),
        language: language(&shown.definition),
        revisions: revisions.collect(),
        is_cut: definition.len() < text.len(),
        definition,
    };
    Ok(render(StatusCode::OK, &page))
}
