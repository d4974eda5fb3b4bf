//! The console on the admin address.

use std::{
    collections::BTreeSet,
    fs,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use futures::{StreamExt, stream};
use landline::api::proto::pubsub::{DeadLetterPolicy, PubsubMessage, RetryPolicy, Subscription};
use reqwest::{Response, StatusCode, redirect::Policy};
use tempfile::TempDir;

use crate::{
    fixture::{Api, Backend, Fixture, OWN_ADDRESS, eventually, message, message::Build, seconds, wait::SOON},
    for_durable_backends, for_every_backend, for_one_backend, for_two_nodes,
};

for_every_backend!(
    looking_at_messages_leases_nothing,
    pages_of_messages_show_each_one_once,
    a_message_says_where_it_stands,
    dead_letters_go_back_to_where_they_came_from,
    a_dead_letter_without_a_way_back_stays,
    forms_change_what_they_say,
);
for_durable_backends!(a_replay_that_is_killed_loses_nothing);
for_two_nodes!(a_console_goes_on_when_another_node_is_gone);
for_one_backend!(
    the_page_shows_what_there_is,
    without_a_password_nothing_is_changed_and_no_message_shown,
    strangers_are_asked_to_sign_in,
    a_form_needs_the_token_of_its_session,
    other_names_of_the_address_are_refused,
    wrong_passwords_make_the_address_wait,
    another_password_ends_the_sessions,
    nothing_in_a_message_becomes_markup,
    ten_thousand_subscriptions_stay_usable,
    changes_are_noted_in_the_log,
);

const PASSWORD: &str = "correct horse battery staple";

/// Servers with consoles, and who speaks to them.
struct Console {
    fixture: Fixture,
    http: reqwest::Client,
    /// That of the first server, for what only it knows, such as sessions.
    url: String,
    /// Those of all; scripts ask them in turn.
    urls: Vec<String>,
    turn: AtomicUsize,
    password: bool,
    /// The file of the password is read again and again.
    _secrets: TempDir,
}

impl Console {
    async fn start(backend: Backend) -> Self {
        Self::start_with(backend, true, &[]).await
    }

    async fn start_with(backend: Backend, password: bool, more: &[(&str, &str)]) -> Self {
        let secrets = tempfile::tempdir().unwrap();
        let file = secrets.path().join("password");
        fs::write(&file, format!("{PASSWORD}\n")).unwrap();
        let mut settings = vec![("ADMIN_ADDRESS", OWN_ADDRESS)];
        let file = file.to_str().unwrap();
        if password {
            settings.push(("ADMIN_PASSWORD_FILE", file));
        }
        settings.extend(more);
        let fixture = Fixture::start_with(backend, &settings).await;
        let http = reqwest::Client::builder().redirect(Policy::none()).build().unwrap();
        let urls: Vec<_> = fixture.admins.iter().map(|address| format!("http://{address}")).collect();
        Self { fixture, http, url: urls[0].clone(), urls, turn: AtomicUsize::new(0), password, _secrets: secrets }
    }

    /// The console whose turn it is.
    fn next(&self) -> &str {
        &self.urls[self.turn.fetch_add(1, Ordering::Relaxed) % self.urls.len()]
    }

    /// As a script with the password, if there is one.
    async fn get(&self, path: &str) -> Response {
        let mut request = self.http.get(format!("{}{path}", self.next()));
        if self.password {
            request = request.bearer_auth(PASSWORD);
        }
        request.send().await.unwrap()
    }

    async fn page(&self, path: &str) -> String {
        let answer = self.get(path).await;
        let (status, text) = (answer.status(), answer.text().await.unwrap());
        assert_eq!(status, StatusCode::OK, "{path}: {text}");
        text
    }

    async fn post(&self, path: &str, form: &[(&str, &str)]) -> (StatusCode, String) {
        let request = self.http.post(format!("{}{path}", self.next())).bearer_auth(PASSWORD);
        let answer =
            request.header("content-type", "application/x-www-form-urlencoded").body(encoded(form)).send().await.unwrap();
        (answer.status(), answer.text().await.unwrap())
    }

    /// Signs in; answers the cookie and the token of its forms.
    async fn sign_in(&self) -> (String, String) {
        let form = encoded(&[("name", "anna"), ("password", PASSWORD), ("next", "/topics")]);
        let answer = self.http.post(format!("{}/login", self.url)).body(form).send().await.unwrap();
        assert_eq!((answer.status(), &answer.headers()["location"]), (StatusCode::SEE_OTHER, &"/topics".parse().unwrap()));
        let cookie = answer.headers()["set-cookie"].to_str().unwrap();
        assert!(cookie.contains("; HttpOnly; SameSite=Strict") && !cookie.contains("Secure"), "{cookie}");
        let cookie = cookie.split(';').next().unwrap().to_owned();
        let html = self.http.get(&self.url).header("cookie", &cookie).send().await.unwrap().text().await.unwrap();
        let csrf = html.split("name=\"csrf\" value=\"").nth(1).unwrap_or_else(|| panic!("{html}"));
        (cookie, csrf.split('"').next().unwrap().to_owned())
    }

    /// All message data of a subscription, by its pages.
    async fn peeked(&self, subscription: &str) -> Vec<String> {
        let (mut found, mut path) = (Vec::new(), Some(format!("{}/messages?as=text", path(subscription))));
        while let Some(next) = path {
            let html = self.page(&next).await;
            let data = html.split("<pre class=\"text\">").skip(1).map(|rest| rest.split("</pre>").next().unwrap().to_owned());
            found.extend(data);
            let link = html
                .split("<a href=\"")
                .skip(1)
                .find(|rest| rest.contains("rel=\"next\">") && rest.find("rel=\"next\"") < rest.find('>'));
            path = link.map(|rest| rest.split('"').next().unwrap().replace("&amp;", "&").replace("&#38;", "&"));
        }
        found
    }
}

fn encoded(form: &[(&str, &str)]) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(form).finish()
}

