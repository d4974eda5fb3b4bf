//! Names in paths of the console, and lists of resources in pages.

use std::collections::HashMap;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::de::DeserializeOwned;

use crate::{
    broker::Kind,
    connector::{Connector, Error, record},
};

/// What a segment of a path needs no escape for.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// Resources of one page.
pub const PAGE: usize = 50;
/// Records read at once.
const BATCH: usize = 500;
/// Records that one search looks at before it shows what it has: some tenths of a second on Redis.
const MAX_LOOKED_AT: usize = 20_000;

/// A text as one segment of a path, or as a value of a query.
pub fn segment(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// The segments of a path, or nothing where they are not UTF-8.
pub fn segments(path: &str) -> Option<Vec<String>> {
    let decoded = |part: &str| percent_decode_str(part).decode_utf8().ok().map(|text| text.into_owned());
    path.trim_start_matches('/').split('/').map(decoded).collect()
}

/// The path of a resource's page, such as `/topics/project/id`.
pub fn path(collection: &str, project: &str, id: &str) -> String {
    format!("/{collection}/{}/{}", segment(project), segment(id))
}

/// The same of a full name.
pub fn path_of(collection: &str, full: &str) -> String {
    let parts: Vec<_> = full.split('/').collect();
    match parts[..] {
        [_, project, _, id] => path(collection, project, id),
        _ => format!("/{collection}"),
    }
}

/// Which resources a list shows.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// Only of this project; empty for all.
    pub project: String,
    /// Only ids that begin like this.
    pub prefix: String,
    /// Only names behind this one.
    pub after: String,
}

impl Search {
    /// From the query of a list's address.
    pub fn new(query: &HashMap<String, String>) -> Self {
        let get = |key: &str| query.get(key).map(|text| text.trim().to_owned()).unwrap_or_default();
        Self { project: get("project"), prefix: get("prefix"), after: get("after") }
    }

    /// Whether it leaves anything out.
    pub fn is_narrow(&self) -> bool {
        !self.project.is_empty() || !self.prefix.is_empty()
    }

    /// The address of the page that begins behind a name.
    pub fn next(&self, collection: &str, after: &str) -> String {
        let (project, prefix) = (segment(&self.project), segment(&self.prefix));
        format!("/{collection}?project={project}&prefix={prefix}&after={}", segment(after))
    }
}

/// A page of a list.
pub struct Found<T> {
    pub items: Vec<T>,
    /// The name behind which the next page begins; none on the last.
    pub next: Option<String>,
}

/// Reads one page of the resources of a kind, in the order of their names.
///
/// # Errors
/// What the broker says, or a record that can't be read.
pub async fn find<T: DeserializeOwned>(
    connector: &Connector,
    kind: Kind,
    collection: &str,
    search: &Search,
) -> Result<Found<T>, Error> {
    let prefix = match search.project.as_str() {
        "" => "projects/".to_owned(),
        project => format!("projects/{project}/{collection}/{}", search.prefix),
    };
    let wanted = |name: &str| name.rsplit('/').next().is_some_and(|id| id.starts_with(&search.prefix));
    let batch = match kind {
        // They may have megabytes each.
        Kind::Schema => 8,
        _ if search.project.is_empty() => BATCH,
        _ => PAGE + 1,
    };
    let (mut items, mut after, mut looked_at) = (Vec::new(), search.after.clone(), 0);
    loop {
        let records = connector.broker().list(kind, &prefix, &after, batch).await?;
        for (at, found) in records.iter().enumerate() {
            if wanted(&found.name) {
                items.push(record::decode(found)?);
            }
            after.clone_from(&found.name);
            looked_at += 1;
            let is_last = records.len() < batch && at + 1 == records.len();
            if !is_last && (items.len() == PAGE || looked_at >= MAX_LOOKED_AT) {
                return Ok(Found { items, next: Some(after) });
            }
        }
        if records.len() < batch {
            return Ok(Found { items, next: None });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_its_path() {
        let path = path("topics", "example.com:shop", "a%b+c~d.e");
        assert_eq!(path, "/topics/example.com%3Ashop/a%25b%2Bc~d.e");
        assert_eq!(segments(&path).unwrap(), ["topics", "example.com:shop", "a%b+c~d.e"]);
        assert_eq!(segments("/a/%ff"), None);
    }
}
