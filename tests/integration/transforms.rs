//! Message transforms of topics and subscriptions.

use landline::api::proto::pubsub::{
    DeadLetterPolicy, JavaScriptUdf, MessageTransform, PushConfig, RetryPolicy, Subscription, Topic, UpdateTopicRequest,
    message_transform::Transform,
};
use serde_json::{Value, json};
use tonic::Code;

use crate::{
    fixture::{
        Api, Backend, Fixture, Received, api::publish_request, mask, message, message::Build, message::texts, rest, seconds,
        sink::Sink, wait::SOON,
    },
    for_every_backend, for_one_backend,
};

for_every_backend!(
    a_topic_transforms_what_it_stores,
    a_subscription_transforms_what_it_delivers,
    failing_transforms_lead_to_dead_letters_that_say_why,
    illegal_messages_of_transforms_are_not_delivered,
    pushes_are_transformed,
    exactly_once_holds_with_a_transform,
);
for_one_backend!(
    hostile_functions_leave_the_server_well,
    transforms_are_checked_when_they_are_set,
    transforms_can_be_checked_and_tried_over_rest,
);

fn udf(name: &str, code: &str) -> MessageTransform {
    let udf = JavaScriptUdf { function_name: name.into(), code: code.into() };
    MessageTransform { transform: Some(Transform::JavascriptUdf(udf)), ..Default::default() }
}

/// Drops `drop`, throws on `bad`, puts an exclamation mark behind the rest.
const MIXED: &str = "function f(message, metadata) {
    if (message.data === 'drop') return null;
    if (message.data === 'bad') throw new Error('will not');
    return { data: message.data + '!', attributes: { ...message.attributes, id: String(metadata.message_id) } };
}";

async fn shaped_topic(api: &Api, id: &str, transforms: Vec<MessageTransform>) -> String {
    api.ok(Topic { name: api.topic(id), message_transforms: transforms, ..Default::default() }).await.name
}

async fn shaped(api: &Api, set: impl FnOnce(&mut Subscription)) -> (String, String) {
    api.pair_with(|s| {
        s.message_transforms = vec![udf("f", MIXED)];
        set(s);
    })
    .await
}

async fn a_topic_transforms_what_it_stores(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = shaped_topic(&api, "shaped", vec![udf("f", MIXED)]).await;
        let one = api.create_subscription("one", &topic).await;
        let filtered = api.create_subscription_with("two", &topic, |s| s.filter = "attributes:id".into()).await;
        let ids = api.publish(&topic, [message("a"), message("drop"), message("b")]).await;
        assert_eq!(ids.len(), 3);
        // The filter sees what the transform made.
        for subscription in [&one, &filtered] {
            let pulled = api.pull(subscription, 2).await;
            assert_eq!(texts(&pulled), ["a!", "b!"]);
            assert_eq!(pulled[0].id(), ids[0]);
            api.ack(subscription, &pulled).await;
        }
        assert_eq!(api.publish(&topic, [message("drop")]).await.len(), 1);
        let refused = api.failure(publish_request(&topic, [message("c"), message("bad")])).await;
        assert_eq!(refused.code, Code::InvalidArgument);
        assert!(refused.message.contains("message transform f: Error: will not"), "{refused:?}");
        let topic_now = Topic { name: topic.clone(), ..Default::default() };
        api.ok(UpdateTopicRequest { topic: Some(topic_now), update_mask: Some(mask(&["message_transforms"])) }).await;
        api.publish_texts(&topic, &["bad"]).await;
        assert_eq!(api.take(&one).await.text(), "bad");
    }
}

