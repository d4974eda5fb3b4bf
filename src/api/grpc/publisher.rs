//! `google.pubsub.v1.Publisher`.

use std::sync::Arc;

use prost::Message;
use tonic::{Request, Response, Status, async_trait};

use super::gate::{Detach, Gate};
use crate::{
    api::{
        convert,
        proto::pubsub::{self as pb, publisher_server::Publisher},
        status::to_status,
    },
    connector::{Connector, publish::check_request_size},
    model::access::Permission,
};

/// The service.
pub struct PublisherService {
    connector: Arc<Connector>,
    gate: Gate,
}

impl PublisherService {
    pub fn new(connector: Arc<Connector>, gate: Gate) -> Self {
        Self { connector, gate }
    }
}

#[async_trait]
impl Publisher for PublisherService {
    async fn create_topic(&self, request: Request<pb::Topic>) -> Result<Response<pb::Topic>, Status> {
        let (request, _creating) = self.gate.admit(request).await?;
        let draft = convert::topic_draft(request.into_inner());
        let topic = self.connector.create_topic(draft).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn update_topic(&self, request: Request<pb::UpdateTopicRequest>) -> Result<Response<pb::Topic>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::UpdateTopicRequest { topic, update_mask } = request.into_inner();
        let draft = convert::topic_draft(topic.unwrap_or_default());
        let topic = self.connector.update_topic(draft, &convert::paths(update_mask)).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn publish(&self, request: Request<pb::PublishRequest>) -> Result<Response<pb::PublishResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let request = request.into_inner();
        let topic = convert::name(&request.topic)?;
        check_request_size(request.encoded_len()).map_err(to_status)?;
        let ids = self.connector.publish(&topic, request.messages).await.map_err(to_status)?;
        Ok(Response::new(pb::PublishResponse { message_ids: ids.iter().map(u64::to_string).collect() }))
    }

    async fn get_topic(&self, request: Request<pb::GetTopicRequest>) -> Result<Response<pb::Topic>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().topic)?;
        let topic = self.connector.get_topic(&name).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn list_topics(&self, request: Request<pb::ListTopicsRequest>) -> Result<Response<pb::ListTopicsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListTopicsRequest { project, page_size, page_token } = request.into_inner();
        let page = self.connector.list_topics(&project, &convert::page(page_size, page_token)).await.map_err(to_status)?;
        let topics = page.items.into_iter().map(convert::topic).collect();
        Ok(Response::new(pb::ListTopicsResponse { topics, next_page_token: page.next_token }))
    }

    async fn list_topic_subscriptions(
        &self,
        request: Request<pb::ListTopicSubscriptionsRequest>,
    ) -> Result<Response<pb::ListTopicSubscriptionsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListTopicSubscriptionsRequest { topic, page_size, page_token } = request.get_ref().clone();
        let (topic, page) = (convert::name(&topic)?, convert::page(page_size, page_token));
        let page = self.connector.list_topic_subscriptions(&topic, &page).await.map_err(to_status)?;
        let next_page_token = page.next_token;
        let subscriptions = self.gate.visible(&request, topic.as_str(), Permission::SubscriptionsGet, page.items).await;
        Ok(Response::new(pb::ListTopicSubscriptionsResponse { subscriptions, next_page_token }))
    }

    async fn list_topic_snapshots(
        &self,
        request: Request<pb::ListTopicSnapshotsRequest>,
    ) -> Result<Response<pb::ListTopicSnapshotsResponse>, Status> {
        let request = self.gate.admit(request).await?.0;
        let pb::ListTopicSnapshotsRequest { topic, page_size, page_token } = request.get_ref().clone();
        let (topic, page) = (convert::name(&topic)?, convert::page(page_size, page_token));
        let page = self.connector.list_topic_snapshots(&topic, &page).await.map_err(to_status)?;
        let snapshots = self.gate.visible(&request, topic.as_str(), Permission::SnapshotsGet, page.items).await;
        Ok(Response::new(pb::ListTopicSnapshotsResponse { snapshots, next_page_token: page.next_token }))
    }

    async fn delete_topic(&self, request: Request<pb::DeleteTopicRequest>) -> Result<Response<()>, Status> {
        let request = self.gate.admit(request).await?.0;
        let name = convert::name(&request.get_ref().topic)?;
        self.connector.delete_topic(&name).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn detach_subscription(
        &self,
        request: Request<pb::DetachSubscriptionRequest>,
    ) -> Result<Response<pb::DetachSubscriptionResponse>, Status> {
        let subscription = &request.get_ref().subscription;
        let name = convert::name(subscription)?;
        let found = self.connector.subscription(&name).await;
        let topic = found.ok().filter(|entry| !entry.subscription.detached).map(|entry| entry.subscription.topic.to_string());
        self.gate.admit_detach(&request, Detach { subscription, topic }).await?;
        self.connector.detach_subscription(&name).await.map_err(to_status)?;
        Ok(Response::new(pb::DetachSubscriptionResponse {}))
    }
}