/// The path of a resource's page.
fn path(name: &str) -> String {
    let parts: Vec<_> = name.split('/').collect();
    format!("/{}/{}/{}", parts[2], parts[1], parts[3])
}

fn texts(prefix: &str, count: usize) -> Vec<PubsubMessage> {
    (0..count).map(|n| message(format!("{prefix}{n:04}"))).collect()
}

/// A dead letter as the server makes it of a message that this subscription gave up.
fn dead(text: &str, source: &str) -> PubsubMessage {
    let (project, id) = source.strip_prefix("projects/").and_then(|name| name.split_once("/subscriptions/")).unwrap();
    let mut letter = message(text);
    for (key, value) in [
        ("kept", "yes"),
        ("CloudPubSubDeadLetterSourceDeliveryCount", "5"),
        ("CloudPubSubDeadLetterSourceSubscription", id),
        ("CloudPubSubDeadLetterSourceSubscriptionProject", project),
    ] {
        letter.attributes.insert(key.into(), value.into());
    }
    letter
}

async fn the_page_shows_what_there_is(backend: Backend) {
    let console = Console::start_with(backend, false, &[]).await;
    let answer = console.get("/").await;
    let policy = answer.headers()["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(answer.headers()["content-type"], "text/html; charset=utf-8");
    assert!(console.page("/topics").await.contains("There are none."));
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    api.publish(&topic, ["a", "b"].map(message)).await;
    api.pull(&subscription, 1).await;
    let overview = console.page("/").await;
    assert!(overview.contains(">serving<"), "{overview}");
    let list = console.page("/subscriptions").await;
    assert!(
        list.contains(&format!("<a href=\"{}\">billing</a></td><td>pull</td><td class=\"n\">2</td>", path(&subscription))),
        "{list}"
    );
    assert!(
        console.page("/topics").await.contains(&format!("<a href=\"{}\">orders</a></td><td class=\"n\">2</td>", path(&topic)))
    );
    let page = console.page(&path(&topic)).await;
    assert!(page.contains("billing") && !page.contains("<form"), "{page}");
    let page = console.page(&path(&subscription)).await;
    assert!(page.contains("<b>2</b><span>undelivered</span>") && page.contains("<dt>Sent</dt><dd>1</dd>"), "{page}");
    assert!(!page.contains("<form"), "{page}");
    for asset in ["htmx.js", "style.css", "icon.svg"] {
        let link = format!("/assets/{}/{asset}", env!("CARGO_PKG_VERSION"));
        assert!(asset == "htmx.js" || page.contains(&link), "{page}");
        assert_eq!(console.get(&link).await.status(), StatusCode::OK, "{link}");
    }
    for gone in ["/nothing", "/topics/p/none-such", "/assets/0/htmx.js", "/topics/a/b/c"] {
        assert_eq!(console.get(gone).await.status(), StatusCode::NOT_FOUND, "{gone}");
    }
}

async fn without_a_password_nothing_is_changed_and_no_message_shown(backend: Backend) {
    let console = Console::start_with(backend, false, &[]).await;
    let api = console.fixture.api().await;
    let set = |s: &mut Subscription| {
        s.push_config = Some(landline::api::proto::pubsub::PushConfig {
            push_endpoint: "http://127.0.0.1:9/push?token=secret".into(),
            ..Default::default()
        });
    };
    let (topic, subscription) = api.pair_with(set).await;
    api.publish_texts(&topic, &["private"]).await;
    assert_eq!(console.get(&format!("{}/messages", path(&subscription))).await.status(), StatusCode::FORBIDDEN);
    let page = console.page(&path(&subscription)).await;
    assert!(page.contains("127.0.0.1:9/push?") && !page.contains("secret"), "{page}");
    for change in ["purge", "seek", "replay", "snapshot"] {
        let (status, text) = console.post(&format!("{}/{change}", path(&subscription)), &[("sure", "yes")]).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{change}: {text}");
    }
    assert_eq!(console.post(&format!("{}/publish", path(&topic)), &[("data", "x")]).await.0, StatusCode::FORBIDDEN);
    assert_eq!(console.get("/login").await.status(), StatusCode::SEE_OTHER);
}

async fn strangers_are_asked_to_sign_in(backend: Backend) {
    let console = Console::start(backend).await;
    let get = |path: &str| console.http.get(format!("{}{path}", console.url));
    for open in ["/metrics", "/livez", "/readyz"] {
        assert_eq!(get(open).send().await.unwrap().status(), StatusCode::OK, "{open}");
    }
    for closed in ["/", "/topics?prefix=a", "/subscriptions/p/s/messages", "/nothing"] {
        assert_eq!(get(closed).send().await.unwrap().status(), StatusCode::UNAUTHORIZED, "{closed}");
        let answer = get(closed).header("accept", "text/html,*/*").send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::SEE_OTHER, "{closed}");
        assert!(answer.headers()["location"].to_str().unwrap().starts_with("/login?next=%2F"));
    }
    let post = console.http.post(format!("{}/topics/p/t/publish", console.url)).header("accept", "text/html");
    assert_eq!(post.body("data=x").send().await.unwrap().status(), StatusCode::UNAUTHORIZED);
    let form = get("/login?next=%2F%2Fevil.example").send().await.unwrap().text().await.unwrap();
    assert!(form.contains("type=\"password\"") && !form.contains("evil"), "{form}");
    let wrong = console.http.post(format!("{}/login", console.url)).body("password=wrong&next=%2F").send().await.unwrap();
    assert_eq!(wrong.status(), StatusCode::UNAUTHORIZED);
    assert!(wrong.headers().get("set-cookie").is_none());
    assert_eq!(get("/").header("cookie", "landline_console=made-up").send().await.unwrap().status(), StatusCode::UNAUTHORIZED);
}