async fn a_subscription_transforms_what_it_delivers(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, subscription) = shaped(&api, |s| s.enable_message_ordering = true).await;
        let plain = api.create_subscription("plain", &topic).await;
        let sent = ["a", "drop", "b", "drop"].map(|text| message(text).key("k"));
        let ids = api.publish(&topic, sent).await;
        let first = api.take(&subscription).await;
        assert_eq!((first.text(), first.id(), &first.message.attributes["id"]), ("a!", ids[0].as_str(), &ids[0]));
        assert_eq!(first.message.ordering_key, "k");
        api.ack(&subscription, [&first]).await;
        let second = api.take(&subscription).await;
        assert_eq!(second.text(), "b!");
        api.ack(&subscription, [&second]).await;
        assert_eq!(texts(&api.pull(&plain, 4).await), ["a", "drop", "b", "drop"]);
        let mut stream = api.stream(&subscription).await;
        api.publish(&topic, [message("drop"), message("c")]).await;
        let streamed = stream.message().await;
        assert_eq!(streamed.text(), "c!");
        stream.ack(&streamed);
        // What was dropped is acknowledged: nothing comes but the next message.
        api.publish(&topic, [message("d")]).await;
        assert_eq!(stream.message().await.text(), "d!");
    }
}

/// Publishes "bad" and "good" to a subscription with dead letters: what "bad" becomes, and the text of what is delivered.
async fn bad_and_good(api: &Api, set: impl FnOnce(&mut Subscription)) -> (Received, String) {
    let dead = api.create_topic("dead").await;
    let graveyard = api.create_subscription("graveyard", &dead).await;
    let (topic, subscription) = shaped(api, |s| {
        s.dead_letter_policy = Some(DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 });
        s.retry_policy = Some(RetryPolicy { minimum_backoff: Some(seconds(0)), maximum_backoff: Some(seconds(0)) });
        set(s);
    })
    .await;
    let mut stream = api.stream(&subscription).await;
    api.publish(&topic, [message("bad"), message("good")]).await;
    let good = stream.message().await;
    stream.ack(&good);
    let letter = api.take(&graveyard).await;
    assert_eq!(letter.text(), "bad");
    (letter, good.text().to_owned())
}

async fn failing_transforms_lead_to_dead_letters_that_say_why(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (letter, delivered) = bad_and_good(&api, |_| {}).await;
    assert_eq!(delivered, "good!");
    let attributes = &letter.message.attributes;
    assert_eq!(attributes["CloudPubSubDeadLetterSourceDeliveryCount"], "5");
    let why = &attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"];
    assert!(why.contains("message transform f: Error: will not"), "{why}");
}

async fn illegal_messages_of_transforms_are_not_delivered(backend: Backend) {
    const LONG: &str = "function f(m) { if (m.data === 'bad') m.attributes.a = 'x'.repeat(1025); return m; }";
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (letter, delivered) = bad_and_good(&api, |s| s.message_transforms = vec![udf("f", LONG)]).await;
    assert_eq!(delivered, "good");
    let why = &letter.message.attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"];
    assert!(why.contains("The value of attribute 'a' is too long"), "{why}");
}

async fn pushes_are_transformed(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let sink = Sink::start().await;
    let config = PushConfig { push_endpoint: sink.url("/"), ..Default::default() };
    let (topic, _) = shaped(&api, |s| s.push_config = Some(config)).await;
    let ids = api.publish(&topic, [message("drop"), message("a")]).await;
    let pushed = sink.next().await;
    assert_eq!(pushed.text(), "a!");
    assert_eq!(pushed.json()["message"]["messageId"], ids[1].as_str());
    api.publish(&topic, [message("drop"), message("b")]).await;
    assert_eq!(sink.next().await.text(), "b!");
}

async fn exactly_once_holds_with_a_transform(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = shaped(&api, |s| s.enable_exactly_once_delivery = true).await;
    let mut stream = api.stream(&subscription).await;
    api.publish(&topic, [message("drop"), message("a")]).await;
    let received = stream.message().await;
    assert_eq!(received.text(), "a!");
    stream.ack(&received);
    let confirmed = stream.response(SOON).await.unwrap().unwrap().acknowledge_confirmation.unwrap();
    assert_eq!(confirmed.ack_ids, [received.ack_id]);
    api.publish(&topic, [message("b")]).await;
    assert_eq!(stream.message().await.text(), "b!");
}

