//! `google.pubsub.v1.Subscriber`. What hands out and settles messages is in [`super::delivery`].

use std::sync::Arc;

use tonic::{Request, Response, Status, Streaming, async_trait};

use super::{delivery, gate::Gate};
use crate::{
    api::{
        convert,
        proto::pubsub::{self as pb, subscriber_server::Subscriber},
        status::to_status,
    },
    connector::{Connector, draft::SnapshotDraft},
};

/// The service.
pub struct SubscriberService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl SubscriberService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }
}

#[async_trait]
impl Subscriber for SubscriberService {
    async fn create_subscription(&self, request: Request<pb::Subscription>) -> Result<Response<pb::Subscription>, Status> {
        let (request, _creating) = self.gate.admit(request).await?;
        let draft = convert::subscription_draft(request.into_inner());
        let view = self.connector.create_subscription(draft).await.map_err(to_status)?;
        Ok(Response::new(convert::subscription(view)))
    }

    async fn get_subscription(&self, request: Request<pb::GetSubscriptionRequest>) -> Result<Response<pb::Subscription>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().subscription)?;
        let view = self.connector.get_subscription(&name).await.map_err(to_status)?;
        Ok(Response::new(convert::subscription(view)))
    }

    async fn update_subscription(
        &self,
        request: Request<pb::UpdateSubscriptionRequest>,
    ) -> Result<Response<pb::Subscription>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::UpdateSubscriptionRequest { subscription, update_mask } = request.into_inner();
        let draft = convert::subscription_draft(subscription.unwrap_or_default());
        let view = self.connector.update_subscription(draft, &convert::paths(update_mask)).await.map_err(to_status)?;
        Ok(Response::new(convert::subscription(view)))
    }

    async fn list_subscriptions(
        &self,
        request: Request<pb::ListSubscriptionsRequest>,
    ) -> Result<Response<pb::ListSubscriptionsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListSubscriptionsRequest { project, page_size, page_token } = request.into_inner();
        let page = convert::page(page_size, page_token);
        let page = self.connector.list_subscriptions(&project, &page).await.map_err(to_status)?;
        let subscriptions = page.items.into_iter().map(convert::subscription).collect();
        Ok(Response::new(pb::ListSubscriptionsResponse { subscriptions, next_page_token: page.next_token }))
    }

    async fn delete_subscription(&self, request: Request<pb::DeleteSubscriptionRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().subscription)?;
        self.connector.delete_subscription(&name).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn modify_ack_deadline(&self, request: Request<pb::ModifyAckDeadlineRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        delivery::modify_ack_deadline(&self.connector, request).await
    }

    async fn acknowledge(&self, request: Request<pb::AcknowledgeRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        delivery::acknowledge(&self.connector, request).await
    }

    async fn pull(&self, request: Request<pb::PullRequest>) -> Result<Response<pb::PullResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        delivery::pull(&self.connector, request).await
    }

    type StreamingPullStream = delivery::StreamingPullStream;

    async fn streaming_pull(
        &self,
        request: Request<Streaming<pb::StreamingPullRequest>>,
    ) -> Result<Response<Self::StreamingPullStream>, Status> {
        delivery::streaming_pull(&self.connector, &self.gate, request).await
    }

    async fn modify_push_config(&self, request: Request<pb::ModifyPushConfigRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ModifyPushConfigRequest { subscription, push_config } = request.into_inner();
        let (name, config) = (convert::name(&subscription)?, convert::push_config(push_config));
        self.connector.modify_push_config(&name, &config).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn get_snapshot(&self, request: Request<pb::GetSnapshotRequest>) -> Result<Response<pb::Snapshot>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().snapshot)?;
        let view = self.connector.get_snapshot(&name).await.map_err(to_status)?;
        Ok(Response::new(convert::snapshot(view)))
    }

    async fn list_snapshots(
        &self,
        request: Request<pb::ListSnapshotsRequest>,
    ) -> Result<Response<pb::ListSnapshotsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListSnapshotsRequest { project, page_size, page_token } = request.into_inner();
        let page = self.connector.list_snapshots(&project, &convert::page(page_size, page_token)).await.map_err(to_status)?;
        let snapshots = page.items.into_iter().map(convert::snapshot).collect();
        Ok(Response::new(pb::ListSnapshotsResponse { snapshots, next_page_token: page.next_token }))
    }

    async fn create_snapshot(&self, request: Request<pb::CreateSnapshotRequest>) -> Result<Response<pb::Snapshot>, Status> {
        let request = self.gate.admit(request).await?.0;
        let request = request.into_inner();
        let source = convert::name(&request.subscription)?;
        let draft = SnapshotDraft { name: request.name, labels: request.labels, expire_time: None };
        let view = self.connector.create_snapshot(draft, &source).await.map_err(to_status)?;
        Ok(Response::new(convert::snapshot(view)))
    }

    async fn update_snapshot(&self, request: Request<pb::UpdateSnapshotRequest>) -> Result<Response<pb::Snapshot>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::UpdateSnapshotRequest { snapshot, update_mask } = request.into_inner();
        let draft = convert::snapshot_draft(snapshot.unwrap_or_default());
        let view = self.connector.update_snapshot(draft, &convert::paths(update_mask)).await.map_err(to_status)?;
        Ok(Response::new(convert::snapshot(view)))
    }

    async fn delete_snapshot(&self, request: Request<pb::DeleteSnapshotRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().snapshot)?;
        self.connector.delete_snapshot(&name).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn seek(&self, request: Request<pb::SeekRequest>) -> Result<Response<pb::SeekResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::SeekRequest { subscription, target } = request.into_inner();
        let name = convert::name(&subscription)?;
        self.connector.seek(&name, convert::seek_target(target)).await.map_err(to_status)?;
        Ok(Response::new(pb::SeekResponse {}))
    }
}
