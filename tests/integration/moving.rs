//! A project moves from one server to another without a stop, as the README tells it: import, apply, mirrors in both
//! directions, publishers first, subscribers after them; and on the way both mirrors and the new server are killed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use landline::api::proto::{
    iam::{Binding, Policy, SetIamPolicyRequest},
    pubsub::{
        CommitSchemaRequest, CreateSchemaRequest, DeadLetterPolicy, Encoding, Schema, SchemaSettings, SeekRequest, Topic,
        schema::Type, seek_request::Target,
    },
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use crate::{
    fixture::{
        Api, Backend, Fixture,
        api::{publish_request, pull},
        message,
        message::{Build, Received},
        node::binary,
        ports, timestamp,
        wait::eventually,
    },
    for_one_backend,
    mirroring::{Mirror, drained},
};

for_one_backend!(a_project_moves_without_a_stop);

/// Ordering keys, each with a publisher that waits for each confirmation.
const KEYS: usize = 8;
/// For what comes after a lease has ended, on a busy machine.
const LONG: Duration = Duration::from_secs(90);

/// A server, its admin address, and a client in the project.
struct Place {
    server: Fixture,
    admin: String,
    api: Arc<Api>,
}

impl Place {
    async fn start(backend: Backend) -> Self {
        let admin = format!("127.0.0.1:{}", ports::reserve());
        let server = Fixture::start_with(backend, &[("ADMIN_ADDRESS", &admin)]).await;
        let api = Arc::new(server.api().await);
        Self { server, admin, api }
    }

    /// Waits until a subscription has nothing left.
    async fn drained(&self, subscription: &str) {
        let (status, text) = drained(&self.admin, &self.api.subscription(subscription), "90s").await;
        assert_eq!(status, 200, "{subscription}: {text}");
    }

    fn mirror_to(&self, other: &Self) -> Mirror {
        let (from, to) = (self.server.nodes[0].address, other.server.nodes[0].address);
        let folder = self.server.folder.path();
        Mirror::start(from, to, &self.api.subscription("mirror"), &self.api.topic("orders"), folder)
    }
}

/// The numbers that a publisher of each key has had confirmed, and where it publishes.
struct Publishers {
    place: Mutex<Arc<Api>>,
    confirmed: Vec<AtomicU64>,
    pause: watch::Sender<bool>,
    paused: AtomicU64,
    end: AtomicBool,
}

impl Publishers {
    fn start(api: &Arc<Api>) -> (Arc<Self>, Vec<tokio::task::JoinHandle<()>>) {
        let confirmed = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
        let place = Mutex::new(api.clone());
        let all = Arc::new(Self {
            place,
            confirmed,
            pause: watch::Sender::new(false),
            paused: AtomicU64::new(0),
            end: AtomicBool::new(false),
        });
        let tasks = (0..KEYS).map(|key| tokio::spawn(all.clone().publish(key))).collect();
        (all, tasks)
    }

    async fn publish(self: Arc<Self>, key: usize) {
        let mut number = 0;
        while !self.end.load(Relaxed) {
            if *self.pause.borrow() {
                self.paused.fetch_add(1, Relaxed);
                let mut pause = self.pause.subscribe();
                let _ = pause.wait_for(|paused| !paused).await;
            }
            let api = self.place.lock().clone();
            let kind = if number % 2 == 0 { "even" } else { "odd" };
            let message = message(format!("{key}:{number}")).attribute("kind", kind).key(&format!("key-{key}"));
            // Without a confirmation it is published again: that may make two of it, never none.
            if api.call(publish_request(&api.topic("orders"), [message])).await.is_ok() {
                number += 1;
                self.confirmed[key].store(number, Relaxed);
            } else {
                tokio::task::yield_now().await;
            }
        }
    }

    fn counts(&self) -> Vec<u64> {
        self.confirmed.iter().map(|count| count.load(Relaxed)).collect()
    }

    /// Waits until each key has so many more.
    async fn more(&self, count: u64) {
        let goal: Vec<_> = self.counts().into_iter().map(|n| n + count).collect();
        eventually("messages are published", LONG, async || self.counts().iter().zip(&goal).all(|(n, goal)| n >= goal)).await;
    }
}

/// What subscribers saw, in order.
#[derive(Default)]
struct Seen(Mutex<Vec<(usize, u64)>>);

