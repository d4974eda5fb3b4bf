//! The scenarios of ../scenarios.txt with Google's Rust client.

use std::{
    collections::{BTreeSet, HashMap},
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use google_cloud_auth::credentials::{Credentials, service_account};
use google_cloud_iam_v1::model::{Binding, Policy};
use google_cloud_pubsub::{
    model::{DeadLetterPolicy, Encoding, Message, Schema, SchemaSettings, Subscription, Topic, schema::Type},
    subscriber::{MessageStream, ShutdownBehavior, handler::Handler},
};
use google_cloud_wkt::FieldMask;
use landline_rust_client_tests::{Clients, SOON};

const SCHEMA: &str = r#"{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}"#;

/// Longest run of one scenario.
const LONGEST: Duration = Duration::from_secs(840);
const STREAMS: usize = 20;
/// Longer than three minutes, after which many a proxy forgets a connection that nobody uses.
const IDLE: Duration = Duration::from_secs(190);
/// Longest wait for a server that comes back, and for a message whose lease went down with it.
const OUTAGE: Duration = Duration::from_secs(240);
const KILLS: usize = 3;
/// Messages whose publish is confirmed between two kills.
const BETWEEN_KILLS: usize = 100;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Outcome = Result<(), Failure>;

#[tokio::main]
async fn main() {
    for name in std::env::args().skip(1) {
        let ended = tokio::time::timeout(LONGEST, scenario(&name)).await;
        match ended.unwrap_or_else(|_| Some(Err("it did not end".into()))) {
            Some(Ok(())) => println!("ok {name}"),
            Some(Err(error)) => println!("failed {name} {}", format!("{error:?}").replace('\n', " ")),
            None => println!("absent {name}"),
        }
    }
}

async fn scenario(name: &str) -> Option<Outcome> {
    if name == "key" {
        return Some(key().await);
    }
    let endpoint = format!("http://{}", std::env::var("PUBSUB_EMULATOR_HOST").expect("PUBSUB_EMULATOR_HOST"));
    Run { clients: Clients::anonymous(&endpoint, project()).await }.scenario(name).await
}

fn project() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    format!("project-{}", now.as_micros())
}

struct Run {
    clients: Clients,
}

fn check(condition: bool, otherwise: impl Into<String>) -> Outcome {
    if condition { Ok(()) } else { Err(otherwise.into().into()) }
}

fn same(mut got: Vec<String>, mut ids: Vec<String>) -> Outcome {
    got.sort();
    ids.sort();
    check(got == ids, format!("{} other messages than the {} published", got.len(), ids.len()))
}

fn numbers(count: usize, prefix: &str) -> Vec<Message> {
    (0..count).map(|n| Message::new().set_data(format!("{prefix}{n}"))).collect()
}

async fn next(stream: &mut MessageStream) -> Result<(Message, Handler), Failure> {
    let next = tokio::time::timeout(SOON, stream.next()).await.map_err(|_| "no message in time")?;
    Ok(next.ok_or("the stream ended")??)
}

/// Takes messages, acks them and answers their ids.
async fn take(stream: &mut MessageStream, count: usize) -> Result<Vec<String>, Failure> {
    let mut ids = Vec::new();
    for _ in 0..count {
        let (message, handler) = next(stream).await?;
        handler.ack();
        ids.push(message.message_id);
    }
    Ok(ids)
}

async fn confirm(handler: Handler) -> Outcome {
    let Handler::ExactlyOnce(handler) = handler else { return Err("not an exactly-once handler".into()) };
    tokio::time::timeout(SOON, handler.confirmed_ack()).await.map_err(|_| "no answer to an ack")??;
    Ok(())
}

fn an_hour_ago() -> Result<google_cloud_wkt::Timestamp, Failure> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(google_cloud_wkt::Timestamp::clamp(now.as_secs() as i64 - 3600, 0))
}

