//! `landline mirror`: messages on their way between servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use landline::api::proto::pubsub::{CreateSchemaRequest, Encoding, PubsubMessage, Schema, SchemaSettings, Topic, schema::Type};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    fixture::{
        Backend, Fixture, OWN_ADDRESS, message,
        message::Build,
        node::binary,
        wait::{SOON, eventually},
    },
    for_every_backend, for_one_backend,
};

for_every_backend!(
    messages_are_copied_whole_and_in_order_and_a_stop_leaves_nothing_behind,
    a_subscription_is_drained_when_nothing_waits_or_is_leased,
);
for_one_backend!(
    two_mirrors_in_opposite_directions_make_no_circle,
    what_the_destination_refuses_is_given_back_and_holds_up_only_its_key,
    a_mirror_outlives_its_destination,
    a_mirror_of_what_is_not_there_says_so,
    a_project_is_emptied_only_when_that_is_said,
);

/// A running mirror.
pub struct Mirror {
    child: Child,
    log: PathBuf,
}

impl Mirror {
    pub fn start(from: SocketAddr, to: SocketAddr, subscription: &str, topic: &str, folder: &Path) -> Self {
        Self::start_with(&from.to_string(), &to.to_string(), subscription, topic, folder, &[])
    }

    pub fn start_with(from: &str, to: &str, subscription: &str, topic: &str, folder: &Path, more: &[&str]) -> Self {
        let log = folder.join(format!("mirror-{}.log", subscription.replace('/', "-")));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let child = Command::new(binary())
            .args(["mirror", "--from", from, "--to", to])
            .args(["--subscription", subscription, "--topic", topic])
            .args(more)
            .args(["--ack-deadline-seconds", "10", "--report-seconds", "1"])
            .stdin(Stdio::null())
            .stderr(file)
            .spawn()
            .unwrap();
        Self { child, log }
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// SIGTERM, and the end.
    pub fn stop(mut self) -> (ExitStatus, String) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), Signal::TERM).unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.log());
            }
            assert!(Instant::now() < until, "the mirror does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {}:\n{}", self.log.display(), self.log());
        }
    }
}

/// What the admin address says of a subscription.
pub async fn drained(admin: &str, subscription: &str, timeout: &str) -> (u16, String) {
    let url = format!("http://{admin}/drained?subscription={subscription}&timeout={timeout}");
    let answer = reqwest::get(url).await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

/// A count in the last line of a mirror's report.
fn count(log: &str, field: &str) -> u64 {
    let last = log.lines().rfind(|line| line.contains(" copied=")).unwrap_or_default();
    let value = last.split_whitespace().find_map(|word| word.strip_prefix(&format!("{field}=")));
    value.and_then(|value| value.parse().ok()).unwrap_or_default()
}

async fn messages_are_copied_whole_and_in_order_and_a_stop_leaves_nothing_behind(backend: Backend) {
    let (source, target) = (Fixture::start(backend).await, Fixture::start(Backend::Embedded).await);
    let (here, there) = (source.api().await, target.api().await);
    let (from, subscription) = here.pair_with(|s| s.enable_message_ordering = true).await;
    let (to, arrived) = there.pair_with(|s| s.enable_message_ordering = true).await;
    let mut sent = Vec::new();
    for n in 0..300 {
        let plain = message(format!("{n}")).attribute("n", &n.to_string());
        sent.push(if n % 3 == 0 { plain } else { plain.key(&format!("key-{}", n % 7)) });
    }
    sent.push(message("").attribute("only", "attributes"));
    sent.push(message(vec![0xff; 3 << 20]));
    for chunk in sent.chunks(100) {
        here.publish(&from, chunk.to_vec()).await;
    }
    let mirror = Mirror::start(source.nodes[0].address, target.nodes[0].address, &subscription, &to, target.folder.path());
    let mut received = Vec::new();
    while received.len() < sent.len() {
        let some = there.pull(&arrived, 1).await;
        there.ack(&arrived, &some).await;
        received.extend(some);
    }
    let by_key = |messages: &mut dyn Iterator<Item = PubsubMessage>| {
        let mut keys = BTreeMap::<String, Vec<_>>::new();
        for message in messages {
            let mut attributes = message.attributes;
            if let Some(marker) = attributes.remove("landline-mirror") {
                assert_eq!(marker, to);
            }
            keys.entry(message.ordering_key).or_default().push((message.data, attributes));
        }
        // Without a key there is no order.
        keys.get_mut("").unwrap().sort();
        keys
    };
    let copies = by_key(&mut received.into_iter().map(|received| received.message));
    assert!(copies == by_key(&mut sent.into_iter()), "all there, each key in order");
    let (status, log) = mirror.stop();
    assert!(here.pull_now(&subscription, 1).await.is_empty(), "nothing was given back");
    assert!(status.success() && count(&log, "copied") == 302 && count(&log, "waiting") == 0, "{log}");
}

async fn two_mirrors_in_opposite_directions_make_no_circle(backend: Backend) {
    let (one, two) = (Fixture::start(backend).await, Fixture::start(backend).await);
    // The same names at both ends, as after a move without another name.
    let (here, there) = (one.api().await, two.api().await);
    let mut mirrors = Vec::new();
    for (api, from, to) in [(&here, &one, &two), (&there, &two, &one)] {
        let topic = api.create_topic("orders").await;
        let subscription = api.create_subscription("mirror", &topic).await;
        api.create_subscription("all", &topic).await;
        mirrors.push((from.nodes[0].address, to.nodes[0].address, subscription, topic));
    }
    let folder = [one.folder.path(), two.folder.path()];
    let mirrors: Vec<_> =
        mirrors.iter().zip(folder).map(|((from, to, s, t), folder)| Mirror::start(*from, *to, s, t, folder)).collect();
    here.publish_texts(&here.topic("orders"), &["a", "b"]).await;
    there.publish_texts(&there.topic("orders"), &["c"]).await;
    for api in [&here, &there] {
        let received = api.pull(&api.subscription("all"), 3).await;
        let texts: BTreeSet<_> = received.iter().map(|received| received.text()).collect();
        assert_eq!(texts, BTreeSet::from(["a", "b", "c"]));
        api.ack(&api.subscription("all"), &received).await;
    }
    let logs: Vec<_> = mirrors
        .into_iter()
        .map(|mirror| {
            let until = Instant::now() + SOON;
            while count(&mirror.log(), "copied") + count(&mirror.log(), "skipped") < 3 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(20));
            }
            mirror.stop().1
        })
        .collect();
    assert_eq!(logs.iter().map(|log| (count(log, "copied"), count(log, "skipped"))).collect::<Vec<_>>(), [(2, 1), (1, 2)]);
    for api in [&here, &there] {
        assert!(api.pull_now(&api.subscription("all"), 1).await.is_empty());
    }
}

