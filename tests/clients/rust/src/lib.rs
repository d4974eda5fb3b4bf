//! A landline server and Google's Rust clients of it.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::{
    client::{Publisher, Subscriber, SubscriptionAdmin, TopicAdmin},
    model::{Message, Subscription},
    subscriber::handler::Handler,
};
use tempfile::TempDir;

/// Longest wait for anything that should happen at once.
pub const SOON: std::time::Duration = std::time::Duration::from_secs(30);
const READY: &str = "landline listening on ";

/// One server process with the embedded broker in a folder of its own.
pub struct Server {
    folder: TempDir,
    child: Child,
    port: String,
}

impl Server {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (child, port) = spawn(&folder, "0");
        Self { folder, child, port }
    }

    /// Ends the process as a crash does and starts it again on its port.
    pub fn crash_and_restart(&mut self) {
        self.kill();
        (self.child, self.port) = spawn(&self.folder, &self.port);
    }

    fn kill(&mut self) {
        self.child.kill().expect("a running server");
        self.child.wait().expect("the end of the server");
    }

    /// Clients in a project of their own.
    pub async fn clients(&self) -> Clients {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let project = format!("project-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        Clients::connect(&format!("http://127.0.0.1:{}", self.port), project).await
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Google's clients, and the names of a topic and a subscription for them.
pub struct Clients {
    pub topics: TopicAdmin,
    pub subscriptions: SubscriptionAdmin,
    pub subscriber: Subscriber,
    pub project: String,
    pub topic: String,
    pub subscription: String,
    endpoint: String,
}

impl Clients {
    /// Clients of a server in a project of their own.
    pub async fn connect(endpoint: &str, project: String) -> Self {
        let credentials = || anonymous::Builder::new().build();
        Self {
            topics: TopicAdmin::builder().with_endpoint(endpoint).with_credentials(credentials()).build().await.expect("a client"),
            subscriptions: SubscriptionAdmin::builder()
                .with_endpoint(endpoint)
                .with_credentials(credentials())
                .build()
                .await
                .expect("a client"),
            subscriber: Subscriber::builder().with_endpoint(endpoint).with_credentials(credentials()).build().await.expect("a client"),
            topic: format!("projects/{project}/topics/orders"),
            subscription: format!("projects/{project}/subscriptions/billing"),
            project,
            endpoint: endpoint.to_owned(),
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
        let credentials = anonymous::Builder::new().build();
        Publisher::builder(&self.topic).with_endpoint(&self.endpoint).with_credentials(credentials).build().await.expect("a publisher")
    }

    /// Publishes texts and answers their ids.
    pub async fn publish(&self, texts: &[&str]) -> Vec<String> {
        let publisher = self.publisher().await;
        let futures: Vec<_> = texts.iter().map(|t| publisher.publish(Message::new().set_data(t.to_string()))).collect();
        let mut ids = Vec::new();
        for future in futures {
            ids.push(future.await.expect("a published message"));
        }
        ids
    }
}

/// The next message of a stream.
pub async fn next(stream: &mut google_cloud_pubsub::subscriber::MessageStream) -> (Message, Handler) {
    let next = tokio::time::timeout(SOON, stream.next()).await.expect("no message in time");
    next.expect("an open stream").expect("a message")
}

/// The payload as text.
pub fn text(message: &Message) -> String {
    String::from_utf8(message.data.to_vec()).expect("a text payload")
}

fn spawn(folder: &TempDir, port: &str) -> (Child, String) {
    let path = folder.path();
    let log = File::options().create(true).append(true).open(path.join("server.log")).expect("a log");
    let mut child = Command::new(std::env::var("LANDLINE_BINARY").expect("LANDLINE_BINARY"))
        .env("CONNECTORS_GCP_BROKER_URL", format!("embedded:{}", path.join("data").display()))
        .env("CONNECTORS_GCP_PORT", port)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .expect("the server");
    let mut stdout = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("its first line");
    let address = line.trim().strip_prefix(READY).unwrap_or_else(|| panic!("no ready line but {line:?}"));
    let port = address.rsplit(':').next().expect("a port").to_owned();
    std::thread::spawn(move || stdout.lines().for_each(drop));
    (child, port)
}
