use std::time::Duration;

use super::*;
use crate::{
    connector::{
        draft::{SubscriptionDraft, TopicDraft},
        rig::{Rig, eventually, ids, texts},
    },
    model::{DeadLetterPolicy, RetryPolicy},
};

fn transform(code: &str) -> MessageTransform {
    MessageTransform { function_name: "f".into(), code: code.into(), disabled: false, enabled: false }
}

fn draft(name: &str, code: &str, disabled: bool) -> TransformDraft {
    let kind = TransformKind::JavaScript { function_name: name.into(), code: code.into() };
    TransformDraft { kind, disabled, enabled: false }
}

/// Doubles `x`, drops `drop`, throws on `bad`.
const MIXED: &str = "function f(m) {
    if (m.data === 'drop') return null;
    if (m.data === 'bad') throw new Error('will not');
    return { data: m.data + m.data, attributes: { seen: 'yes' } };
}";

async fn topic(rig: &Rig, id: &str, transforms: Vec<TransformDraft>) -> TopicName {
    let name = TopicName::new("p1", id).unwrap();
    let draft = TopicDraft { name: name.to_string(), message_transforms: transforms, ..TopicDraft::default() };
    rig.connector.create_topic(draft).await.unwrap();
    name
}

fn wire(texts: &[&str]) -> Vec<bytes::Bytes> {
    texts.iter().map(|text| EncodedMessage::encode(text.as_bytes(), [], "").wire().clone()).collect()
}

#[tokio::test]
async fn a_topic_stores_what_its_transforms_make_of_a_message() {
    let rig = Rig::new().await;
    let name = topic(&rig, "shaped", vec![draft("f", MIXED, false)]).await;
    let sub = rig.subscription_on("sub", "shaped", |_| {}).await;
    let got = rig.connector.publish(&name, wire(&["a", "drop", "b"])).await.unwrap();
    assert_eq!(got.len(), 3);
    assert_eq!(got.iter().collect::<HashSet<_>>().len(), 3, "{got:?}");
    assert_eq!(texts(&rig.pull(&sub, 10).await), ["aa", "bb"]);
    assert_eq!(rig.connector.publish(&name, wire(&["drop"])).await.unwrap().len(), 1);
    assert_eq!(rig.backlog(&sub).await, 2);
}

#[tokio::test]
async fn a_topic_transform_that_fails_refuses_the_whole_publish() {
    let rig = Rig::new().await;
    let name = topic(&rig, "shaped", vec![draft("f", MIXED, false)]).await;
    let sub = rig.subscription_on("sub", "shaped", |_| {}).await;
    let error = rig.connector.publish(&name, wire(&["a", "bad", "b"])).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("message transform f: Error: will not (line 3"), "{text}");
    assert_eq!(rig.backlog(&sub).await, 0);
    let code = "function f(m) { return { data: m.data, attributes: { ['k'.repeat(300)]: 'v' } }; }";
    let long = topic(&rig, "long", vec![draft("f", code, false)]).await;
    let text = rig.connector.publish(&long, wire(&["a"])).await.unwrap_err().to_string();
    assert!(text.contains("can't be published: The attribute key"), "{text}");
}

#[tokio::test]
async fn transforms_run_in_their_order_without_the_disabled_ones() {
    let rig = Rig::new().await;
    let add = |name: &str, letter: &str, disabled| {
        draft(name, &format!("function {name}(m) {{ m.data += '{letter}'; return m; }}"), disabled)
    };
    let name = topic(&rig, "shaped", vec![add("f", "f", false), add("g", "g", true), add("h", "h", false)]).await;
    let sub = rig
        .subscription_on("sub", "shaped", |s| {
            s.message_transforms = vec![transform("function f(m) { m.data += '!'; return m; }")]
        })
        .await;
    rig.connector.publish(&name, wire(&["x"])).await.unwrap();
    assert_eq!(texts(&rig.pull(&sub, 10).await), ["xfh!"]);
    let mut changed = transform("function f(m) { m.data += '?'; return m; }");
    changed.disabled = true;
    rig.update(&sub, |s| s.message_transforms = vec![changed]).await;
    rig.connector.publish(&name, wire(&["y"])).await.unwrap();
    assert_eq!(texts(&rig.pull(&sub, 10).await), ["yfh"]);
}