async fn what_the_destination_refuses_is_given_back_and_holds_up_only_its_key(backend: Backend) {
    let (source, target) = (Fixture::start(backend).await, Fixture::start(backend).await);
    let (here, there) = (source.api().await, target.api().await);
    let (from, subscription) = here.pair_with(|s| s.enable_message_ordering = true).await;
    let definition = r#"{"type":"record","name":"R","fields":[{"name":"n","type":"int"}]}"#.to_owned();
    let schema = Schema { r#type: Type::Avro as i32, definition, ..Default::default() };
    there.ok(CreateSchemaRequest { parent: there.parent(), schema: Some(schema), schema_id: "checked".into() }).await;
    let settings = SchemaSettings { schema: there.schema("checked"), encoding: Encoding::Json as i32, ..Default::default() };
    let to = there.ok(Topic { name: there.topic("orders"), schema_settings: Some(settings), ..Default::default() }).await.name;
    let arrived = there.create_subscription("billing", &to).await;
    let good = |n: u32| message(format!("{{\"n\": {n}}}"));
    let sent = [good(1), message("bad"), good(2), good(3).key("a"), message("bad").key("a"), good(4).key("a"), good(5).key("b")];
    here.publish(&from, sent.clone()).await;
    let mirror = Mirror::start(source.nodes[0].address, target.nodes[0].address, &subscription, &to, target.folder.path());
    let received = there.pull(&arrived, 4).await;
    let keys: BTreeSet<_> = received.iter().map(|r| (r.text().to_owned(), r.message.ordering_key.clone())).collect();
    let expected = [("1", ""), ("2", ""), ("3", "a"), ("5", "b")];
    assert_eq!(keys, BTreeSet::from(expected.map(|(n, key)| (format!("{{\"n\": {n}}}"), key.to_owned()))));
    eventually("the refusal is told", SOON, async || mirror.log().contains("is refused and given back: InvalidArgument")).await;
    let (status, log) = mirror.stop();
    assert!(status.success(), "{log}");
    let mut back = BTreeSet::new();
    while back.len() < 3 {
        let received = here.take(&subscription).await;
        back.insert((received.text().to_owned(), received.message.ordering_key));
    }
    let expected = [("bad", ""), ("bad", "a"), ("{\"n\": 4}", "a")];
    assert_eq!(back, BTreeSet::from(expected.map(|(text, key)| (text.to_owned(), key.to_owned()))));
}

async fn a_mirror_outlives_its_destination(backend: Backend) {
    let (source, mut target) = (Fixture::start(backend).await, Fixture::start(backend).await);
    let (here, there) = (source.api().await, target.api().await);
    let (from, subscription) = here.pair().await;
    let (to, arrived) = there.pair().await;
    let mirror = Mirror::start(source.nodes[0].address, target.nodes[0].address, &subscription, &to, target.folder.path());
    here.publish_texts(&from, &["before"]).await;
    assert_eq!(there.take(&arrived).await.text(), "before");
    target.nodes[0].kill();
    here.publish_texts(&from, &["meanwhile"]).await;
    eventually("the mirror notices", SOON, async || mirror.log().contains("Publish: ")).await;
    target.nodes[0].restart();
    assert_eq!(there.take(&arrived).await.text(), "meanwhile");
    let (status, log) = mirror.stop();
    assert!(status.success() && count(&log, "retries") > 0, "{log}");
    assert!(here.pull_now(&subscription, 1).await.is_empty());
}

async fn a_mirror_of_what_is_not_there_says_so(backend: Backend) {
    let server = Fixture::start(backend).await;
    let api = server.api().await;
    let (topic, subscription) = api.pair().await;
    let address = server.nodes[0].address.to_string();
    for (subscription, topic, told) in [
        (&subscription, &api.topic("none"), format!("landline: mirror: {}: NotFound", api.topic("none"))),
        (&api.subscription("none"), &topic, format!("landline: mirror: {}: NotFound", api.subscription("none"))),
    ] {
        let output = Command::new(binary())
            .args(["mirror", "--from", &address, "--to", &address, "--subscription", subscription, "--topic", topic])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && error.contains(&told), "{error}");
    }
}

