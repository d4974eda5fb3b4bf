//! Trying definitions and messages without storing anything.

use std::sync::Arc;

use bytes::Bytes;

use super::{aside, compile, definition, entry::reason, parse_revision_name, position};
use crate::{
    connector::{Connector, Error, SchemaViolation, draft::DefinitionDraft, listing::check_project},
    model::{Definition, Encoding},
};

/// What a message is to be tried against.
#[derive(Debug, Clone)]
pub enum SchemaSpec {
    /// A stored schema by its full name, perhaps with a revision.
    Name(String),
    Definition(DefinitionDraft),
}

impl Connector {
    /// Checks a definition.
    ///
    /// # Errors
    /// A bad project, or what is wrong with the definition.
    pub async fn validate_schema(&self, project: &str, draft: DefinitionDraft) -> Result<(), Error> {
        check_project(project)?;
        compile(&Arc::new(definition(draft)?)).await.map(drop)
    }

    /// Checks a message.
    ///
    /// # Errors
    /// [`Error::SchemaViolation`] when the message does not follow the schema, [`Error::SchemaEncoding`] without an encoding.
    pub async fn validate_message(
        &self,
        project: &str,
        spec: Option<SchemaSpec>,
        message: Bytes,
        encoding: Option<Encoding>,
    ) -> Result<(), Error> {
        check_project(project)?;
        let encoding = encoding.ok_or(Error::SchemaEncoding)?;
        let definition = match spec {
            None => return Err(Error::argument("schema", "a name or a schema must be given")),
            Some(SchemaSpec::Definition(draft)) => definition(draft)?,
            Some(SchemaSpec::Name(name)) => self.definition_of(&name).await?,
        };
        let definition = Arc::new(definition);
        let compiled = compile(&definition).await?;
        let kind = definition.kind();
        aside(move || {
            compiled.validate(&message, encoding).map_err(|why| {
                let revision_info = format!("Could not validate message: {why}");
                Error::SchemaViolation(Box::new(SchemaViolation { reason: reason(kind, encoding), revision_info }))
            })
        })
        .await
    }

    /// The definition behind a name: of its revision, or of the newest.
    async fn definition_of(&self, name: &str) -> Result<Definition, Error> {
        let (name, revision) = parse_revision_name(name)?;
        let (mut schema, _) = self.read_schema(&name).await?;
        let at = match revision {
            None => schema.revisions.len().saturating_sub(1),
            Some(revision) => position(&schema, &revision)?,
        };
        Ok(schema.revisions.swap_remove(at).definition)
    }
}