#[tokio::test]
async fn a_subscription_transforms_what_its_filter_lets_through() {
    let rig = Rig::new().await;
    let code = "function f(m) { m.attributes = { kind: 'other' }; return m; }";
    let sub = rig
        .subscription("sub", |s| {
            s.filter = "attributes.kind = \"wanted\"".into();
            s.message_transforms = vec![transform(code)];
        })
        .await;
    let name = TopicName::new("p1", "topic").unwrap();
    let message = |kind| EncodedMessage::encode(b"x", [("kind", kind)], "").wire().clone();
    rig.connector.publish(&name, vec![message("wanted"), message("other")]).await.unwrap();
    let pulled = rig.pull(&sub, 10).await;
    let attributes: Vec<_> =
        pulled.iter().map(|m| EncodedMessage::scan(m.message.clone()).unwrap().attribute_map()["kind"].clone()).collect();
    assert_eq!(attributes, ["other"]);
}

#[tokio::test]
async fn a_transformed_message_keeps_its_id_time_and_key() {
    let rig = Rig::new().await;
    let code = "function f(m, about) { return { data: about.message_id + ' ' + about.ordering_key }; }";
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(code)]).await;
    let name = TopicName::new("p1", "topic").unwrap();
    let sent = EncodedMessage::encode(b"x", [], "key").wire().clone();
    let id = rig.connector.publish(&name, vec![sent]).await.unwrap()[0].to_string();
    let pulled = rig.pull(&sub, 1).await;
    let (got, _) = EncodedMessage::sealed(&pulled[0].message).unwrap();
    assert_eq!(got, id);
    let message = EncodedMessage::scan(pulled[0].message.clone()).unwrap();
    assert_eq!((message.data(), message.ordering_key()), (format!("{id} key").as_bytes(), "key"));
}

#[tokio::test]
async fn what_a_subscription_transform_drops_is_acknowledged() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(MIXED)]).await;
    rig.publish(&["drop", "a", "drop"]).await;
    let pulled = rig.pull(&sub, 10).await;
    assert_eq!(texts(&pulled), ["aa"]);
    rig.connector.acknowledge(&sub, &ids(&pulled)).await.unwrap();
    assert_eq!(rig.backlog(&sub).await, 0);
}

#[tokio::test]
async fn more_dropped_messages_than_one_lease_takes_hide_nothing() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(MIXED)]).await;
    let mut all = vec!["drop"; 3 * MAX_LEASED];
    all.push("a");
    rig.publish(&all).await;
    assert_eq!(texts(&[rig.pull_soon(&sub).await]), ["aa"]);
    let mut client = rig.open(&sub, |_| {}).await;
    rig.publish(&all).await;
    assert_eq!(texts(&client.next().await.messages), ["aa"]);
}

#[tokio::test]
async fn exactly_once_streams_deliver_transformed_messages_and_confirm_them() {
    let rig = Rig::new().await;
    let sub = rig
        .subscription("sub", |s| {
            s.message_transforms = vec![transform(MIXED)];
            s.enable_exactly_once_delivery = true;
        })
        .await;
    rig.publish(&["drop", "a"]).await;
    let mut client = rig.open(&sub, |_| {}).await;
    let response = client.next().await;
    assert_eq!(texts(&response.messages), ["aa"]);
    client.ack(&response.messages).await;
    assert_eq!(client.next().await.acknowledged.done, ids(&response.messages));
    assert_eq!(rig.backlog(&sub).await, 0);
}

