//! Subscription filters.

use landline::api::proto::pubsub::{
    DeadLetterPolicy, PubsubMessage, PushConfig, SeekRequest, Subscription, seek_request::Target,
};
use tonic::Code;

use crate::{
    fixture::{Api, Backend, Fixture, code, message, message::Build, sink::Sink, timestamp},
    for_every_backend, for_one_backend,
};

for_every_backend!(
    a_filter_keeps_messages_out_for_good,
    filtered_messages_do_not_disturb_the_order_of_the_others,
    filtered_messages_stay_out_after_a_seek_and_of_the_dead_letter_topic,
);
for_one_backend!(
    negations_match_a_missing_attribute,
    operators_and_keys_are_case_sensitive,
    keys_are_bare_words_or_quoted,
    illegal_filters_are_refused,
    the_length_limit_counts_bytes,
    the_truth_table_of_the_language,
);

fn kind(value: &str) -> PubsubMessage {
    message(value).attribute("kind", value)
}

/// C028
async fn a_filter_keeps_messages_out_for_good(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let filter = "attributes.kind = \"a\"";
        let (topic, subscription) = api.pair_with(|s| s.filter = filter.into()).await;
        assert_eq!(api.get_subscription(&subscription).await.unwrap().filter, filter);
        let mut stream = api.stream(&subscription).await;
        api.publish(&topic, [kind("b"), kind("a"), message("none")]).await;
        let received = stream.message().await;
        assert_eq!(received.text(), "a");
        stream.ack(&received);
        api.publish(&topic, [message("none"), kind("a")]).await;
        assert_eq!(stream.message().await.text(), "a");
        drop(stream);
        assert!(api.pull_now(&subscription, 10).await.is_empty());
        let sink = Sink::start().await;
        let push_endpoint = sink.url("/");
        let pushing = |s: &mut Subscription| {
            s.filter = filter.into();
            s.push_config = Some(PushConfig { push_endpoint, ..Default::default() });
        };
        api.create_subscription_with("pushed", &topic, pushing).await;
        for text in ["b", "a", "none", "a"] {
            api.publish(&topic, [kind(text)]).await;
        }
        for _ in 0..2 {
            assert_eq!(sink.next().await.text(), "a");
        }
    }
}

async fn create(api: &Api, id: usize, topic: &str, filter: &str) -> Result<Subscription, Code> {
    let name = api.subscription(&format!("filtered-{id}"));
    let request = Subscription { name, topic: topic.to_owned(), filter: filter.to_owned(), ..Default::default() };
    api.call(request).await.map_err(|failure| failure.code)
}

/// Which of the messages pass the filter.
async fn passing(api: &Api, topic: &str, id: usize, filter: &str, messages: &[PubsubMessage]) -> Vec<String> {
    let created = create(api, id, topic, filter).await.unwrap_or_else(|code| panic!("{filter}: {code:?}"));
    // A subscription without a filter beside it says when everything has arrived.
    let all = api.create_subscription(&format!("all-{id}"), topic).await;
    api.publish(topic, messages.iter().cloned()).await;
    api.pull(&all, messages.len()).await;
    let mut got: Vec<_> = api.pull_now(&created.name, 100).await.iter().map(|r| r.text().to_owned()).collect();
    got.sort_unstable();
    got
}

/// C029
async fn negations_match_a_missing_attribute(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let with = |value: &str| message(value).attribute("n", value);
    let messages = [with("com"), with("org"), message("without")];
    let cases = [
        ("attributes.n != \"com\"", vec!["org", "without"]),
        ("NOT attributes.n = \"com\"", vec!["org", "without"]),
        ("NOT hasPrefix(attributes.n, \"co\")", vec!["org", "without"]),
        ("-attributes:n", vec!["without"]),
    ];
    for (number, (filter, expected)) in cases.into_iter().enumerate() {
        assert_eq!(passing(&api, &topic, number, filter, &messages).await, expected, "{filter}");
    }
}

/// C031
async fn operators_and_keys_are_case_sensitive(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let wrong = ["attributes:a and attributes:b", "not attributes:a", "HASPREFIX(attributes.a, \"x\")", "Attributes:a"];
    for (number, filter) in wrong.into_iter().enumerate() {
        assert_eq!(create(&api, number, &topic, filter).await.unwrap_err(), Code::InvalidArgument, "{filter}");
    }
    let messages = [message("upper").attribute("Name", ""), message("lower").attribute("name", "")];
    assert_eq!(passing(&api, &topic, 9, "attributes:name", &messages).await, ["lower"]);
}

/// C032
async fn keys_are_bare_words_or_quoted(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let messages = [
        message("ce").attribute("ce-type", ""),
        message("ab").attribute("a_b-1", "x"),
        message("iana").attribute("iana.org/language_tag", "en"),
        message("space").attribute("a b", "c"),
        message("both").attribute("a", "").attribute("b", ""),
        message("only-a").attribute("a", ""),
    ];
    let cases = [
        ("attributes:ce-type", vec!["ce"]),
        ("attributes.a_b-1 = \"x\"", vec!["ab"]),
        ("attributes:\"iana.org/language_tag\"", vec!["iana"]),
        ("attributes.\"a b\" = \"c\"", vec!["space"]),
        ("attributes:a AND -attributes:b", vec!["only-a"]),
    ];
    for (number, (filter, expected)) in cases.into_iter().enumerate() {
        assert_eq!(passing(&api, &topic, number, filter, &messages).await, expected, "{filter}");
    }
    for (number, filter) in ["attributes:iana.org/x", "attributes.a=-1", "attributes:a -attributes:b"].into_iter().enumerate() {
        assert_eq!(create(&api, 50 + number, &topic, filter).await.unwrap_err(), Code::InvalidArgument, "{filter}");
    }
}