async fn hostile_functions_leave_the_server_well(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (plain, plain_sub) = api.pair().await;
    let before = fixture.nodes[0].resident_bytes();
    for (id, code) in [
        ("loop", "function f() { for (;;) { try { for (;;) {} } finally { continue; } } }"),
        ("memory", "function f() { const a = []; for (;;) a.push(new Uint8Array(1e6)); }"),
        ("depth", "function f() { return f() + 1; }"),
        ("pattern", "function f() { return /^(a+)+$/.test('a'.repeat(40) + 'b'); }"),
        ("getter", "function f() { return { get data() { for (;;) {} } }; }"),
        ("proto", "Object.prototype.then = Array.prototype.push = () => { for (;;) {} }; function f() { return {}; }"),
    ] {
        let topic = shaped_topic(&api, id, vec![udf("f", code)]).await;
        assert_eq!(api.fails(publish_request(&topic, [message("x")])).await, Code::InvalidArgument, "{id}");
    }
    api.publish_texts(&plain, &["fine"]).await;
    assert_eq!(api.take(&plain_sub).await.text(), "fine");
    let grown = fixture.nodes[0].resident_bytes().saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes more");
}

async fn transforms_are_checked_when_they_are_set(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let (topic, _) = api.pair().await;
        let cases = [
            (vec![udf("f", "function f(m) { return m +; }")], "(line 1, column "),
            (vec![udf("g", MIXED)], "no function 'g'"),
            (vec![udf("f", MIXED), udf("f", MIXED)], "used twice"),
            (vec![MessageTransform::default()], "message_transforms[0]"),
        ];
        for (transforms, part) in cases {
            let name = api.topic("refused");
            let failure = api.failure(Topic { name, message_transforms: transforms.clone(), ..Default::default() }).await;
            assert!(failure.code == Code::InvalidArgument && failure.message.contains(part), "{failure:?}");
            let name = api.subscription("refused");
            let request = Subscription { name, topic: topic.clone(), message_transforms: transforms, ..Default::default() };
            assert_eq!(api.fails(request).await, Code::InvalidArgument);
        }
        let mut off = udf("g", "function g() { return null; }");
        off.disabled = true;
        let set = vec![udf("f", MIXED), off];
        let shaped = shaped_topic(&api, "shaped", set.clone()).await;
        assert_eq!(api.get_topic(&shaped).await.unwrap().message_transforms, set);
    }
}

async fn transforms_can_be_checked_and_tried_over_rest(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let transform = |code: &str| json!({ "javascriptUdf": { "functionName": "f", "code": code } });
    let call = async |method: &str, body: Value| {
        rest::json(api.address(), "POST", &format!("/v1/{}:{method}", api.parent()), body).await
    };
    let checked = call("validateMessageTransform", json!({ "messageTransform": transform(MIXED) })).await;
    assert_eq!(checked.success(), json!({}));
    let refused = call("validateMessageTransform", json!({ "messageTransform": transform("function f( {") })).await;
    assert_eq!(refused.error_status(), "INVALID_ARGUMENT");
    let list = json!({ "messageTransforms": [transform(MIXED)] });
    let tried = async |transforms: (&str, Value), data: &str| {
        let mut body = json!({ "message": { "data": data } });
        body[transforms.0] = transforms.1;
        call("testMessageTransforms", body).await.success()["transformedMessages"].clone()
    };
    // a, drop and bad.
    let passed = tried(("messageTransforms", list.clone()), "YQ==").await;
    assert_eq!(passed[0]["transformedMessage"]["data"], "YSE=");
    let filtered = tried(("messageTransforms", list.clone()), "ZHJvcA==").await;
    assert_eq!(filtered, json!([{ "filteredMessage": {} }]));
    let failed = tried(("messageTransforms", list), "YmFk").await;
    assert_eq!(failed[0]["failedMessage"]["error"]["code"], 3);
    assert!(failed[0]["failedMessage"]["error"]["message"].as_str().unwrap().contains("will not"));
    let topic = shaped_topic(&api, "shaped", vec![udf("f", MIXED)]).await;
    assert_eq!(tried(("topic", topic.clone().into()), "ZHJvcA==").await, json!([{ "filteredMessage": {} }]));
    let subscription = api.create_subscription("plain", &topic).await;
    assert_eq!(tried(("subscription", subscription.into()), "YQ==").await, Value::Null);
}