#[tokio::test]
async fn what_a_subscription_transform_fails_on_becomes_a_dead_letter_that_says_why() {
    let rig = Rig::new().await;
    let dead = rig.topic("dead").await;
    let graveyard = rig.subscription_on("graveyard", "dead", |_| {}).await;
    let sub = rig
        .subscription("sub", |s| {
            s.message_transforms = vec![transform(MIXED)];
            s.retry_policy = Some(RetryPolicy { minimum_backoff_ms: 0, maximum_backoff_ms: 0 });
            s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: Some(dead), max_delivery_attempts: 5 });
        })
        .await;
    rig.publish(&["bad", "a"]).await;
    let pulled = rig.pull(&sub, 10).await;
    assert_eq!(texts(&pulled), ["aa"]);
    rig.connector.acknowledge(&sub, &ids(&pulled)).await.unwrap();
    let waiting = rig.connector.pull(&sub, 10, Duration::from_secs(20));
    let letter = tokio::select! {
        letter = rig.pull_soon(&graveyard) => letter,
        pulled = waiting => panic!("{:?}", pulled.unwrap().messages),
    };
    let message = EncodedMessage::scan_system(letter.message).unwrap();
    assert_eq!(message.data(), b"bad");
    let attributes = message.attribute_map();
    assert_eq!(attributes["CloudPubSubDeadLetterSourceDeliveryCount"], "5");
    let why = &attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"];
    assert!(why.contains("message transform f: Error: will not"), "{why}");
    eventually(|| async { rig.backlog(&sub).await == 0 }).await;
}

/// Each makes of a message something that nobody could have published.
const ILLEGAL: [(&str, &str); 4] = [
    ("function f(m) { m.attributes.a = 'x'.repeat(1025); return m; }", "The value of attribute 'a' is too long"),
    ("function f(m) { for (let i = 0; i < 101; i++) m.attributes['a' + i] = ''; return m; }", "attributes count is too large"),
    ("function f(m) { m.attributes[''] = 'x'; return m; }", "An attribute key must not be empty"),
    ("function f(m) { m.attributes['goog-x'] = 'x'; return m; }", "The attribute key 'goog-x' is reserved"),
];

#[tokio::test]
async fn an_illegal_message_of_a_subscription_transform_is_a_failed_delivery() {
    for (code, expected) in ILLEGAL {
        let rig = Rig::new().await;
        let dead = rig.topic("dead").await;
        let graveyard = rig.subscription_on("graveyard", "dead", |_| {}).await;
        let sub = rig
            .subscription("sub", |s| {
                s.message_transforms = vec![transform(code)];
                s.retry_policy = Some(RetryPolicy { minimum_backoff_ms: 0, maximum_backoff_ms: 0 });
                s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: Some(dead), max_delivery_attempts: 5 });
            })
            .await;
        rig.publish(&["m"]).await;
        let waiting = rig.connector.pull(&sub, 10, Duration::from_secs(20));
        let letter = tokio::select! {
            letter = rig.pull_soon(&graveyard) => letter,
            pulled = waiting => panic!("{:?}", pulled.unwrap().messages),
        };
        let attributes = EncodedMessage::scan_system(letter.message).unwrap().attribute_map();
        assert_eq!(attributes["CloudPubSubDeadLetterSourceDeliveryCount"], "5");
        let why = &attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"];
        assert!(why.contains("message transform f: ") && why.contains(expected), "{why}");
    }
}

#[tokio::test]
async fn attributes_that_the_server_added_are_no_fault_of_a_transform() {
    let rig = Rig::new().await;
    let code = "function f(m) { m.data += '!'; return m; }";
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(code)]).await;
    let own: Vec<_> = (0..104).map(|n| format!("a{n}")).collect();
    let letter = EncodedMessage::encode(b"m", own.iter().map(|key| (key.as_str(), "")), "");
    rig.connector.publish_checked(&TopicName::new("p1", "topic").unwrap(), vec![letter]).await.unwrap();
    let pulled = rig.pull(&sub, 1).await;
    assert_eq!(EncodedMessage::scan_system(pulled[0].message.clone()).unwrap().data(), b"m!");
}

#[tokio::test]
async fn a_failing_function_without_a_retry_policy_is_not_run_without_pause() {
    let rig = Rig::new().await;
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(MIXED)]).await;
    rig.publish(&["bad"]).await;
    // The clock stands still, so the message stays under its short lease.
    assert!(rig.pull(&sub, 10).await.is_empty());
    assert_eq!(rig.outstanding(&sub).await, 1);
    rig.update(&sub, |s| s.message_transforms = Vec::new()).await;
    rig.pass(Duration::from_millis(FIRST_PAUSE_MS + 1));
    assert_eq!(texts(&[rig.pull_soon(&sub).await]), ["bad"]);
}

