//! Google's Rust clients, and a topic and a subscription for them.

use google_cloud_auth::credentials::{Credentials, anonymous};
use google_cloud_pubsub::{
    client::{Publisher, SchemaService, Subscriber, SubscriptionAdmin, TopicAdmin},
    model::Subscription,
};

/// Longest wait for anything that should happen at once.
pub const SOON: std::time::Duration = std::time::Duration::from_secs(60);

/// Google's clients, and the names of a topic and a subscription for them.
pub struct Clients {
    pub topics: TopicAdmin,
    pub subscriptions: SubscriptionAdmin,
    pub subscriber: Subscriber,
    pub schemas: SchemaService,
    pub project: String,
    pub topic: String,
    pub subscription: String,
    endpoint: String,
    credentials: Credentials,
}

impl Clients {
    /// Clients of a server without authentication.
    pub async fn anonymous(endpoint: &str, project: String) -> Self {
        Self::connect(endpoint, project, anonymous::Builder::new().build()).await
    }

    /// Clients of a server.
    pub async fn connect(endpoint: &str, project: String, credentials: Credentials) -> Self {
        let topics = TopicAdmin::builder().with_endpoint(endpoint).with_credentials(credentials.clone());
        let subscriptions = SubscriptionAdmin::builder().with_endpoint(endpoint).with_credentials(credentials.clone());
        let subscriber = Subscriber::builder().with_endpoint(endpoint).with_credentials(credentials.clone());
        let schemas = SchemaService::builder().with_endpoint(endpoint).with_credentials(credentials.clone());
        Self {
            topics: topics.build().await.expect("a client"),
            subscriptions: subscriptions.build().await.expect("a client"),
            subscriber: subscriber.build().await.expect("a client"),
            schemas: schemas.build().await.expect("a client"),
            topic: format!("projects/{project}/topics/orders"),
            subscription: format!("projects/{project}/subscriptions/billing"),
            project,
            endpoint: endpoint.to_owned(),
            credentials,
        }
    }

    /// Creates the topic and the subscription.
    pub async fn pair(&self, set: impl FnOnce(Subscription) -> Subscription) {
        self.topics.create_topic().set_name(&self.topic).send().await.expect("a topic");
        let wanted = set(Subscription::new().set_name(&self.subscription).set_topic(&self.topic));
        self.subscriptions.create_subscription().with_request(wanted).send().await.expect("a subscription");
    }

    /// A publisher of the topic.
    pub async fn publisher(&self) -> Publisher {
        let builder = Publisher::builder(&self.topic).with_endpoint(&self.endpoint);
        builder.with_credentials(self.credentials.clone()).build().await.expect("a publisher")
    }
}
