//! `google.iam.v1.IAMPolicy` for topics, subscriptions, snapshots and schemas.

use std::sync::Arc;

use tonic::{Request, Response, Status, async_trait};

use super::gate::Gate;
use crate::{
    api::{
        proto::iam::{
            Binding, GetIamPolicyRequest, Policy, SetIamPolicyRequest, TestIamPermissionsRequest, TestIamPermissionsResponse,
            iam_policy_server::IamPolicy,
        },
        status::to_status,
    },
    connector::{Connector, Error},
    model::{
        access::{self, AccessPolicy},
        text::clipped,
    },
};

/// Parts of a policy an update mask may name; the whole policy is replaced in any case.
const MASK: &[&str] = &["bindings", "etag", "version"];

/// The service.
pub struct IamPolicyService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl IamPolicyService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }
}

fn to_proto((policy, etag): (AccessPolicy, bytes::Bytes)) -> Policy {
    let binding = |b: access::Binding| Binding { role: b.role, members: b.members, condition: None };
    Policy {
        // A policy without conditions is of version 1; an empty one has none.
        version: if policy.bindings.is_empty() { policy.version } else { policy.version.max(1) },
        bindings: policy.bindings.into_iter().map(binding).collect(),
        audit_configs: Vec::new(),
        etag,
    }
}

/// What the server would not act on is refused, not stored.
fn from_proto(policy: Policy) -> Result<(AccessPolicy, bytes::Bytes), Error> {
    if !policy.audit_configs.is_empty() {
        return Err(Error::Unsupported("policy.audit_configs"));
    }
    if policy.bindings.iter().any(|b| b.condition.is_some()) {
        return Err(Error::Unsupported("policy.bindings.condition"));
    }
    let binding = |b: Binding| access::Binding { role: b.role, members: b.members };
    let bindings = policy.bindings.into_iter().map(binding).collect();
    Ok((AccessPolicy { version: policy.version, bindings }, policy.etag))
}

#[async_trait]
impl IamPolicy for IamPolicyService {
    async fn set_iam_policy(&self, request: Request<SetIamPolicyRequest>) -> Result<Response<Policy>, Status> {
        let request = self.gate.admit(request).await?.0;
        let request = request.into_inner();
        if let Some(path) = request.update_mask.iter().flat_map(|m| &m.paths).find(|p| !MASK.contains(&p.as_str())) {
            let why = format!("'{}' is not one of bindings, etag and version", clipped(path));
            return Err(to_status(Error::argument("update_mask", why)));
        }
        let policy = request.policy.ok_or_else(|| Error::argument("policy", "it must be set"));
        let (policy, etag) = policy.and_then(from_proto).map_err(to_status)?;
        let stored = self.connector.set_policy(&request.resource, policy, &etag).await.map_err(to_status)?;
        self.gate.policy_changed(&request.resource);
        Ok(Response::new(to_proto(stored)))
    }

    async fn get_iam_policy(&self, request: Request<GetIamPolicyRequest>) -> Result<Response<Policy>, Status> {
        let request = self.gate.admit(request).await?.0;
        let stored = self.connector.get_policy(&request.get_ref().resource).await.map_err(to_status)?;
        Ok(Response::new(to_proto(stored)))
    }

    async fn test_iam_permissions(
        &self,
        request: Request<TestIamPermissionsRequest>,
    ) -> Result<Response<TestIamPermissionsResponse>, Status> {
        let TestIamPermissionsRequest { resource, permissions } = request.get_ref().clone();
        let permissions = self.connector.test_permissions(&resource, permissions).await.map_err(to_status)?;
        let permissions = self.gate.held(&request, &resource, permissions).await?;
        Ok(Response::new(TestIamPermissionsResponse { permissions }))
    }
}