#[tokio::test]
async fn a_pull_that_is_given_up_while_functions_run_gives_its_messages_back() {
    let rig = Rig::new().await;
    let sub = rig
        .subscription("sub", |s| {
            s.message_transforms = vec![transform("function f(m) { for (let i = 0; i < 1e5; i++); return m; }")]
        })
        .await;
    rig.publish(&["a", "b", "c"]).await;
    let mut pull = Box::pin(rig.connector.pull(&sub, 10, Duration::ZERO));
    assert!(futures::poll!(pull.as_mut()).is_pending());
    assert_eq!(rig.outstanding(&sub).await, 3);
    drop(pull);
    eventually(|| async { rig.outstanding(&sub).await == 0 }).await;
    let mut back = texts(&rig.pull(&sub, 10).await);
    back.sort();
    assert_eq!(back, ["a", "b", "c"]);
}

#[tokio::test]
async fn hostile_functions_cost_their_own_messages_only() {
    let rig = Rig::new().await;
    for (id, code) in [
        ("loop", "function f() { for (;;) {} }"),
        ("memory", "function f() { const a = []; for (;;) a.push(new Uint8Array(1e6)); }"),
        ("depth", "function f() { return f() + 1; }"),
        ("pattern", "function f() { return /^(a+)+$/.test('a'.repeat(40) + 'b'); }"),
    ] {
        let bad = topic(&rig, id, vec![draft("f", code, false)]).await;
        assert!(matches!(rig.connector.publish(&bad, wire(&["a"])).await, Err(Error::Transform(_))), "{id}");
    }
    let good = topic(&rig, "good", vec![draft("f", MIXED, false)]).await;
    let sub = rig.subscription_on("sub", "good", |_| {}).await;
    rig.connector.publish(&good, wire(&["a"])).await.unwrap();
    assert_eq!(texts(&rig.pull(&sub, 10).await), ["aa"]);
}

#[tokio::test]
async fn what_one_message_leaves_behind_does_not_fail_the_next() {
    let rig = Rig::new().await;
    let code = "let first = true; function f(m) { if (!first) throw new Error('not again'); first = false; return m; }";
    let name = topic(&rig, "once", vec![draft("f", code, false)]).await;
    let sub = rig.subscription_on("sub", "once", |_| {}).await;
    rig.connector.publish(&name, wire(&["a", "b", "c"])).await.unwrap();
    assert_eq!(texts(&rig.pull(&sub, 10).await), ["a", "b", "c"]);
}

/// A search within a text runs inside the language, where nothing interrupts it.
#[tokio::test]
async fn a_function_that_can_not_be_ended_is_given_up_and_not_run_again() {
    let rig = Rig::new().await;
    let code = "function f() { ('a'.repeat(3e6)).indexOf('a'.repeat(1.5e6) + 'b'); }";
    let bad = topic(&rig, "bad", vec![draft("f", code, false)]).await;
    assert!(matches!(rig.connector.publish(&bad, wire(&["a"])).await, Err(Error::Transform(_))));
    let text = rig.connector.publish(&bad, wire(&["a"])).await.unwrap_err().to_string();
    assert!(text.contains("not run again"), "{text}");
    let good = topic(&rig, "good", vec![draft("f", MIXED, false)]).await;
    rig.connector.publish(&good, wire(&["a"])).await.unwrap();
}

