//! `google.pubsub.v1.Publisher`.

use std::sync::Arc;

use prost::Message;
use tonic::{Request, Response, Status, async_trait};

use crate::{
    api::{
        convert,
        proto::pubsub::{self as pb, publisher_server::Publisher},
        status::to_status,
    },
    connector::{Connector, publish::check_request_size},
};

/// The service.
pub struct PublisherService {
    connector: Arc<Connector>,
}

impl PublisherService {
    pub fn new(connector: Arc<Connector>) -> Self {
        Self { connector }
    }
}

#[async_trait]
impl Publisher for PublisherService {
    async fn create_topic(&self, request: Request<pb::Topic>) -> Result<Response<pb::Topic>, Status> {
        let draft = convert::topic_draft(request.into_inner());
        let topic = self.connector.create_topic(draft).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn update_topic(&self, request: Request<pb::UpdateTopicRequest>) -> Result<Response<pb::Topic>, Status> {
        let pb::UpdateTopicRequest { topic, update_mask } = request.into_inner();
        let draft = convert::topic_draft(topic.unwrap_or_default());
        let topic = self.connector.update_topic(draft, &convert::paths(update_mask)).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn publish(&self, request: Request<pb::PublishRequest>) -> Result<Response<pb::PublishResponse>, Status> {
        let request = request.into_inner();
        let topic = convert::name(&request.topic)?;
        check_request_size(request.encoded_len()).map_err(to_status)?;
        let ids = self.connector.publish(&topic, request.messages).await.map_err(to_status)?;
        Ok(Response::new(pb::PublishResponse { message_ids: ids.iter().map(u64::to_string).collect() }))
    }

    async fn get_topic(&self, request: Request<pb::GetTopicRequest>) -> Result<Response<pb::Topic>, Status> {
        let name = convert::name(&request.get_ref().topic)?;
        let topic = self.connector.get_topic(&name).await.map_err(to_status)?;
        Ok(Response::new(convert::topic(topic)))
    }

    async fn list_topics(&self, request: Request<pb::ListTopicsRequest>) -> Result<Response<pb::ListTopicsResponse>, Status> {
        let pb::ListTopicsRequest { project, page_size, page_token } = request.into_inner();
        let page = self.connector.list_topics(&project, &convert::page(page_size, page_token)).await.map_err(to_status)?;
        let topics = page.items.into_iter().map(convert::topic).collect();
        Ok(Response::new(pb::ListTopicsResponse { topics, next_page_token: page.next_token }))
    }

    async fn list_topic_subscriptions(
        &self,
        request: Request<pb::ListTopicSubscriptionsRequest>,
    ) -> Result<Response<pb::ListTopicSubscriptionsResponse>, Status> {
        let pb::ListTopicSubscriptionsRequest { topic, page_size, page_token } = request.into_inner();
        let (topic, page) = (convert::name(&topic)?, convert::page(page_size, page_token));
        let page = self.connector.list_topic_subscriptions(&topic, &page).await.map_err(to_status)?;
        let next_page_token = page.next_token;
        Ok(Response::new(pb::ListTopicSubscriptionsResponse { subscriptions: page.items, next_page_token }))
    }

    async fn list_topic_snapshots(
        &self,
        request: Request<pb::ListTopicSnapshotsRequest>,
    ) -> Result<Response<pb::ListTopicSnapshotsResponse>, Status> {
        let pb::ListTopicSnapshotsRequest { topic, page_size, page_token } = request.into_inner();
        let (topic, page) = (convert::name(&topic)?, convert::page(page_size, page_token));
        let page = self.connector.list_topic_snapshots(&topic, &page).await.map_err(to_status)?;
        Ok(Response::new(pb::ListTopicSnapshotsResponse { snapshots: page.items, next_page_token: page.next_token }))
    }

    async fn delete_topic(&self, request: Request<pb::DeleteTopicRequest>) -> Result<Response<()>, Status> {
        let name = convert::name(&request.get_ref().topic)?;
        self.connector.delete_topic(&name).await.map_err(to_status)?;
        Ok(Response::new(()))
    }

    async fn detach_subscription(
        &self,
        request: Request<pb::DetachSubscriptionRequest>,
    ) -> Result<Response<pb::DetachSubscriptionResponse>, Status> {
        let name = convert::name(&request.get_ref().subscription)?;
        self.connector.detach_subscription(&name).await.map_err(to_status)?;
        Ok(Response::new(pb::DetachSubscriptionResponse {}))
    }
}
