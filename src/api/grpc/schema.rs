//! `google.pubsub.v1.SchemaService`.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::gate::Gate;
use crate::{
    api::{
        convert,
        proto::pubsub::{self as pb, schema_service_server},
        status::to_status,
    },
    connector::{
        Connector, Error, Page,
        schemas::{Detail, SchemaSpec, SchemaView, parse_revision_name},
    },
};

/// The service.
pub struct SchemaService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl SchemaService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }
}

type Answer<T> = Result<Response<T>, Status>;

fn one(schema: Result<SchemaView, Error>) -> Answer<pb::Schema> {
    schema.map(|view| Response::new(convert::schema(view))).map_err(to_status)
}

fn several(page: Page<SchemaView>) -> (Vec<pb::Schema>, String) {
    (page.items.into_iter().map(convert::schema).collect(), page.next_token)
}

#[async_trait]
impl schema_service_server::SchemaService for SchemaService {
    async fn create_schema(&self, request: Request<pb::CreateSchemaRequest>) -> Answer<pb::Schema> {
        let request = self.gate.admit(request).await?.0;
        let pb::CreateSchemaRequest { parent, schema, schema_id } = request.into_inner();
        let draft = convert::definition_draft(schema.unwrap_or_default());
        one(self.connector.create_schema(&parent, &schema_id, draft).await)
    }

    async fn get_schema(&self, request: Request<pb::GetSchemaRequest>) -> Answer<pb::Schema> {
        let request = self.gate.admit(request).await?.0;
        let pb::GetSchemaRequest { name, view } = request.into_inner();
        one(self.connector.get_schema(&name, convert::detail(view, Detail::Full)).await)
    }

    async fn list_schemas(&self, request: Request<pb::ListSchemasRequest>) -> Answer<pb::ListSchemasResponse> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListSchemasRequest { parent, view, page_size, page_token } = request.into_inner();
        let (page, detail) = (convert::page(page_size, page_token), convert::detail(view, Detail::Basic));
        let page = self.connector.list_schemas(&parent, &page, detail).await.map_err(to_status)?;
        let (schemas, next_page_token) = several(page);
        Ok(Response::new(pb::ListSchemasResponse { schemas, next_page_token }))
    }

    async fn list_schema_revisions(
        &self,
        request: Request<pb::ListSchemaRevisionsRequest>,
    ) -> Answer<pb::ListSchemaRevisionsResponse> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListSchemaRevisionsRequest { name, view, page_size, page_token } = request.into_inner();
        let (page, detail) = (convert::page(page_size, page_token), convert::detail(view, Detail::Basic));
        let page = self.connector.list_revisions(&convert::name(&name)?, &page, detail).await.map_err(to_status)?;
        let (schemas, next_page_token) = several(page);
        Ok(Response::new(pb::ListSchemaRevisionsResponse { schemas, next_page_token }))
    }

    async fn commit_schema(&self, request: Request<pb::CommitSchemaRequest>) -> Answer<pb::Schema> {
        let request = self.gate.admit(request).await?.0;
        let pb::CommitSchemaRequest { name, schema } = request.into_inner();
        let draft = convert::definition_draft(schema.unwrap_or_default());
        one(self.connector.commit_schema(&convert::name(&name)?, draft).await)
    }

    async fn rollback_schema(&self, request: Request<pb::RollbackSchemaRequest>) -> Answer<pb::Schema> {
        let request = self.gate.admit(request).await?.0;
        let pb::RollbackSchemaRequest { name, revision_id } = request.into_inner();
        one(self.connector.rollback_schema(&convert::name(&name)?, &revision_id).await)
    }

    /// The revision is part of the name; older clients send it on its own.
    #[expect(deprecated, reason = "the field of older clients")]
    async fn delete_schema_revision(&self, request: Request<pb::DeleteSchemaRevisionRequest>) -> Answer<pb::Schema> {
        let request = self.gate.admit(request).await?.0;
        let pb::DeleteSchemaRevisionRequest { name, revision_id } = request.into_inner();
        let (schema, named) = parse_revision_name(&name).map_err(to_status)?;
        let revision = named.or_else(|| Some(revision_id).filter(|id| !id.is_empty()));
        let revision = revision.ok_or_else(|| to_status(Error::argument("name", "it must carry a revision id after '@'")))?;
        one(self.connector.delete_revision(&schema, &revision).await)
    }

    async fn delete_schema(&self, request: Request<pb::DeleteSchemaRequest>) -> Answer<()> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().name)?;
        self.connector.delete_schema(&name).await.map(Response::new).map_err(to_status)
    }

    async fn validate_schema(&self, request: Request<pb::ValidateSchemaRequest>) -> Answer<pb::ValidateSchemaResponse> {
        let request = self.gate.admit(request).await?.0;
        let pb::ValidateSchemaRequest { parent, schema } = request.into_inner();
        let draft = convert::definition_draft(schema.unwrap_or_default());
        self.connector.validate_schema(&parent, draft).await.map_err(to_status)?;
        Ok(Response::new(pb::ValidateSchemaResponse {}))
    }

    async fn validate_message(&self, request: Request<pb::ValidateMessageRequest>) -> Answer<pb::ValidateMessageResponse> {
        let request = self.gate.admit(request).await?.0;
        use pb::validate_message_request::SchemaSpec as Given;
        let pb::ValidateMessageRequest { parent, schema_spec, message, encoding } = request.into_inner();
        let spec = schema_spec.map(|given| match given {
            Given::Name(name) => SchemaSpec::Name(name),
            Given::Schema(schema) => SchemaSpec::Definition(convert::definition_draft(schema)),
        });
        let encoding = convert::encoding(encoding);
        self.connector.validate_message(&parent, spec, message, encoding).await.map_err(to_status)?;
        Ok(Response::new(pb::ValidateMessageResponse {}))
    }
}
