//! Schemas and their revisions. All revisions of a schema are one record, so that every change is one step.

use std::sync::Arc;

use super::{
    Connector, Error,
    draft::DefinitionDraft,
    listing::{Listing, Page, PageRequest, Window, check_project},
    record,
    topics::{CHANGE_TRIES, new_incarnation},
};
use crate::{
    broker::{BrokerError, Change, Effect, Expect, Kind},
    model::{
        Definition, NameError, Schema, SchemaName, SchemaRevision, SchemaType,
        limits::{MAX_SCHEMA_BYTES, MAX_SCHEMA_REVISIONS},
        text::clipped,
    },
    rules::schema::CompiledSchema,
};

mod check;
mod entry;
mod topic;

#[cfg(test)]
mod tests;

pub use check::SchemaSpec;
pub(super) use entry::SchemaEntry;
pub(super) use topic::{Named, version};

/// A revision of a schema as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub struct SchemaView {
    pub name: SchemaName,
    pub kind: SchemaType,
    /// Left out of views that are not full.
    pub definition: Option<Definition>,
    pub revision_id: String,
    /// Milliseconds since the epoch.
    pub create_time_ms: u64,
}

/// How much of a schema to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Without its definition.
    Basic,
    Full,
}

/// Parses the name of a schema with or without a revision, `projects/p/schemas/s@0a1b2c3d`.
///
/// # Errors
/// [`Error::Name`] holding the whole text.
pub fn parse_revision_name(text: &str) -> Result<(SchemaName, Option<String>), Error> {
    let Some((name, revision)) = text.rsplit_once('@') else { return Ok((SchemaName::parse(text)?, None)) };
    let whole = || NameError::new(text);
    let legal = revision.len() == 8 && revision.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let name = SchemaName::parse(name).map_err(|_| whole())?;
    if legal { Ok((name, Some(revision.to_owned()))) } else { Err(whole().into()) }
}

fn revision_not_found(name: &SchemaName, revision_id: &str) -> Error {
    Error::NotFound(format!("{}@{}", name.id(), clipped(revision_id)))
}

fn position(schema: &Schema, revision_id: &str) -> Result<usize, Error> {
    let found = schema.revisions.iter().position(|revision| revision.id == revision_id);
    found.ok_or_else(|| revision_not_found(&schema.name, revision_id))
}

fn view(schema: &Schema, position: usize, detail: Detail) -> Result<SchemaView, Error> {
    let damaged = || Error::Internal(format!("the schema {} has no revision", schema.name));
    let revision = schema.revisions.get(position).ok_or_else(damaged)?;
    Ok(SchemaView {
        name: schema.name.clone(),
        kind: revision.definition.kind(),
        definition: (detail == Detail::Full).then(|| revision.definition.clone()),
        revision_id: revision.id.clone(),
        create_time_ms: revision.create_time_ms,
    })
}

fn latest(schema: &Schema, detail: Detail) -> Result<SchemaView, Error> {
    view(schema, schema.revisions.len().wrapping_sub(1), detail)
}

/// Puts a definition together from what a caller sent; the definition itself is not looked at.
fn definition(draft: DefinitionDraft) -> Result<Definition, Error> {
    let invalid = |what: &str| Err(Error::argument("schema", what));
    match (draft.kind, draft.compiled) {
        (None, _) => invalid("the type must be AVRO or PROTOCOL_BUFFER"),
        (Some(SchemaType::Avro), None) => Ok(Definition::Avro(draft.text)),
        (Some(SchemaType::Avro), Some(_)) => invalid("compiled_proto_schema needs the type PROTOCOL_BUFFER"),
        (Some(SchemaType::ProtocolBuffer), None) => Ok(Definition::Proto(draft.text)),
        (Some(SchemaType::ProtocolBuffer), Some(compiled)) if draft.text.is_empty() => {
            Ok(Definition::CompiledProto { root_message: compiled.root_message, files: compiled.files })
        }
        _ => invalid("definition and compiled_proto_schema must not both be set"),
    }
}

/// Does work that takes milliseconds off the threads that serve requests.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(Error::Internal(format!("a schema check was interrupted: {e}"))))
}