impl Seen {
    fn add(&self, received: &[Received]) {
        let numbers = received.iter().map(|received| {
            let (key, number) = received.text().split_once(':').unwrap();
            assert_eq!(received.message.ordering_key, format!("key-{key}"));
            (key.parse().unwrap(), number.parse().unwrap())
        });
        self.0.lock().extend(numbers);
    }

    /// True when everything below these numbers was seen.
    fn has(&self, counts: &[u64]) -> bool {
        let seen: BTreeSet<_> = self.0.lock().iter().copied().collect();
        counts.iter().enumerate().all(|(key, count)| (0..*count).all(|number| seen.contains(&(key, number))))
    }

    /// Checks that nothing is missing and that the first sights of a key are in order; answers how many came again.
    fn check(&self, what: &str, counts: &[u64], wanted: impl Fn(u64) -> bool) -> usize {
        let seen = self.0.lock();
        let mut first = BTreeMap::<usize, Vec<u64>>::new();
        let mut known = BTreeSet::new();
        for (key, number) in seen.iter().filter(|one| known.insert(**one)) {
            first.entry(*key).or_default().push(*number);
        }
        for (key, count) in counts.iter().enumerate() {
            let expected: Vec<_> = (0..*count).filter(|number| wanted(*number)).collect();
            assert_eq!(first.get(&key).cloned().unwrap_or_default(), expected, "{what}: key {key}");
        }
        seen.len() - known.len()
    }
}

/// Pulls and acknowledges until it is told to end; failures of a server that was killed are passed over.
fn subscribe(api: Arc<Api>, subscription: &str, seen: Arc<Seen>, end: Arc<AtomicBool>) -> tokio::task::JoinHandle<()> {
    let subscription = api.subscription(subscription);
    tokio::spawn(async move {
        while !end.load(Relaxed) {
            let Ok(answer) = api.call(pull(&subscription, 200)).await else { continue };
            let received: Vec<_> = answer.received_messages.into_iter().map(Received::decode).collect();
            seen.add(&received);
            if !received.is_empty() {
                let _ = api.call(crate::fixture::api::acknowledge(&subscription, &received)).await;
            }
        }
    })
}

/// Everything of the project, made by hand.
async fn build(api: &Api) {
    let definition =
        |field: &str| format!(r#"{{"type":"record","name":"R","fields":[{{"name":"{field}","type":"int","default":0}}]}}"#);
    let schema = |field| Schema { r#type: Type::Avro as i32, definition: definition(field), ..Default::default() };
    let create = CreateSchemaRequest { parent: api.parent(), schema: Some(schema("a")), schema_id: "checked".into() };
    let name = api.ok(create).await.name;
    api.ok(CommitSchemaRequest { name: name.clone(), schema: Some(Schema { name: name.clone(), ..schema("b") }) }).await;
    let settings = SchemaSettings { schema: name, encoding: Encoding::Json as i32, ..Default::default() };
    api.ok(Topic { name: api.topic("checked"), schema_settings: Some(settings), ..Default::default() }).await;
    let dead = api.create_topic("dead").await;
    let topic = api.create_topic("orders").await;
    api.create_subscription_with("billing", &topic, |s| {
        s.enable_message_ordering = true;
        s.ack_deadline_seconds = 10;
        s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 50 });
    })
    .await;
    api.create_subscription_with("even", &topic, |s| {
        s.enable_message_ordering = true;
        s.filter = "attributes.kind = \"even\"".into();
    })
    .await;
    let members = vec!["serviceAccount:shop@example.com".to_owned()];
    let binding = Binding { role: "roles/pubsub.publisher".into(), members, ..Default::default() };
    let policy = Policy { bindings: vec![binding], ..Default::default() };
    api.ok(SetIamPolicyRequest { resource: topic, policy: Some(policy), ..Default::default() }).await;
}

async fn get(place: &Place, path: &str) -> Value {
    let answer = reqwest::get(format!("http://{}/v1/{path}", place.server.nodes[0].address)).await.unwrap();
    assert!(answer.status().is_success(), "{path}: {answer:?}");
    serde_json::from_str(&answer.text().await.unwrap()).unwrap()
}