#[tokio::test]
async fn transforms_are_checked_when_they_are_set() {
    let rig = Rig::new().await;
    let six = || (0..6).map(|n| draft(&format!("f{n}"), &format!("function f{n}(m) {{ return m; }}"), false)).collect::<Vec<_>>();
    let kind = |kind| TransformDraft { kind, disabled: true, enabled: false };
    let long = format!("function f() {{}} //{}", "x".repeat(MAX_UDF_BYTES));
    for (transforms, part) in [
        (six(), "Maximum enabled transforms: 5. Enabled transforms: 6"),
        (vec![draft("f", "function f(m) { return m +; }", false)], "message_transforms[0].javascript_udf.code: SyntaxError"),
        (vec![draft("f", "function f(m) { return m +; }", true)], "(line 1, column "),
        (
            vec![draft("f", MIXED, false), draft("f", MIXED, true)],
            "message_transforms[1].javascript_udf.function_name: the function name 'f' is used twice",
        ),
        (vec![draft("", MIXED, false)], "function_name: must not be empty"),
        (vec![draft("g", MIXED, false)], "no function 'g'"),
        (vec![draft("f", "", false)], "code: there are 0 bytes"),
        (vec![draft("f", &long, false)], "but there must be 1 to 20480"),
        (vec![kind(TransformKind::Compression)], "message_transforms.compression"),
        (vec![kind(TransformKind::AiInference)], "message_transforms.ai_inference"),
        (vec![kind(TransformKind::Unknown)], "message_transforms[0]"),
        ((0..21).map(|n| draft(&format!("f{n}"), "x", true)).collect(), "the maximum with disabled ones is 20"),
    ] {
        let topic =
            TopicDraft { name: "projects/p1/topics/t11".into(), message_transforms: transforms.clone(), ..TopicDraft::default() };
        let text = rig.connector.create_topic(topic).await.unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
        let sub = SubscriptionDraft {
            name: "projects/p1/subscriptions/s11".into(),
            topic: "projects/p1/topics/topic".into(),
            message_transforms: transforms,
            ..SubscriptionDraft::default()
        };
        let text = rig.connector.create_subscription(sub).await.unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
    let mut disabled = six();
    disabled[0].disabled = true;
    let name = topic(&rig, "t11", disabled).await;
    let mask = ["message_transforms".to_owned()];
    let bad = TopicDraft { name: name.to_string(), message_transforms: six(), ..TopicDraft::default() };
    assert!(rig.connector.update_topic(bad, &mask).await.is_err());
    let none = TopicDraft { name: name.to_string(), ..TopicDraft::default() };
    assert!(rig.connector.update_topic(none, &mask).await.unwrap().topic.message_transforms.is_empty());
}

#[tokio::test]
async fn trials_answer_what_each_transform_did() {
    let rig = Rig::new().await;
    let message = |text: &str| EncodedMessage::encode(text.as_bytes(), [], "");
    let second = "function g(m) { if (m.data === 'bb') return null; return m; }";
    let of = || TrialOf::Transforms(vec![draft("f", MIXED, false), draft("g", second, false)]);
    let run = |of, text: &'static str| rig.connector.try_transforms("projects/p1", of, message(text), None);
    let passed = run(of(), "a").await.unwrap();
    assert!(matches!(&passed[..], [Tried::Transformed(first), Tried::Transformed(_)] if first.data() == b"aa"), "{passed:?}");
    assert!(matches!(&run(of(), "b").await.unwrap()[..], [Tried::Transformed(_), Tried::Filtered]));
    assert_eq!(run(of(), "drop").await.unwrap(), [Tried::Filtered]);
    let failed = run(of(), "bad").await.unwrap();
    assert!(matches!(&failed[..], [Tried::Failed(text)] if text.contains("will not")), "{failed:?}");
    let name = topic(&rig, "shaped", vec![draft("f", MIXED, false)]).await;
    assert_eq!(run(TrialOf::Topic(name), "drop").await.unwrap(), [Tried::Filtered]);
    let sub = rig.subscription("sub", |s| s.message_transforms = vec![transform(MIXED)]).await;
    assert_eq!(run(TrialOf::Subscription(sub), "drop").await.unwrap(), [Tried::Filtered]);
    assert!(run(TrialOf::Topic(TopicName::new("p1", "none").unwrap()), "x").await.is_err());
    assert!(rig.connector.validate_transform("projects/p1", &draft("f", MIXED, false)).await.is_ok());
    assert!(rig.connector.validate_transform("projects/p1", &draft("f", "function f( {", false)).await.is_err());
}