async fn compile(definition: &Arc<Definition>) -> Result<CompiledSchema, Error> {
    let definition = definition.clone();
    aside(move || CompiledSchema::compile(&definition).map_err(|e| Error::Schema(e.to_string()))).await
}

async fn check_follows(definition: &Definition, compiled: Arc<CompiledSchema>, newest: Definition) -> Result<(), Error> {
    if newest.kind() != definition.kind() {
        return Err(Error::argument("schema", "the type of a schema can't change"));
    }
    let check = move || compiled.follows(&CompiledSchema::compile(&newest)?);
    aside(move || check().map_err(|e| Error::Schema(e.to_string()))).await
}

/// Appends a revision.
fn append(schema: &mut Schema, definition: Definition, now_ms: u64) -> Result<(), Error> {
    if schema.revisions.len() >= MAX_SCHEMA_REVISIONS {
        return Err(Error::TooManyRevisions);
    }
    let id = loop {
        let id = format!("{:08x}", rand::random::<u32>());
        if !schema.revisions.iter().any(|revision| revision.id == id) {
            break id;
        }
    };
    let sequence = schema.revisions.last().map_or(1, |last| last.sequence + 1);
    schema.revisions.push(SchemaRevision { id, sequence, create_time_ms: now_ms, definition });
    Ok(())
}

impl Connector {
    /// Creates a schema with its first revision.
    ///
    /// # Errors
    /// [`Error::Exists`], or a definition that is not legal.
    pub async fn create_schema(&self, project: &str, id: &str, draft: DefinitionDraft) -> Result<SchemaView, Error> {
        check_project(project)?;
        let name = SchemaName::parse(&format!("{project}/schemas/{id}"))?;
        let definition = Arc::new(definition(draft)?);
        compile(&definition).await?;
        let mut schema = Schema { name: name.clone(), incarnation: new_incarnation(), revisions: Vec::new() };
        append(&mut schema, Arc::unwrap_or_clone(definition), self.broker().now_ms())?;
        match self.write_schema(&schema, Expect::Absent).await {
            Ok(_) => latest(&schema, Detail::Full),
            Err(BrokerError::Conflict(_)) => Err(Error::exists(&name)),
            Err(error) => Err(error.into()),
        }
    }

    async fn write_schema(&self, schema: &Schema, expect: Expect) -> Result<u64, BrokerError> {
        let body = record::encode(schema).map_err(|e| BrokerError::Damaged(e.to_string()))?;
        let name = schema.name.to_string();
        self.catalog.change(Change { kind: Kind::Schema, name, expect, body: Some(body), effect: Effect::None }).await
    }

    pub(super) async fn read_schema(&self, name: &SchemaName) -> Result<(Schema, u64), Error> {
        self.catalog.read(Kind::Schema, name.as_str()).await?.ok_or_else(|| Error::not_found(name))
    }