impl Run {
    async fn scenario(&self, name: &str) -> Option<Outcome> {
        Some(match name {
            "batch" => self.batch().await,
            "ordered" => self.ordered().await,
            // The client offers no compression.
            "large" => self.large().await,
            "flow_control" => self.flow_control().await,
            "many_streams" => self.many_streams().await,
            "nack" => self.nack().await,
            "extend" => self.extend().await,
            "exactly_once" => self.exactly_once().await,
            "lost_lease" => self.lost_lease().await,
            "dead_letter" => self.dead_letter().await,
            "filter" => self.filter().await,
            "seek" => self.rewound(false).await,
            "snapshot" => self.rewound(true).await,
            "detach" => self.detach().await,
            "update" => self.update().await,
            "schema" => self.schema().await,
            "iam" => self.iam().await,
            "idle" => self.idle().await,
            "reconnect" => self.reconnect().await,
            "kill" => self.kill().await,
            _ => return None,
        })
    }

    fn open(&self) -> MessageStream {
        self.clients.subscriber.subscribe(&self.clients.subscription).build()
    }

    async fn publish(&self, messages: Vec<Message>) -> Result<Vec<String>, Failure> {
        let publisher = self.clients.publisher().await;
        let futures: Vec<_> = messages.into_iter().map(|m| publisher.publish(m)).collect();
        let mut ids = Vec::new();
        for future in futures {
            ids.push(tokio::time::timeout(SOON, future).await.map_err(|_| "no answer to a publish")??);
        }
        Ok(ids)
    }

    async fn pair(&self, set: impl FnOnce(Subscription) -> Subscription) {
        self.clients.pair(set).await;
    }

    async fn batch(&self) -> Outcome {
        self.pair(|s| s).await;
        let ids = self.publish(numbers(1000, "")).await?;
        same(take(&mut self.open(), 1000).await?, ids)
    }

    async fn ordered(&self) -> Outcome {
        self.pair(|s| s.set_enable_message_ordering(true)).await;
        let message = |n: usize, key: &str| Message::new().set_data(n.to_string()).set_ordering_key(key);
        let messages = (0..50).flat_map(|n| ["a", "b", "c"].map(|key| message(n, key))).collect();
        self.publish(messages).await?;
        let mut stream = self.open();
        let mut expected = HashMap::<String, usize>::new();
        for _ in 0..150 {
            let (message, handler) = next(&mut stream).await?;
            handler.ack();
            let number = expected.entry(message.ordering_key.clone()).or_default();
            check(message.data == number.to_string(), format!("{:?} instead of {number}", message.data))?;
            *number += 1;
        }
        Ok(())
    }

    async fn large(&self) -> Outcome {
        self.pair(|s| s).await;
        let data = "x".repeat(9_999_000);
        self.publish(vec![Message::new().set_data(data.clone())]).await?;
        let (message, handler) = next(&mut self.open()).await?;
        handler.ack();
        check(message.data == data.as_bytes(), "other bytes came")
    }