async fn a_subscription_is_drained_when_nothing_waits_or_is_leased(backend: Backend) {
    let server = Fixture::start_with(backend, &[("ADMIN_ADDRESS", OWN_ADDRESS)]).await;
    let api = server.api().await;
    let (topic, subscription) = api.pair().await;
    let admin = server.admins[0].clone();
    let (status, text) = drained(&admin, &subscription, "0s").await;
    assert_eq!((status, text.contains("\"drained\":true")), (200, true), "{text}");
    assert_eq!(drained(&admin, &api.subscription("none"), "0s").await.0, 404);
    assert_eq!(drained(&admin, "billing", "0s").await.0, 400);
    // With two nodes each is asked, whichever took the publish or the ack.
    for admin in server.admins.iter().cycle().take(20) {
        api.publish_texts(&topic, &["x"]).await;
        let (status, text) = drained(admin, &subscription, "0s").await;
        assert_eq!(status, 504, "a confirmed publish counts at once: {text}");
        let received = api.pull(&subscription, 1).await;
        let (status, text) = drained(admin, &subscription, "0s").await;
        assert_eq!((status, text.contains("\"leased\":1")), (504, true), "{text}");
        let waiting = tokio::spawn({
            let (admin, subscription) = (admin.clone(), subscription.clone());
            async move { drained(&admin, &subscription, "20s").await.0 }
        });
        api.ack(&subscription, &received).await;
        assert_eq!(waiting.await.unwrap(), 200);
    }
    let short = subscription.replace("projects/", "").replace("subscriptions/", "");
    let wait = |timeout: &str| {
        let output = Command::new(binary()).args(["wait", &short, "--admin", &admin, "--timeout-seconds", timeout]).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(wait("20"), (Some(0), String::new()));
    api.publish_texts(&topic, &["x"]).await;
    let (code, told) = wait("0");
    assert!(code == Some(1) && told.contains("not drained in time"), "{told}");
}

async fn a_project_is_emptied_only_when_that_is_said(backend: Backend) {
    let server = Fixture::start(backend).await;
    let (api, other) = (server.api().await, server.api().await);
    let (topic, subscription) = api.pair().await;
    let (kept, _) = other.pair().await;
    let address = server.nodes[0].address.to_string();
    let reset = |more: &[&str]| {
        let output = Command::new(binary()).args(["reset", &api.project, "--endpoint", &address]).args(more).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let listed = format!("- {subscription}\n- {topic}\n");
    assert_eq!(reset(&[]), (Some(2), listed.clone()));
    api.get_topic(&topic).await.unwrap();
    assert_eq!(reset(&["--yes"]), (Some(0), listed));
    assert!(api.get_topic(&topic).await.is_err() && api.get_subscription(&subscription).await.is_err());
    assert_eq!(reset(&["--yes"]), (Some(0), String::new()));
    other.get_topic(&kept).await.unwrap();
}