    /// Reads a schema: the revision that the name carries, or the newest.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn get_schema(&self, name: &str, detail: Detail) -> Result<SchemaView, Error> {
        let (name, revision) = parse_revision_name(name)?;
        let (schema, _) = self.read_schema(&name).await?;
        match revision {
            None => latest(&schema, detail),
            Some(revision) => view(&schema, position(&schema, &revision)?, detail),
        }
    }

    /// Lists the schemas of a project, `projects/{id}`, by name, each with its newest revision.
    ///
    /// # Errors
    /// A bad project, page size or page token.
    pub async fn list_schemas(&self, project: &str, page: &PageRequest, detail: Detail) -> Result<Page<SchemaView>, Error> {
        check_project(project)?;
        let listing = Listing { list: "schemas", parent: project };
        let read = |found: &_| latest(&record::decode::<Schema>(found)?, detail).map(Some);
        self.list(&listing, page, Kind::Schema, &format!("{project}/schemas/"), read).await
    }

    /// Lists the revisions of a schema, the newest first.
    ///
    /// # Errors
    /// [`Error::NotFound`], a bad page size or page token.
    pub async fn list_revisions(&self, name: &SchemaName, page: &PageRequest, detail: Detail) -> Result<Page<SchemaView>, Error> {
        let listing = Listing { list: "schema revisions", parent: name.as_str() };
        let Window { size, after } = listing.open(self.secret(), page)?;
        let (schema, _) = self.read_schema(name).await?;
        let before = after.parse().unwrap_or(u64::MAX);
        // Full definitions in one answer: what clients take by default is 4 MiB.
        let size = if detail == Detail::Full { size.min(4 * 1024 * 1024 / MAX_SCHEMA_BYTES) } else { size };
        let rest: Vec<_> = (0..schema.revisions.len()).rev().filter(|at| schema.revisions[*at].sequence < before).collect();
        let items = rest.iter().take(size).map(|at| view(&schema, *at, detail)).collect::<Result<Vec<_>, _>>()?;
        let last =
            rest.get(size.wrapping_sub(1)).filter(|_| rest.len() > size).map(|at| schema.revisions[*at].sequence.to_string());
        let next_token = last.map(|last| listing.token(self.secret(), &last)).unwrap_or_default();
        Ok(Page { items, next_token })
    }

    /// Adds a revision that must go together with the newest one.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::TooManyRevisions`], a definition that is not legal or not compatible.
    pub async fn commit_schema(&self, name: &SchemaName, draft: DefinitionDraft) -> Result<SchemaView, Error> {
        let definition = Arc::new(definition(draft)?);
        let compiled = Arc::new(compile(&definition).await?);
        for _ in 0..CHANGE_TRIES {
            let (mut schema, version) = self.read_schema(name).await?;
            if let Some(newest) = schema.revisions.last().map(|revision| revision.definition.clone()) {
                check_follows(&definition, compiled.clone(), newest).await?;
            }
            append(&mut schema, definition.as_ref().clone(), self.broker().now_ms())?;
            if let Some(view) = self.replace_schema(schema, version).await? {
                return Ok(view);
            }
        }
        Err(Error::Contended)
    }

    /// Makes an older revision the newest by adding a copy of it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::TooManyRevisions`].
    pub async fn rollback_schema(&self, name: &SchemaName, revision_id: &str) -> Result<SchemaView, Error> {
        self.change_schema(name, |schema| {
            let definition = schema.revisions[position(schema, revision_id)?].definition.clone();
            append(schema, definition, self.broker().now_ms())
        })
        .await
    }

    /// Deletes one revision and answers the schema's newest one after that.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::LastRevision`].
    pub async fn delete_revision(&self, name: &SchemaName, revision_id: &str) -> Result<SchemaView, Error> {
        self.change_schema(name, |schema| {
            let at = position(schema, revision_id)?;
            if schema.revisions.len() == 1 {
                return Err(Error::LastRevision);
            }
            schema.revisions.remove(at);
            Ok(())
        })
        .await
    }

    /// Changes a schema as `change` says and answers its newest revision.
    async fn change_schema(
        &self,
        name: &SchemaName,
        change: impl Fn(&mut Schema) -> Result<(), Error> + Send,
    ) -> Result<SchemaView, Error> {
        for _ in 0..CHANGE_TRIES {
            let (mut schema, version) = self.read_schema(name).await?;
            change(&mut schema)?;
            if let Some(view) = self.replace_schema(schema, version).await? {
                return Ok(view);
            }
        }
        Err(Error::Contended)
    }

    /// Writes a schema and answers its newest revision; none when another change came first.
    async fn replace_schema(&self, schema: Schema, version: u64) -> Result<Option<SchemaView>, Error> {
        match self.write_schema(&schema, Expect::Version(version)).await {
            Ok(_) => {
                self.renew_topics_of(&schema.name).await?;
                latest(&schema, Detail::Full).map(Some)
            }
            Err(BrokerError::Conflict(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes a schema with all of its revisions. Topics that use it refuse messages until their settings change.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn delete_schema(&self, name: &SchemaName) -> Result<(), Error> {
        for _ in 0..CHANGE_TRIES {
            let (_, version) = self.read_schema(name).await?;
            if self.delete_record(Kind::Schema, name.as_str(), version, Effect::None).await? {
                return self.renew_topics_of(name).await;
            }
        }
        Err(Error::Contended)
    }
}