    async fn flow_control(&self) -> Outcome {
        self.pair(|s| s).await;
        let ids = self.publish(numbers(200, "")).await?;
        let builder = self.clients.subscriber.subscribe(&self.clients.subscription);
        let mut stream = builder.set_max_outstanding_messages(10).build();
        let now = Arc::new(AtomicUsize::new(0));
        let mut got = Vec::new();
        for _ in 0..200 {
            let (message, handler) = next(&mut stream).await?;
            let most = now.fetch_add(1, Ordering::SeqCst) + 1;
            // An ack is on its way for a moment, in which the server may send the next message already.
            check(most <= 10, format!("{most} were under way"))?;
            got.push(message.message_id);
            let now = now.clone();
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(2)).await;
                now.fetch_sub(1, Ordering::SeqCst);
                handler.ack();
            });
        }
        same(got, ids)
    }

    async fn many_streams(&self) -> Outcome {
        self.pair(|s| s).await;
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        for mut stream in (0..STREAMS).map(|_| self.open()) {
            let sender = sender.clone();
            tokio::spawn(async move {
                while let Some(Ok((message, handler))) = stream.next().await {
                    handler.ack();
                    let _ = sender.send(message.message_id);
                }
            });
        }
        let ids = self.publish(numbers(1000, "")).await?;
        let mut got = Vec::new();
        while got.len() < 1000 {
            let next = tokio::time::timeout(SOON, received.recv()).await;
            got.push(next.map_err(|_| format!("{} messages came", got.len()))?.ok_or("the streams ended")?);
        }
        same(got, ids)
    }

    async fn nack(&self) -> Outcome {
        self.pair(|s| s).await;
        let ids = self.publish(numbers(1, "m")).await?;
        let mut stream = self.open();
        let (first, handler) = next(&mut stream).await?;
        handler.nack();
        let second = take(&mut stream, 1).await?;
        same(vec![first.message_id, second[0].clone()], vec![ids[0].clone(), ids[0].clone()])
    }

    async fn extend(&self) -> Outcome {
        self.pair(|s| s).await;
        self.publish(numbers(1, "m")).await?;
        let mut stream = self.open();
        let (_, handler) = next(&mut stream).await?;
        let again = tokio::time::timeout(Duration::from_secs(14), stream.next()).await;
        check(again.is_err(), "the message came again meanwhile")?;
        handler.ack();
        let again = tokio::time::timeout(Duration::from_secs(1), stream.next()).await;
        check(again.is_err(), "the message came again after its ack")
    }

    /// Receives messages whose acks the server must confirm.
    async fn confirmed(&self, count: usize) -> Result<Vec<String>, Failure> {
        let builder = self.clients.subscriber.subscribe(&self.clients.subscription);
        let mut stream = builder.set_shutdown_behavior(ShutdownBehavior::NackImmediately).build();
        let mut ids = Vec::new();
        for _ in 0..count {
            let (message, handler) = next(&mut stream).await?;
            confirm(handler).await?;
            ids.push(message.message_id);
        }
        Ok(ids)
    }

    async fn exactly_once(&self) -> Outcome {
        self.pair(|s| s.set_enable_exactly_once_delivery(true)).await;
        let ids = self.publish(numbers(50, "")).await?;
        same(self.confirmed(50).await?, ids)
    }

    async fn lost_lease(&self) -> Outcome {
        self.pair(|s| s.set_enable_exactly_once_delivery(true).set_retain_acked_messages(true)).await;
        let ids = self.publish(numbers(2, "m")).await?;
        let mut stream = self.open();
        let (_, first) = next(&mut stream).await?;
        let (_, second) = next(&mut stream).await?;
        confirm(first).await?;
        // A seek ends every lease behind the client's back.
        self.seek_back().await?;
        check(confirm(second).await.is_err(), "the ack of a lost lease was confirmed")?;
        let mut again = Vec::new();
        for _ in 0..2 {
            let (message, handler) = next(&mut stream).await?;
            confirm(handler).await?;
            again.push(message.message_id);
        }
        same(again, ids)
    }

    async fn dead_letter(&self) -> Outcome {
        let clients = &self.clients;
        let dead = format!("projects/{}/topics/dead", clients.project);
        let graveyard = format!("projects/{}/subscriptions/graveyard", clients.project);
        clients.topics.create_topic().set_name(&dead).send().await?;
        clients.subscriptions.create_subscription().set_name(&graveyard).set_topic(&dead).send().await?;
        let policy = DeadLetterPolicy::new().set_dead_letter_topic(&dead).set_max_delivery_attempts(5);
        self.pair(|s| s.set_dead_letter_policy(policy)).await;
        self.publish(numbers(1, "m")).await?;
        let mut stream = self.open();
        for attempt in 1..=5 {
            let (_, handler) = next(&mut stream).await?;
            check(handler.delivery_attempt() == Some(attempt), format!("{:?} instead of {attempt}", handler.delivery_attempt()))?;
            handler.nack();
        }
        let (buried, handler) = next(&mut clients.subscriber.subscribe(&graveyard).build()).await?;
        handler.ack();
        let count = buried.attributes.get("CloudPubSubDeadLetterSourceDeliveryCount").map(String::as_str);
        check(count == Some("5"), format!("a delivery count of {count:?}"))
    }

    async fn filter(&self) -> Outcome {
        self.pair(|s| s.set_filter("attributes.color = \"red\"")).await;
        let message = |n: usize| Message::new().set_data("x").set_attributes([("color", ["red", "blue"][n % 2])]);
        let ids = self.publish((0..20).map(message).collect()).await?;
        same(take(&mut self.open(), 10).await?, ids.into_iter().step_by(2).collect())
    }

    async fn seek_back(&self) -> Outcome {
        let past = an_hour_ago()?;
        self.clients.subscriptions.seek().set_subscription(&self.clients.subscription).set_time(past).send().await?;
        Ok(())
    }

    async fn rewound(&self, to_snapshot: bool) -> Outcome {
        let clients = &self.clients;
        self.pair(|s| s.set_retain_acked_messages(true)).await;
        let snapshot = format!("projects/{}/snapshots/before", clients.project);
        let subscription = &clients.subscription;
        clients.subscriptions.create_snapshot().set_name(&snapshot).set_subscription(subscription).send().await?;
        let ids = self.publish(numbers(3, "m")).await?;
        let mut stream = self.open();
        take(&mut stream, 3).await?;
        if to_snapshot {
            clients.subscriptions.seek().set_subscription(subscription).set_snapshot(&snapshot).send().await?;
        } else {
            self.seek_back().await?;
        }
        same(take(&mut stream, 3).await?, ids)
    }

    async fn detach(&self) -> Outcome {
        let clients = &self.clients;
        self.pair(|s| s).await;
        clients.topics.detach_subscription().set_subscription(&clients.subscription).send().await?;
        let got = clients.subscriptions.get_subscription().set_subscription(&clients.subscription).send().await?;
        check(got.detached, "the subscription does not show it")?;
        let ended = tokio::time::timeout(SOON, self.open().next()).await.map_err(|_| "receiving went on")?;
        match ended {
            Some(Err(error)) if format!("{error:?}").contains("FailedPrecondition") => Ok(()),
            Some(Err(error)) => Err(format!("receiving ended with {error:?}").into()),
            _ => Err("receiving ended without an error".into()),
        }
    }

    async fn schema(&self) -> Outcome {
        let clients = &self.clients;
        let schema = Schema::new().set_type(Type::Avro).set_definition(SCHEMA);
        let parent = format!("projects/{}", clients.project);
        let made = clients.schemas.create_schema().set_parent(parent).set_schema(schema).set_schema_id("order").send().await?;
        let settings = SchemaSettings::new().set_schema(made.name).set_encoding(Encoding::Json);
        clients.topics.create_topic().set_name(&clients.topic).set_schema_settings(settings).send().await?;
        self.publish(vec![Message::new().set_data(r#"{"id": 1}"#)]).await?;
        match self.publish(vec![Message::new().set_data(r#"{"id": "one"}"#)]).await {
            Ok(_) => Err("a message against the schema was taken".into()),
            Err(error) if format!("{error:?}").contains("InvalidArgument") => Ok(()),
            Err(error) => Err(format!("it was refused with {error:?}").into()),
        }
    }

    async fn update(&self) -> Outcome {
        let clients = &self.clients;
        self.pair(|s| s.set_filter("attributes.color = \"red\"").set_labels([("team", "a")])).await;
        let change = Subscription::new().set_name(&clients.subscription).set_ack_deadline_seconds(42).set_labels([("team", "b")]);
        let mask = FieldMask::default().set_paths(["ack_deadline_seconds", "labels"]);
        clients.subscriptions.update_subscription().set_subscription(change).set_update_mask(mask).send().await?;
        let shown = clients.subscriptions.get_subscription().set_subscription(&clients.subscription).send().await?;
        let right = shown.ack_deadline_seconds == 42 && shown.labels["team"] == "b" && !shown.filter.is_empty();
        check(right, format!("it shows {shown:?}"))?;
        let change = Topic::new().set_name(&clients.topic).set_labels([("team", "c")]);
        let mask = FieldMask::default().set_paths(["labels"]);
        clients.topics.update_topic().set_topic(change).set_update_mask(mask).send().await?;
        let shown = clients.topics.get_topic().set_topic(&clients.topic).send().await?;
        check(shown.labels["team"] == "c", format!("it shows {shown:?}"))
    }

    /// Only the client for schemas has calls for policies; it takes the names of all resources.
    async fn iam(&self) -> Outcome {
        self.pair(|s| s).await;
        let (client, topic) = (&self.clients.schemas, &self.clients.topic);
        let viewer = Binding::new().set_role("roles/pubsub.viewer").set_members(["user:jane@shop.example"]);
        let policy = Policy::new().set_bindings([viewer.clone()]);
        client.set_iam_policy().set_resource(topic).set_policy(policy).send().await?;
        let policy = client.get_iam_policy().set_resource(topic).send().await?;
        check(policy.bindings == [viewer] && !policy.etag.is_empty(), format!("the policy is {policy:?}"))?;
        let wanted = ["pubsub.topics.get", "pubsub.topics.publish"];
        let mut tested = client.test_iam_permissions().set_resource(topic).set_permissions(wanted).send().await?.permissions;
        tested.sort();
        check(tested == wanted, format!("the permissions are {tested:?}"))
    }

    async fn idle(&self) -> Outcome {
        self.pair(|s| s).await;
        let mut stream = self.open();
        let early = tokio::time::timeout(IDLE, stream.next()).await;
        check(early.is_err(), "the stream did not stay idle")?;
        let before = Instant::now();
        let ids = self.publish(numbers(1, "m")).await?;
        same(take(&mut stream, 1).await?, ids)?;
        check(before.elapsed() < Duration::from_secs(15), format!("it took {:?}", before.elapsed()))
    }

    /// The server closes each stream after about 3 s.
    async fn reconnect(&self) -> Outcome {
        self.pair(|s| s).await;
        let mut stream = self.open();
        let receiving = tokio::spawn(async move { take(&mut stream, 24).await });
        let mut ids = Vec::new();
        for _ in 0..24 {
            ids.extend(self.publish(numbers(1, "m")).await?);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        same(receiving.await??, ids)
    }

    /// Publishes, receives and acks while servers are killed, and notes every ack that was confirmed.
    async fn kill(&self) -> Outcome {
        self.pair(|s| s.set_enable_exactly_once_delivery(true)).await;
        let account = Arc::new(Account::default());
        let builder = self.clients.subscriber.subscribe(&self.clients.subscription);
        let stream = builder.set_shutdown_behavior(ShutdownBehavior::NackImmediately).build();
        let receiving = tokio::spawn(receive(stream, account.clone()));
        let publisher = self.clients.publisher().await;
        let publishing: Vec<_> = (0..4)
            .map(|_| {
                let (publisher, account) = (publisher.clone(), account.clone());
                tokio::spawn(async move {
                    // The client repeats what fails meanwhile.
                    while !account.stop.load(Ordering::SeqCst) {
                        let id = publisher.publish(Message::new().set_data("m")).await?;
                        account.confirmed.lock().expect("a lock").insert(id);
                    }
                    Ok::<_, Failure>(())
                })
            })
            .collect();
        for kill in 0..=KILLS {
            let wanted = account.confirmed() + BETWEEN_KILLS;
            wait_until("confirmed publishes", || account.confirmed() >= wanted).await?;
            if kill < KILLS {
                tokio::task::spawn_blocking(|| get("LANDLINE_DISTURB")).await??;
            }
        }
        account.stop.store(true, Ordering::SeqCst);
        for publishing in publishing {
            publishing.await??;
        }
        wait_until("the messages that are missing", || account.missing() == 0 || receiving.is_finished()).await?;
        check(account.missing() == 0, "receiving ended")?;
        let returned = account.returned.load(Ordering::SeqCst);
        check(returned == 0, format!("{returned} messages came after their confirmed ack"))
    }
}

/// What is known of messages while servers are killed.
#[derive(Default)]
struct Account {
    confirmed: Mutex<BTreeSet<String>>,
    received: Mutex<BTreeSet<String>>,
    acked: Mutex<BTreeSet<String>>,
    returned: AtomicUsize,
    stop: AtomicBool,
}

impl Account {
    fn confirmed(&self) -> usize {
        self.confirmed.lock().expect("a lock").len()
    }

    /// Those that never came. Not all acks are confirmed: the answer to one that was carried out may be lost with its server.
    fn missing(&self) -> usize {
        self.confirmed.lock().expect("a lock").difference(&self.received.lock().expect("a lock")).count()
    }
}

async fn receive(mut stream: MessageStream, account: Arc<Account>) -> Outcome {
    while let Some(next) = stream.next().await {
        let (message, handler) = next?;
        account.received.lock().expect("a lock").insert(message.message_id.clone());
        if account.acked.lock().expect("a lock").contains(&message.message_id) {
            account.returned.fetch_add(1, Ordering::SeqCst);
        }
        let account = account.clone();
        tokio::spawn(async move {
            let Handler::ExactlyOnce(handler) = handler else { return };
            if handler.confirmed_ack().await.is_ok() {
                account.acked.lock().expect("a lock").insert(message.message_id);
            }
        });
    }
    Ok(())
}

async fn wait_until(what: &str, condition: impl Fn() -> bool) -> Outcome {
    let until = Instant::now() + OUTAGE;
    while !condition() {
        check(Instant::now() < until, format!("waited in vain for {what}"))?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

async fn key() -> Outcome {
    let (endpoint, project) = (format!("https://{}", std::env::var("LANDLINE_ADDRESS")?), project());
    let admin = Run { clients: Clients::connect(&endpoint, project.clone(), with("admin")?).await };
    admin.pair(|s| s).await;
    let ids = admin.publish(numbers(1, "m")).await?;
    same(take(&mut admin.open(), 1).await?, ids)?;
    let reader = Run { clients: Clients::connect(&endpoint, project.clone(), with("reader")?).await };
    reader.clients.topics.get_topic().set_topic(&reader.clients.topic).send().await?;
    refused(reader.publish(numbers(1, "m")).await, &["PermissionDenied", "pubsub.topics.publish"])?;
    let nobody = Clients::anonymous(&endpoint, project).await;
    refused(nobody.topics.get_topic().set_topic(&nobody.topic).send().await, &["Unauthenticated"])?;
    tokio::task::spawn_blocking(|| get("LANDLINE_DELETE_KEY")).await??;
    let until = Instant::now() + SOON;
    loop {
        let answer = admin.clients.topics.get_topic().set_topic(&admin.clients.topic).send().await;
        if answer.is_err() {
            return refused(answer, &["Unauthenticated"]);
        }
        check(Instant::now() < until, "the deleted key goes on working")?;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The credentials of a key file.
fn with(name: &str) -> Result<Credentials, Failure> {
    let text = std::fs::read_to_string(format!("{}/{name}.json", std::env::var("LANDLINE_KEYS")?))?;
    Ok(service_account::Builder::new(serde_json::from_str(&text)?).build()?)
}

fn refused<T, E: std::fmt::Debug>(answer: Result<T, E>, words: &[&str]) -> Outcome {
    match answer.map_err(|error| format!("{error:?}")) {
        Ok(_) => Err(format!("it was not refused with {words:?}").into()),
        Err(error) => check(words.iter().all(|word| error.contains(word)), format!("instead of {words:?}: {error}")),
    }
}

/// A GET by hand of the URL in a variable: the client's crates bring no HTTP client to use.
fn get(variable: &str) -> Outcome {
    let url = std::env::var(variable)?;
    let (address, path) = url.trim_start_matches("http://").split_once('/').ok_or("no path")?;
    let mut connection = TcpStream::connect(address)?;
    connection.write_all(format!("GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    check(answer.lines().next().is_some_and(|status| status.contains(" 200 ")), answer)
}