async fn a_form_needs_the_token_of_its_session(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let (cookie, csrf) = console.sign_in().await;
    let (_, other) = console.sign_in().await;
    let target = format!("{}{}/publish", console.url, path(&topic));
    let post = async |csrf: &str, origin: Option<&str>| {
        let mut request = console.http.post(&target).header("cookie", &cookie);
        if let Some(origin) = origin {
            request = request.header("origin", origin);
        }
        request.body(encoded(&[("data", "from a form"), ("csrf", csrf)])).send().await.unwrap()
    };
    for (token, origin) in
        [("", None), (other.as_str(), None), (csrf.as_str(), Some("http://evil.example")), (&csrf, Some("null"))]
    {
        let answer = post(token, origin).await;
        assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{token} {origin:?}");
    }
    let answer = post(&csrf, Some(&console.url)).await;
    assert_eq!((answer.status(), answer.headers()["location"].to_str().unwrap()), (StatusCode::SEE_OTHER, path(&topic).as_str()));
    let page = async || {
        let page = console.http.get(format!("{}{}", console.url, path(&topic))).header("cookie", &cookie);
        page.send().await.unwrap().text().await.unwrap()
    };
    assert!(page().await.contains("Published message "));
    assert!(!page().await.contains("Published message "), "it is told once");
    assert_eq!(api.take(&subscription).await.text(), "from a form");

    let leave = console.http.post(format!("{}/logout", console.url)).header("cookie", &cookie).body(encoded(&[("csrf", &csrf)]));
    let answer = leave.send().await.unwrap();
    assert!(answer.headers()["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
    let after = console.http.get(&console.url).header("cookie", &cookie).send().await.unwrap();
    assert_eq!(after.status(), StatusCode::UNAUTHORIZED);
}

async fn other_names_of_the_address_are_refused(backend: Backend) {
    let console = Console::start_with(backend, true, &[("ADMIN_HOSTS", "console.example")]).await;
    let get = async |host: &str, path: &str| {
        let request = console.http.get(format!("{}{path}", console.url)).bearer_auth(PASSWORD).header("host", host);
        request.send().await.unwrap().status()
    };
    assert_eq!(get("evil.example:9090", "/").await, StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(get("evil.example", "/login").await, StatusCode::MISDIRECTED_REQUEST);
    assert_eq!(get("evil.example", "/metrics").await, StatusCode::OK);
    assert_eq!(get("Console.example:9090", "/").await, StatusCode::OK);
    assert_eq!(get("localhost:1234", "/").await, StatusCode::OK);
}

async fn wrong_passwords_make_the_address_wait(backend: Backend) {
    let console = Console::start(backend).await;
    let wrong = async || console.http.get(&console.url).bearer_auth("wrong password").send().await.unwrap().status();
    let (cookie, _) = console.sign_in().await;
    for _ in 0..5 {
        assert_eq!(wrong().await, StatusCode::UNAUTHORIZED);
    }
    assert_eq!(wrong().await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(console.get("/").await.status(), StatusCode::TOO_MANY_REQUESTS);
    let session = console.http.get(&console.url).header("cookie", cookie).send().await.unwrap();
    assert_eq!(session.status(), StatusCode::OK, "a session goes on");
    eventually("the wait to end", SOON, async || console.get("/").await.status() == StatusCode::OK).await;
}

async fn another_password_ends_the_sessions(backend: Backend) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, PASSWORD).unwrap();
    let console = Console::start_with(backend, false, &[("ADMIN_PASSWORD_FILE", file.to_str().unwrap())]).await;
    let (cookie, _) = console.sign_in().await;
    fs::write(&file, "quite another password").unwrap();
    eventually("the session to end", SOON, async || {
        console.http.get(&console.url).header("cookie", &cookie).send().await.unwrap().status() == StatusCode::UNAUTHORIZED
    })
    .await;
    let new = console.http.get(&console.url).bearer_auth("quite another password").send().await.unwrap();
    assert_eq!(new.status(), StatusCode::OK);
    let log = console.fixture.nodes[0].log_tail();
    assert!(log.contains("password changed") && !log.contains("quite another") && !log.contains(PASSWORD), "{log}");
}

async fn looking_at_messages_leases_nothing(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let dead = api.create_topic("dead").await;
    let policy = DeadLetterPolicy { dead_letter_topic: dead, max_delivery_attempts: 5 };
    let set = |s: &mut Subscription| {
        s.dead_letter_policy = Some(policy);
        s.ack_deadline_seconds = 600;
    };
    let (topic, subscription) = api.pair_with(set).await;
    let ids = api.publish(&topic, ["one", "two", "three"].map(|text| message(text).attribute("colour", "blue"))).await;
    let leased = api.pull(&subscription, 1).await;
    for _ in 0..7 {
        let html = console.page(&format!("{}/messages", path(&subscription))).await;
        for id in &ids {
            assert!(html.contains(&format!("<b>{id}</b>")), "{html}");
        }
        assert_eq!((html.matches("<span>waiting</span>").count(), html.matches("<span>leased for").count()), (2, 1), "{html}");
        assert_eq!(html.matches("<span>attempt 1</span>").count(), 3, "{html}");
        assert_eq!(html.matches("<dt>colour</dt><dd>blue</dd>").count(), 3, "{html}");
    }
    let others = api.pull(&subscription, 2).await;
    assert!(others.iter().all(|received| received.delivery_attempt == 1));
    api.ack(&subscription, leased.iter().chain(&others)).await;
    assert_eq!(console.peeked(&subscription).await, [""; 0]);
}

async fn pages_of_messages_show_each_one_once(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    // One large publish and some small ones.
    api.publish(&topic, texts("a", 45)).await;
    for small in texts("b", 10) {
        api.publish(&topic, [small]).await;
    }
    let leased = api.pull(&subscription, 30).await;
    api.ack(&subscription, leased.iter().step_by(2)).await;
    api.nack(&subscription, leased.iter().skip(1).step_by(4)).await;
    let gone: BTreeSet<_> = leased.iter().step_by(2).map(|r| r.text().to_owned()).collect();
    let all: BTreeSet<_> =
        texts("a", 45).iter().chain(&texts("b", 10)).map(|m| String::from_utf8(m.data.to_vec()).unwrap()).collect();
    let seen = console.peeked(&subscription).await;
    assert_eq!(seen.len(), 40);
    assert_eq!(seen.iter().cloned().collect::<BTreeSet<_>>(), &all - &gone);
    assert!(seen.is_sorted(), "{seen:?}");
    // From a place in the middle of a publish.
    let html = console.page(&format!("{}/messages", path(&subscription))).await;
    let places: Vec<&str> = html.split("place ").skip(1).map(|rest| rest.split('<').next().unwrap()).collect();
    let html = console.page(&format!("{}/messages?from={}&alone", path(&subscription), places[7])).await;
    assert!(html.contains(&format!("place {}<", places[7])) && html.contains(&seen[7]) && !html.contains(&seen[8]), "{html}");
}

async fn a_message_says_where_it_stands(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let policy = RetryPolicy { minimum_backoff: Some(seconds(600)), maximum_backoff: Some(seconds(600)) };
    let set = |s: &mut Subscription| {
        s.retry_policy = Some(policy);
        s.ack_deadline_seconds = 600;
    };
    let (topic, subscription) = api.pair_with(set).await;
    let ordered = api.create_subscription_with("ordered", &topic, |s| {
        s.enable_message_ordering = true;
        s.ack_deadline_seconds = 600;
    });
    let ordered = ordered.await;
    api.publish(&topic, ["k1", "k2", "k3"].map(|text| message(text).key("key"))).await;
    let received = api.pull(&subscription, 3).await;
    api.nack(&subscription, &received[..1]).await;
    let html = console.page(&format!("{}/messages", path(&subscription))).await;
    assert_eq!(html.matches("waiting for its backoff").count(), 1, "{html}");
    assert_eq!(html.matches("leased for").count(), 2, "{html}");
    assert!(html.contains("<span>attempt 2</span>") && html.contains("ordering key key"), "{html}");
    // The first of a key is out, and another consumer meets the rest.
    let first = api.pull_now(&ordered, 1).await;
    assert_eq!(first.len(), 1);
    assert_eq!(api.pull_now(&ordered, 10).await.len(), 0);
    let html = console.page(&format!("{}/messages", path(&ordered))).await;
    assert_eq!((html.matches("leased for").count(), html.matches("<span>waiting").count()), (1, 2), "{html}");
    assert_eq!(console.peeked(&ordered).await, ["k1", "k2", "k3"]);
}

async fn nothing_in_a_message_becomes_markup(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let evil = "<script>alert(1)</script>";
    let hostile = message(format!("{evil}</pre><img src=x onerror=alert(2) hx-get=/x>"));
    api.publish(&topic, [hostile.attribute("<b onclick=x>", "\"><svg onload=alert(3)>").key("'\"><i>")]).await;
    for form in ["", "?as=text", "?as=json", "?as=hex"] {
        let html = console.page(&format!("{}/messages{form}", path(&subscription))).await;
        for raw in ["<script>alert", "<img", "<b onclick", "<svg", "'\"><i>"] {
            assert!(!html.contains(raw), "{form}: {raw}: {html}");
        }
    }
    let html = console.page(&format!("/topics?project={}&prefix=%22%3E%3Cscript%3E", api.project)).await;
    assert!(!html.contains("\"><script>") && html.contains("script"), "{html}");
    let (cookie, _) = console.sign_in().await;
    let page = console.http.get(format!("{}/topics/%3Cscript%3E/x", console.url)).header("cookie", cookie).send().await.unwrap();
    assert_eq!(page.status(), StatusCode::BAD_REQUEST);
    let html = page.text().await.unwrap();
    assert!(html.contains("Invalid resource name given") && !html.contains("<script>"), "{html}");
}

async fn dead_letters_go_back_to_where_they_came_from(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (_, source) = api.pair().await;
    let dead_topic = api.create_topic("dead").await;
    let morgue = api.create_subscription("morgue", &dead_topic).await;
    api.publish(&dead_topic, (0..120).map(|n| dead(&format!("m{n:03}"), &source))).await;
    let (status, text) = console.post(&format!("{}/replay", path(&morgue)), &[("max", "110")]).await;
    assert_eq!((status, text.as_str()), (StatusCode::OK, "Moved 110 messages. 10 are left in the subscription.\n"));
    let (_, text) = console.post(&format!("{}/replay", path(&morgue)), &[]).await;
    assert_eq!(text, "Moved 10 messages. 0 are left in the subscription.\n");
    let received = api.pull(&source, 120).await;
    let texts: BTreeSet<_> = received.iter().map(|r| r.text().to_owned()).collect();
    assert_eq!(texts, (0..120).map(|n| format!("m{n:03}")).collect());
    for received in &received {
        let keys: Vec<_> = received.message.attributes.keys().map(String::as_str).collect();
        assert_eq!(keys, ["kept"]);
    }
    for (max, field) in [("0", "max"), ("1001", "max"), ("many", "many")] {
        let (status, text) = console.post(&format!("{}/replay", path(&morgue)), &[("max", max)]).await;
        assert!(status == StatusCode::BAD_REQUEST && text.contains(field), "{status} {text}");
    }
}

async fn a_dead_letter_without_a_way_back_stays(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, source) = api.pair().await;
    let kept = api.create_subscription("kept", &topic).await;
    let dead_topic = api.create_topic("dead").await;
    let morgue = api.create_subscription("morgue", &dead_topic).await;
    api.publish(&dead_topic, [message("no attributes"), dead("gone", &source), dead("kept", &kept)]).await;
    api.delete_subscription(&source).await;
    let replay = async |form: &[(&str, &str)]| console.post(&format!("{}/replay", path(&morgue)), form).await;
    let (status, text) = replay(&[]).await;
    assert!(status == StatusCode::OK && text.starts_with("Moved 1 message. 2 messages stayed: "), "{status} {text}");
    assert!(
        text.contains("no attribute names the subscription") && text.contains(&format!("{source}: Resource not found")),
        "{text}"
    );
    assert_eq!(api.take(&kept).await.text(), "kept");
    // A topic that is not there, and the one that would bring the messages back here.
    let (status, text) = replay(&[("topic", "none-such")]).await;
    assert!(status == StatusCode::NOT_FOUND && text.contains("none-such"), "{status} {text}");
    assert_eq!(replay(&[("topic", &dead_topic)]).await.0, StatusCode::BAD_REQUEST);
    let mut left = console.peeked(&morgue).await;
    left.sort();
    assert_eq!(left, ["gone", "no attributes"]);
    // What stayed is given back at once and was not counted as delivered.
    eventually("the messages to be given back", SOON, async || {
        console.page(&format!("{}/messages", path(&morgue))).await.matches("<span>waiting</span><span>attempt 1</span>").count()
            == 2
    })
    .await;
    let (_, text) = replay(&[("topic", "orders")]).await;
    assert_eq!(text, "Moved 2 messages. 0 are left in the subscription.\n");
    assert_eq!(api.pull(&kept, 2).await.len(), 2);
}

async fn a_replay_that_is_killed_loses_nothing(backend: Backend) {
    let mut console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (_, source) = api.pair().await;
    let dead_topic = api.create_topic("dead").await;
    let morgue = api.create_subscription("morgue", &dead_topic).await;
    const COUNT: usize = 3000;
    for from in (0..COUNT).step_by(500) {
        api.publish(&dead_topic, (from..from + 500).map(|n| dead(&format!("m{n:04}"), &source))).await;
    }
    let (http, url) = (console.http.clone(), format!("{}{}/replay", console.url, path(&morgue)));
    let replays = tokio::spawn(async move {
        // Until the server is gone.
        while let Ok(answer) = http.post(&url).bearer_auth(PASSWORD).send().await {
            let text = answer.text().await.unwrap_or_default();
            if text.starts_with("Moved 0 messages") {
                break;
            }
        }
    });
    eventually("the first message to be moved", SOON, async || {
        console.page(&format!("{}/messages", path(&source))).await.contains("<article>")
    })
    .await;
    console.fixture.crash_and_restart();
    replays.await.unwrap();
    eventually("the server to be back", SOON, async || console.http.get(format!("{}/readyz", console.url)).send().await.is_ok())
        .await;
    let (moved, left) = (console.peeked(&source).await, console.peeked(&morgue).await);
    let all: BTreeSet<_> = moved.iter().chain(&left).cloned().collect();
    assert_eq!(all.len(), COUNT, "{} moved, {} left", moved.len(), left.len());
    assert!(!moved.is_empty());
}

/// Each node has a console of its own, which shows what the others' clients do.
async fn a_console_goes_on_when_another_node_is_gone(backend: Backend) {
    let mut console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair_with(|s| s.ack_deadline_seconds = 600).await;
    api.publish(&topic, texts("m", 4)).await;
    let gone = console.fixture.api_of_node(0, &api).await;
    assert_eq!(gone.pull(&subscription, 1).await.len(), 1);
    console.fixture.nodes[0].kill();
    let url = console.urls.remove(0);
    assert!(console.http.get(format!("{url}/readyz")).send().await.is_err());
    let html = console.page(&format!("{}/messages", path(&subscription))).await;
    assert_eq!((html.matches("<span>waiting</span>").count(), html.matches("<span>leased for").count()), (3, 1), "{html}");
    let (status, text) = console.post(&format!("{}/purge", path(&subscription)), &[("sure", "yes")]).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    console.fixture.nodes[0].restart();
    console.urls = vec![url];
    eventually("the first node to see it", SOON, async || console.peeked(&subscription).await.is_empty()).await;
}

async fn forms_change_what_they_say(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let at = path(&subscription);
    let form = [("data", "{\"a\":1}"), ("attributes", "colour=blue\nempty="), ("ordering_key", "k")];
    let (status, text) = console.post(&format!("{}/publish", path(&topic)), &form).await;
    assert!(status == StatusCode::OK && text.starts_with("Published message "), "{status} {text}");
    let html = console.page(&format!("{at}/messages")).await;
    assert!(html.contains("<pre class=\"json\">") && html.contains("<dt>colour</dt><dd>blue</dd>"), "{html}");
    assert_eq!(console.post(&format!("{}/publish", path(&topic)), &[]).await.0, StatusCode::BAD_REQUEST);

    let (status, text) = console.post(&format!("{at}/snapshot"), &[("snapshot", "before")]).await;
    assert_eq!(
        (status, text.as_str()),
        (StatusCode::OK, format!("The snapshot {} was created.\n", api.snapshot("before")).as_str())
    );
    assert_eq!(console.post(&format!("{at}/snapshot"), &[("snapshot", "before")]).await.0, StatusCode::CONFLICT);
    assert!(console.page("/snapshots").await.contains("before"));

    assert_eq!(console.post(&format!("{at}/purge"), &[]).await.0, StatusCode::BAD_REQUEST, "without the tick");
    assert_eq!(console.peeked(&subscription).await.len(), 1);
    let sure = ("sure", "yes");
    assert_eq!(console.post(&format!("{at}/purge"), &[sure]).await.0, StatusCode::OK);
    assert_eq!(console.peeked(&subscription).await.len(), 0);
    for (form, status) in [
        (vec![sure], StatusCode::BAD_REQUEST),
        (vec![sure, ("time", "yesterday")], StatusCode::BAD_REQUEST),
        (vec![sure, ("time", "2026-01-31T12:00:00Z"), ("snapshot", "before")], StatusCode::BAD_REQUEST),
        (vec![sure, ("snapshot", "none-such")], StatusCode::NOT_FOUND),
        (vec![sure, ("snapshot", "before")], StatusCode::OK),
    ] {
        let (answered, text) = console.post(&format!("{at}/seek"), &form).await;
        assert_eq!(answered, status, "{form:?}: {text}");
    }
    assert_eq!(console.peeked(&subscription).await.len(), 1);
    assert_eq!(console.post(&format!("{at}/seek"), &[sure, ("time", "2100-01-01T00:00:00Z")]).await.0, StatusCode::OK);
    assert_eq!(console.peeked(&subscription).await.len(), 0);

    let snapshot = path(&api.snapshot("before"));
    assert_eq!(console.post(&format!("{snapshot}/delete"), &[sure]).await.0, StatusCode::OK);
    assert_eq!(console.post(&format!("{snapshot}/delete"), &[sure]).await.0, StatusCode::NOT_FOUND);
    assert!(console.page("/snapshots").await.contains("There are none."));
}

async fn ten_thousand_subscriptions_stay_usable(backend: Backend) {
    let console = Console::start(backend).await;
    let api: Api = console.fixture.api().await;
    let topic = api.create_topic("orders").await;
    let create = |n: usize| {
        let (api, topic) = (&api, &topic);
        async move { api.create_subscription(&format!("sub-{n:05}"), topic).await }
    };
    stream::iter(0..10_000).map(create).buffer_unordered(200).count().await;
    api.publish_texts(&topic, &["to all"]).await;
    // As a person waits, on a machine that runs other tests at the same time.
    let quick = Duration::from_secs(10);
    let page =
        async |path: &str| tokio::time::timeout(quick, console.page(path)).await.unwrap_or_else(|_| panic!("{path} is slow"));
    let first = page("/subscriptions").await;
    assert!(first.contains("sub-00000") && first.contains("sub-00049") && !first.contains("sub-00050"), "{first}");
    assert!(first.len() < 100_000, "{}", first.len());
    assert!(first.contains("rel=\"next\""));
    let found = page("/subscriptions?prefix=sub-0777").await;
    assert!(found.contains("sub-07770") && found.contains("sub-07779") && !found.contains("sub-07780"), "{found}");
    assert!(!found.contains("rel=\"next\""), "{found}");
    let found = page(&format!("/subscriptions?project={}&prefix=sub-09", api.project)).await;
    assert!(found.contains("sub-09049") && !found.contains("sub-09050") && found.contains("rel=\"next\""), "{found}");
    // The first page of all comes before its totals if they take long.
    eventually("the totals", Duration::from_secs(60), async || {
        let overview = page("/").await;
        overview.contains("<b>10000</b><span><a href=\"/subscriptions\">") && overview.contains("<b>10000</b><span>undelivered")
    })
    .await;
    let topic_page = page(&path(&topic)).await;
    assert!(topic_page.contains("sub-00049") && topic_page.contains("rel=\"next\"") && topic_page.len() < 100_000);
}

async fn changes_are_noted_in_the_log(backend: Backend) {
    let console = Console::start(backend).await;
    let api = console.fixture.api().await;
    let (topic, subscription) = api.pair().await;
    let (cookie, csrf) = console.sign_in().await;
    let target = format!("{}{}/purge", console.url, path(&subscription));
    let form = encoded(&[("csrf", &csrf), ("sure", "yes")]);
    console.http.post(target).header("cookie", cookie).body(form).send().await.unwrap();
    console.post(&format!("{}/publish", path(&topic)), &[("data", "not for the log")]).await;
    let log = console.fixture.nodes[0].log_tail();
    let line = |words: &[&str]| log.lines().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(line(&["signed in", "anna", "127.0.0.1"]), "{log}");
    assert!(line(&["anna", "127.0.0.1", "purge", &subscription, "counts as acknowledged"]), "{log}");
    assert!(line(&["script", "publish", &topic, "Published message"]), "{log}");
    assert!(!log.contains("not for the log") && !log.contains(PASSWORD) && !log.contains(&csrf), "{log}");
}