/// C034
async fn illegal_filters_are_refused(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let illegal = [
            "\"com\" = attributes.x",
            "attributes.a = attributes.b",
            "attributes.a > \"1\"",
            "attributes.a = 1",
            "data = \"x\"",
            "hasSuffix(attributes.a,\"x\")",
            "hasPrefix(attributes.a)",
            "attributes:a AND",
            "()",
            "attributes",
            "attributes.a = (\"a\" OR \"b\")",
            "attributes:a AND attributes:b OR attributes:c",
            "attributes.a = \"unterminated",
            "attributes:a)",
            "NOT",
            "((((((((attributes:a",
        ];
        for (number, filter) in illegal.into_iter().enumerate() {
            assert_eq!(create(&api, number, &topic, filter).await.unwrap_err(), Code::InvalidArgument, "{filter}");
            let name = api.subscription(&format!("filtered-{number}"));
            assert_eq!(code(&api.get_subscription(&name).await), Code::NotFound);
        }
    }
}

/// C035
async fn the_length_limit_counts_bytes(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let topic = api.create_topic("orders").await;
        let of = |bytes: usize| format!("attributes.k = \"{}\"", "x".repeat(bytes - "attributes.k = \"\"".len()));
        assert!(create(&api, 1, &topic, &of(256)).await.is_ok());
        assert_eq!(create(&api, 2, &topic, &of(257)).await.unwrap_err(), Code::InvalidArgument);
        let wide = format!("attributes.k = \"{}\"", "é".repeat(130));
        assert_eq!(create(&api, 3, &topic, &wide).await.unwrap_err(), Code::InvalidArgument);
    }
}

/// Combinations of the operators.
async fn the_truth_table_of_the_language(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let topic = api.create_topic("orders").await;
    let messages = [
        message("1").attribute("x", "1"),
        message("2").attribute("y", "2"),
        message("3").attribute("x", "1").attribute("y", "2"),
        message("4").attribute("x", ""),
        message("5"),
    ];
    let cases = [
        ("attributes:x", vec!["1", "3", "4"]),
        ("attributes.x = \"1\"", vec!["1", "3"]),
        ("attributes.x = \"\"", vec!["4"]),
        ("attributes:x AND attributes:y", vec!["3"]),
        ("attributes:x OR attributes:y", vec!["1", "2", "3", "4"]),
        ("NOT (attributes:x OR attributes:y)", vec!["5"]),
        ("NOT attributes:x AND NOT attributes:y", vec!["5"]),
        ("(attributes:x AND attributes:y) OR NOT attributes:x", vec!["2", "3", "5"]),
        ("hasPrefix(attributes.x, \"\")", vec!["1", "3", "4"]),
        ("hasPrefix(attributes.x, \"1\") AND attributes.y != \"2\"", vec!["1"]),
        ("attributes.x = \"\\x31\" AND attributes.y = \"\\u0032\"", vec!["3"]),
        ("", vec!["1", "2", "3", "4", "5"]),
    ];
    for (number, (filter, expected)) in cases.into_iter().enumerate() {
        assert_eq!(passing(&api, &topic, number, filter, &messages).await, expected, "{filter}");
    }
}

/// C037
async fn filtered_messages_do_not_disturb_the_order_of_the_others(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    let api = fixture.api().await;
    let (topic, subscription) = api
        .pair_with(|s| {
            s.enable_message_ordering = true;
            s.filter = "attributes.keep = \"y\"".into();
        })
        .await;
    let mut stream = api.stream_with(&subscription, |r| r.max_outstanding_messages = 1).await;
    for text in ["n", "y1", "n", "y2", "n", "y3"] {
        let keep = if text == "n" { "n" } else { "y" };
        api.publish(&topic, [message(text).key("k").attribute("keep", keep)]).await;
    }
    let first = stream.message().await;
    assert_eq!(first.text(), "y1");
    stream.nack(&first);
    for expected in ["y1", "y2", "y3"] {
        let received = stream.message().await;
        assert_eq!(received.text(), expected);
        stream.ack(&received);
    }
}

/// C038
async fn filtered_messages_stay_out_after_a_seek_and_of_the_dead_letter_topic(backend: Backend) {
    let fixture = Fixture::start(backend).await;
    for api in fixture.apis().await {
        let dead = api.create_topic("dead").await;
        let graveyard = api.create_subscription("graveyard", &dead).await;
        let policy = DeadLetterPolicy { dead_letter_topic: dead.clone(), max_delivery_attempts: 5 };
        let (topic, subscription) = api
            .pair_with(|s| {
                s.filter = "attributes.keep = \"y\"".into();
                s.retain_acked_messages = true;
                s.dead_letter_policy = Some(policy);
            })
            .await;
        api.publish(&topic, [message("n").attribute("keep", "n"), message("y").attribute("keep", "y")]).await;
        assert_eq!(api.take(&subscription).await.text(), "y");
        api.ok(SeekRequest { subscription: subscription.clone(), target: Some(Target::Time(timestamp(-3600))) }).await;
        assert_eq!(api.take(&subscription).await.text(), "y");
        assert!(api.pull_now(&subscription, 10).await.is_empty());
        api.assert_drained(&dead, &graveyard).await;
    }
}