/// Import and apply: what is at one place is then at the other.
async fn take_over(old: &Place, new: &Place) {
    let folder = old.server.folder.path();
    let project = old.api.parent();
    for (list, query) in [("topics", ""), ("subscriptions", ""), ("schemas", "?view=FULL")] {
        let value = get(old, &format!("{project}/{list}{query}")).await;
        fs::write(folder.join(format!("{list}.json")), value[list].to_string()).unwrap();
    }
    let revisions = get(old, &format!("{project}/schemas/checked:listRevisions?view=FULL")).await;
    fs::write(folder.join("revisions.json"), revisions["schemas"].to_string()).unwrap();
    let policy = get(old, &format!("{}:getIamPolicy", old.api.topic("orders"))).await;
    fs::write(folder.join("policy.json"), policy.to_string()).unwrap();
    let run = |arguments: &[&str]| {
        let output = Command::new(binary()).args(arguments).current_dir(folder).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    };
    let of_topic = format!("{}=policy.json", old.api.topic("orders"));
    let mut import = vec!["import", "--topics", "topics.json", "--subscriptions", "subscriptions.json"];
    import.extend(["--schemas", "schemas.json", "--schemas", "revisions.json", "--policy", &of_topic]);
    let output = run(&import);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "left out: messages and snapshots: they are not in these lists\n");
    fs::write(folder.join("resources.json"), output.stdout).unwrap();
    let endpoint = new.server.nodes[0].address.to_string();
    run(&["apply", "-f", "resources.json", "--endpoint", &endpoint]);
    let again = run(&["apply", "-f", "resources.json", "--endpoint", &endpoint, "--dry-run"]);
    assert!(String::from_utf8_lossy(&again.stdout).contains("; 7 already as in the file"));
    for list in ["topics", "subscriptions"] {
        assert_eq!(get(old, &format!("{project}/{list}")).await, get(new, &format!("{project}/{list}")).await);
    }
}

async fn a_project_moves_without_a_stop(backend: Backend) {
    let (old, mut new) = (Place::start(backend).await, Place::start(backend).await);
    build(&old.api).await;
    take_over(&old, &new).await;
    for place in [&old, &new] {
        let topic = place.api.topic("orders");
        place.api.create_subscription_with("mirror", &topic, |s| s.enable_message_ordering = true).await;
    }
    let mut there = old.mirror_to(&new);
    let mut back = new.mirror_to(&old);
    let (publishers, tasks) = Publishers::start(&old.api);
    let (billing, stop_old) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
    let on_old = subscribe(old.api.clone(), "billing", billing.clone(), stop_old.clone());

    publishers.more(60).await;
    there.kill();
    publishers.more(20).await;
    there = old.mirror_to(&new);
    publishers.more(40).await;

    // Publishers move. Those with ordering keys wait until what they published is at the new place.
    publishers.pause.send_replace(true);
    eventually("publishers pause", LONG, async || publishers.paused.load(Relaxed) == KEYS as u64).await;
    old.drained("mirror").await;
    *publishers.place.lock() = new.api.clone();
    publishers.pause.send_replace(false);
    publishers.more(40).await;

    back.kill();
    new.server.crash_and_restart();
    publishers.more(20).await;
    back = new.mirror_to(&old);
    publishers.more(40).await;

    // Subscribers move: from a moment on, after which the old place has seen all that was published before it.
    let (moment, before) = (timestamp(0), publishers.counts());
    eventually("subscribers have seen what was there", LONG, async || billing.has(&before)).await;
    stop_old.store(true, Relaxed);
    on_old.await.unwrap();
    let seek = SeekRequest { subscription: new.api.subscription("billing"), target: Some(Target::Time(moment)) };
    new.api.ok(seek).await;
    let (stop_new, even) = (Arc::new(AtomicBool::new(false)), Arc::new(Seen::default()));
    let on_new = subscribe(new.api.clone(), "billing", billing.clone(), stop_new.clone());
    let on_even = subscribe(new.api.clone(), "even", even.clone(), stop_new.clone());
    publishers.more(40).await;

    publishers.end.store(true, Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let counts = publishers.counts();
    for (place, subscription) in [(&new, "mirror"), (&old, "mirror"), (&new, "billing"), (&new, "even")] {
        place.drained(subscription).await;
    }
    stop_new.store(true, Relaxed);
    on_new.await.unwrap();
    on_even.await.unwrap();
    for mirror in [there, back] {
        let (status, log) = mirror.stop();
        assert!(status.success(), "{log}");
    }
    let total: u64 = counts.iter().sum();
    let again = billing.check("billing, at the old place and then the new", &counts, |_| true);
    let even = even.check("even, at the new place alone", &counts, |number| number % 2 == 0);
    println!("{total} messages; {again} came again to billing, {even} to even");
    assert!(again < 2 * total as usize && even < total as usize, "far too many duplicates: {again}, {even}");
}
