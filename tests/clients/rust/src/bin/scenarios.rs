//! The scenarios of ../scenarios.txt with Google's Rust client.

use std::{
    collections::HashMap,
    io::{Read, Write},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use google_cloud_auth::credentials::anonymous;
use google_cloud_pubsub::{
    client::SchemaService,
    model::{DeadLetterPolicy, Encoding, Message, Schema, SchemaSettings, Subscription, schema::Type},
    subscriber::{MessageStream, ShutdownBehavior, handler::Handler},
};
use landline_rust_client_tests::{Clients, SOON, text};

const SCHEMA: &str = r#"{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}"#;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Outcome = Result<(), Failure>;

#[tokio::main]
async fn main() {
    let endpoint = format!("http://{}", std::env::var("PUBSUB_EMULATOR_HOST").expect("PUBSUB_EMULATOR_HOST"));
    for name in std::env::args().skip(1) {
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_micros();
        let run = Run { clients: Clients::connect(&endpoint, format!("project-{started}")).await, endpoint: endpoint.clone() };
        match tokio::time::timeout(3 * SOON, run.scenario(&name)).await {
            Ok(Some(Ok(()))) => println!("ok {name}"),
            Ok(Some(Err(error))) => println!("failed {name} {}", format!("{error:?}").replace('\n', " ")),
            Ok(None) => println!("absent {name}"),
            Err(_) => println!("failed {name} it did not end"),
        }
    }
}

struct Run {
    clients: Clients,
    endpoint: String,
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
            "large" => self.large().await,
            "flow_control" => self.flow_control().await,
            "nack" => self.nack().await,
            "extend" => self.extend().await,
            "exactly_once" => self.exactly_once().await,
            "lost_lease" => self.lost_lease().await,
            "dead_letter" => self.dead_letter().await,
            "filter" => self.filter().await,
            "seek" => self.rewound(false).await,
            "snapshot" => self.rewound(true).await,
            "detach" => self.detach().await,
            "schema" => self.schema().await,
            "restart" => self.restart().await,
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
            check(text(&message) == number.to_string(), format!("{} instead of {number}", text(&message)))?;
            *number += 1;
        }
        Ok(())
    }

    async fn large(&self) -> Outcome {
        self.pair(|s| s).await;
        let data = "x".repeat(9_000_000);
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
        let credentials = anonymous::Builder::new().build();
        let schemas = SchemaService::builder().with_endpoint(&self.endpoint).with_credentials(credentials).build().await?;
        let schema = Schema::new().set_type(Type::Avro).set_definition(SCHEMA);
        let parent = format!("projects/{}", clients.project);
        let made = schemas.create_schema().set_parent(parent).set_schema(schema).set_schema_id("order").send().await?;
        let settings = SchemaSettings::new().set_schema(made.name).set_encoding(Encoding::Json);
        clients.topics.create_topic().set_name(&clients.topic).set_schema_settings(settings).send().await?;
        self.publish(vec![Message::new().set_data(r#"{"id": 1}"#)]).await?;
        match self.publish(vec![Message::new().set_data(r#"{"id": "one"}"#)]).await {
            Ok(_) => Err("a message against the schema was taken".into()),
            Err(error) if format!("{error:?}").contains("InvalidArgument") => Ok(()),
            Err(error) => Err(format!("it was refused with {error:?}").into()),
        }
    }

    async fn restart(&self) -> Outcome {
        self.pair(|s| s.set_enable_exactly_once_delivery(true)).await;
        let before = self.publish(numbers(50, "before-")).await?;
        same(self.confirmed(50).await?, before)?;
        let mut expected = self.publish(numbers(50, "kept-")).await?;
        tokio::task::spawn_blocking(restart_server).await??;
        expected.extend(self.publish(numbers(50, "after-")).await?);
        same(self.confirmed(100).await?, expected)
    }
}

/// A GET by hand of the URL that restarts the server: the client's crates bring no HTTP client to use.
fn restart_server() -> Outcome {
    let url = std::env::var("LANDLINE_RESTART")?;
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut connection = TcpStream::connect(address)?;
    connection.write_all(format!("GET / HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer)?;
    check(answer.lines().next().is_some_and(|status| status.contains(" 200 ")), answer)
}
