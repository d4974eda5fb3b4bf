use super::*;
use crate::model::{DeadLetterPolicy, ExpirationPolicy, OidcToken, PushConfig, PushWrapper, RetryPolicy};

fn text<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

async fn update(rig: &Rig, draft: SubscriptionDraft, paths: &[&str]) -> Result<Subscription, Error> {
    let draft = SubscriptionDraft { name: "projects/p1/subscriptions/s11".into(), ..draft };
    rig.connector.update_subscription(draft, &mask(paths)).await.map(|view| view.subscription)
}

fn none() -> SubscriptionDraft {
    SubscriptionDraft::default()
}

#[tokio::test]
async fn defaults_are_filled_in_when_a_subscription_is_created() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let created = rig.subscription("s11", "t11").await;
    assert_eq!((created.ack_deadline_seconds, created.message_retention_ms), (10, 604_800_000));
    assert_eq!(created.expiration_policy, ExpirationPolicy::After { seconds: 2_678_400, nanos: 0 });
    assert_eq!((&created.push_config, &created.retry_policy), (&PushConfig::default(), &None));
    let SubscriptionView { subscription, topic } = rig.connector.get_subscription(&subscription_name("s11")).await.unwrap();
    assert_eq!((subscription, topic.unwrap().topic.name.id()), (created, "t11"));
    let again = rig.connector.create_subscription(subscription_draft("s11", "t11")).await.map(|_| ());
    assert_eq!(text(again), "Resource already exists in the project (resource=s11).");
}

#[tokio::test]
async fn a_subscription_needs_an_existing_topic_and_an_existing_dead_letter_topic() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let dead_letter = |topic: &str| Some(DeadLetterDraft { dead_letter_topic: topic.into(), ..DeadLetterDraft::default() });
    for (draft, expected) in [
        (SubscriptionDraft { topic: String::new(), ..subscription_draft("s11", "") }, "Invalid resource name given (name=)"),
        (subscription_draft("s11", "none"), "Resource not found (resource=none)."),
        (
            SubscriptionDraft { dead_letter_policy: dead_letter("projects/p1/topics/dead"), ..subscription_draft("s11", "t11") },
            "Resource not found (resource=dead).",
        ),
        (
            SubscriptionDraft { dead_letter_policy: dead_letter("dead"), ..subscription_draft("s11", "t11") },
            "Invalid resource name given (name=dead)",
        ),
        (SubscriptionDraft { exports: vec!["bigquery_config"], ..subscription_draft("s11", "t11") }, "bigquery_config"),
        (SubscriptionDraft { filter: "data".into(), ..subscription_draft("s11", "t11") }, "filter"),
    ] {
        let error = text(rig.connector.create_subscription(draft).await.map(|_| ()));
        assert!(error.contains(expected), "{error}");
    }
    assert!(rig.connector.list_subscriptions("projects/p1", &page(0, "")).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn an_unnamed_subscription_gets_a_name_in_its_topics_project() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let draft = SubscriptionDraft { name: String::new(), ..subscription_draft("", "t11") };
    let a = rig.connector.create_subscription(draft.clone()).await.unwrap().subscription;
    let b = rig.connector.create_subscription(draft).await.unwrap().subscription;
    assert_eq!(a.name.project(), "p1");
    assert_ne!(a.name, b.name);
    assert_eq!(rig.connector.get_subscription(&a.name).await.unwrap().subscription, a);
}

#[tokio::test]
async fn a_subscription_may_live_in_another_project_than_its_topic() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let draft = SubscriptionDraft { name: "projects/p2/subscriptions/s11".into(), ..subscription_draft("", "t11") };
    let subscription = rig.connector.create_subscription(draft).await.unwrap().subscription;
    rig.publish("t11", "a").await;
    assert_eq!(rig.pulled(&subscription).await, ["a"]);
    let attached = rig.connector.list_topic_subscriptions(&topic_name("t11"), &page(0, "")).await.unwrap();
    assert_eq!(attached.items, ["projects/p2/subscriptions/s11"]);
    assert!(rig.connector.list_subscriptions("projects/p1", &page(0, "")).await.unwrap().items.is_empty());
    assert_eq!(rig.connector.list_subscriptions("projects/p2", &page(0, "")).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn every_mutable_field_can_be_set_and_reset_alone() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    rig.topic("dead").await;
    let original = rig.subscription("s11", "t11").await;
    let push = PushConfig { endpoint: "http://a/".into(), ..PushConfig::default() };
    let topic = || "projects/p1/topics/dead".to_owned();
    let policy = Some(DeadLetterDraft { dead_letter_topic: topic(), max_delivery_attempts: 7, topic_cleared: false });
    let retry = Some(RetryDraft { minimum_backoff: Some(Span::seconds(1)), maximum_backoff: Some(Span::seconds(2)) });
    let labels = || [("a".to_owned(), "b".to_owned())].into();
    for (path, draft) in [
        ("push_config", SubscriptionDraft { push_config: push, ..none() }),
        ("ack_deadline_seconds", SubscriptionDraft { ack_deadline_seconds: 99, ..none() }),
        ("retain_acked_messages", SubscriptionDraft { retain_acked_messages: true, ..none() }),
        ("message_retention_duration", SubscriptionDraft { message_retention: Some(Span::seconds(700)), ..none() }),
        ("labels", SubscriptionDraft { labels: labels(), ..none() }),
        ("expiration_policy", SubscriptionDraft { expiration_policy: Some(None), ..none() }),
        ("dead_letter_policy", SubscriptionDraft { dead_letter_policy: policy, ..none() }),
        ("retry_policy", SubscriptionDraft { retry_policy: retry, ..none() }),
        ("enable_exactly_once_delivery", SubscriptionDraft { enable_exactly_once_delivery: true, ..none() }),
    ] {
        let changed = update(&rig, draft, &[path]).await.unwrap();
        assert_ne!(changed, original, "{path}");
        assert_eq!(rig.connector.get_subscription(&original.name).await.unwrap().subscription, changed);
        assert_eq!(update(&rig, none(), &[path]).await.unwrap(), original, "{path}");
    }
    for (path, draft) in [
        ("bigquery_config", SubscriptionDraft { exports: vec!["bigquery_config"], ..none() }),
        ("cloud_storage_config.bucket", SubscriptionDraft { exports: vec!["cloud_storage_config"], ..none() }),
    ] {
        assert!(text(update(&rig, draft, &[path]).await).contains(path.split('.').next().unwrap()));
        assert_eq!(update(&rig, none(), &[path]).await.unwrap(), original);
    }
}

#[tokio::test]
async fn a_bad_update_changes_nothing() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let original = rig.subscription("s11", "t11").await;
    let draft = || SubscriptionDraft { ack_deadline_seconds: 30, filter: "attributes:a".into(), ..none() };
    for (draft, paths, expected) in [
        (draft(), &["ack_deadline_seconds", "filter"][..], "the 'filter' field in the Subscription is not mutable"),
        (draft(), &["enable_message_ordering"], "the 'enable_message_ordering' field in the Subscription is not mutable"),
        (draft(), &["topic"], "not mutable"),
        (draft(), &["labels", "nosuch_field"], "'nosuch_field' is not a known Subscription field"),
        (draft(), &["ackDeadlineSeconds"], "is not a known Subscription field"),
        (draft(), &[], "The update_mask in the UpdateSubscriptionRequest must be set"),
        (SubscriptionDraft { ack_deadline_seconds: 5, ..none() }, &["retain_acked_messages", "ack_deadline_seconds"], "5"),
        (SubscriptionDraft { expiration_policy: Some(Some(Span::seconds(3600))), ..none() }, &["expiration_policy"], "24h"),
    ] {
        let error = text(update(&rig, draft, paths).await);
        assert!(error.contains(expected), "{error}");
        assert_eq!(rig.connector.get_subscription(&original.name).await.unwrap().subscription, original);
    }
}

#[tokio::test]
async fn parts_of_the_dead_letter_policy_change_alone() {
    const TOPIC: &str = "dead_letter_policy.dead_letter_topic";
    const ATTEMPTS: &str = "dead_letter_policy.max_delivery_attempts";
    let rig = Rig::new().await;
    for id in ["t11", "dead"] {
        rig.topic(id).await;
    }
    rig.subscription("s11", "t11").await;
    let draft = |topic: &str, max_delivery_attempts| SubscriptionDraft {
        dead_letter_policy: Some(DeadLetterDraft {
            dead_letter_topic: topic.into(),
            max_delivery_attempts,
            topic_cleared: false,
        }),
        ..none()
    };
    let policy = |topic: Option<&str>, max_delivery_attempts| {
        Ok(Some(DeadLetterPolicy { dead_letter_topic: topic.map(topic_name), max_delivery_attempts }))
    };
    let run = async |draft, paths: &[&str]| update(&rig, draft, paths).await.map(|s| s.dead_letter_policy);
    let dead = "projects/p1/topics/dead";
    assert!(run(draft("", 20), &[ATTEMPTS]).await.is_err(), "attempts without a topic make no policy");
    assert_eq!(run(draft(dead, 10), &["dead_letter_policy"]).await, policy(Some("dead"), 10));
    assert_eq!(run(draft("", 20), &[ATTEMPTS]).await, policy(Some("dead"), 20));
    assert_eq!(run(none(), &[ATTEMPTS]).await, policy(Some("dead"), 5));
    assert!(run(draft("", 10), &["dead_letter_policy"]).await.is_err(), "a whole policy needs its topic");
    assert_eq!(run(draft("projects/p1/topics/none", 0), &[TOPIC]).await, Err(Error::NotFound("none".into())));
    assert_eq!(run(none(), &[TOPIC]).await, policy(None, 5));
    assert_eq!(run(draft("", 6), &[ATTEMPTS]).await, policy(None, 6));
    assert_eq!(run(draft(dead, 0), &[TOPIC]).await, policy(Some("dead"), 6));
    assert_eq!(run(none(), &[TOPIC, ATTEMPTS]).await, Ok(None));
    // A policy whose topic was deleted does not stand in the way of other changes.
    assert_eq!(run(draft(dead, 10), &["dead_letter_policy"]).await, policy(Some("dead"), 10));
    rig.connector.delete_topic(&topic_name("dead")).await.unwrap();
    assert_eq!(run(draft("", 11), &[ATTEMPTS]).await, policy(Some("dead"), 11));
}

#[tokio::test]
async fn halves_of_the_retry_policy_and_parts_of_the_push_config_change_alone() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    rig.subscription("s11", "t11").await;
    let retry = |minimum: Option<i64>, maximum: Option<i64>| SubscriptionDraft {
        retry_policy: Some(RetryDraft {
            minimum_backoff: minimum.map(Span::seconds),
            maximum_backoff: maximum.map(Span::seconds),
        }),
        ..none()
    };
    let run = async |draft, path| {
        update(&rig, draft, &[path])
            .await
            .unwrap()
            .retry_policy
            .map(|p: RetryPolicy| (p.minimum_backoff_ms, p.maximum_backoff_ms))
    };
    assert_eq!(run(none(), "retry_policy.minimum_backoff").await, None);
    assert_eq!(run(retry(Some(20), Some(1)), "retry_policy.minimum_backoff").await, Some((20_000, 600_000)));
    assert_eq!(run(retry(Some(1), Some(60)), "retry_policy.maximum_backoff").await, Some((20_000, 60_000)));
    assert_eq!(run(none(), "retry_policy.minimum_backoff").await, Some((10_000, 60_000)));
    assert_eq!(run(none(), "retry_policy").await, None);

    let token = |email: &str, audience: &str| Some(OidcToken { service_account_email: email.into(), audience: audience.into() });
    let push = |endpoint: &str, oidc_token, wrapper| SubscriptionDraft {
        push_config: PushConfig { endpoint: endpoint.into(), oidc_token, wrapper, ..PushConfig::default() },
        ..none()
    };
    let bare = PushWrapper::None { write_metadata: true };
    let run = async |draft, path| update(&rig, draft, &[path]).await.map(|s| s.push_config);
    assert_eq!(run(push("http://a/", None, Some(bare)), "push_config.push_endpoint").await.unwrap().wrapper, None);
    assert!(run(push("", token("", "x"), None), "push_config.oidc_token.audience").await.is_err());
    assert!(run(push("", token("e", "x"), None), "push_config.oidc_token.service_account_email").await.is_ok());
    let config = run(push("", token("f", "y"), None), "push_config.oidc_token.audience").await.unwrap();
    assert_eq!((config.endpoint.as_str(), config.oidc_token), ("http://a/", token("e", "y")));
    assert_eq!(run(push("", None, Some(bare)), "push_config.no_wrapper").await.unwrap().wrapper, Some(bare));
    assert_eq!(run(push("", None, None), "push_config.pubsub_wrapper").await.unwrap().wrapper, Some(bare));
    assert_eq!(run(push("", None, None), "push_config.no_wrapper").await.unwrap().wrapper, None);
    assert_eq!(run(none(), "push_config").await, Ok(PushConfig::default()));
}

#[tokio::test]
async fn exactly_once_and_push_exclude_each_other_however_they_are_set() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let push = PushConfig { endpoint: "http://a/".into(), ..PushConfig::default() };
    let both =
        SubscriptionDraft { enable_exactly_once_delivery: true, push_config: push.clone(), ..subscription_draft("s11", "t11") };
    assert!(text(rig.connector.create_subscription(both.clone()).await.map(|_| ())).contains("enable_exactly_once_delivery"));
    rig.subscription("s11", "t11").await;
    let name = subscription_name("s11");
    assert!(update(&rig, both.clone(), &["push_config", "enable_exactly_once_delivery"]).await.is_err());
    update(&rig, both.clone(), &["enable_exactly_once_delivery"]).await.unwrap();
    assert!(update(&rig, both.clone(), &["push_config"]).await.is_err());
    assert!(rig.connector.modify_push_config(&name, &push).await.is_err());
    update(&rig, none(), &["enable_exactly_once_delivery"]).await.unwrap();
    rig.connector.modify_push_config(&name, &push).await.unwrap();
    assert!(update(&rig, both, &["enable_exactly_once_delivery"]).await.is_err());
    rig.connector.modify_push_config(&name, &PushConfig::default()).await.unwrap();
    assert_eq!(rig.connector.get_subscription(&name).await.unwrap().subscription.push_config, PushConfig::default());
    let bad = PushConfig { endpoint: "ftp://a/".into(), ..PushConfig::default() };
    assert!(text(rig.connector.modify_push_config(&name, &bad).await).contains("push_config.push_endpoint"));
}

#[tokio::test]
async fn a_subscription_outlives_its_topic_and_is_not_taken_over_by_the_next_one() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let subscription = rig.subscription("s11", "t11").await;
    rig.publish("t11", "old").await;
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    let is_orphan = async || rig.connector.get_subscription(&subscription.name).await.unwrap().topic.is_none();
    assert!(is_orphan().await);
    let error = rig.connector.publish(&topic_name("t11"), vec![message("x")]).await;
    assert_eq!(error, Err(Error::NotFound("t11".into())));

    rig.topic("t11").await;
    rig.publish("t11", "new").await;
    assert!(is_orphan().await);
    assert!(rig.connector.list_subscriptions("projects/p1", &page(0, "")).await.unwrap().items[0].topic.is_none());
    assert_eq!(rig.connector.list_topic_subscriptions(&topic_name("t11"), &page(0, "")).await.unwrap().items, [""; 0]);
    assert_eq!(rig.pulled(&subscription).await, ["old"]);
    assert!(rig.connector.create_subscription(subscription_draft("s11", "t11")).await.is_err());
    // It can still be changed and deleted.
    let changed = update(&rig, SubscriptionDraft { ack_deadline_seconds: 20, ..none() }, &["ack_deadline_seconds"]).await;
    assert_eq!(changed.unwrap().ack_deadline_seconds, 20);
    rig.connector.delete_subscription(&subscription.name).await.unwrap();
    let again = rig.connector.delete_subscription(&subscription.name).await;
    assert_eq!(again, Err(Error::NotFound("s11".into())));
}

#[tokio::test]
async fn a_detached_subscription_stays_known_without_messages() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let (s1, s2) = (rig.subscription("s11", "t11").await, rig.subscription("s12", "t11").await);
    rig.publish("t11", "a").await;
    for _ in 0..2 {
        rig.connector.detach_subscription(&s2.name).await.unwrap();
    }
    let update = SubscriptionDraft { ack_deadline_seconds: 20, ..subscription_draft("s12", "") };
    rig.connector.update_subscription(update, &mask(&["ack_deadline_seconds"])).await.unwrap();
    rig.publish("t11", "b").await;
    let listed = rig.connector.list_topic_subscriptions(&topic_name("t11"), &page(0, "")).await.unwrap().items;
    assert_eq!(listed, [s1.name.to_string()]);
    let view = rig.connector.get_subscription(&s2.name).await.unwrap();
    assert!(view.subscription.detached && view.topic.is_some());
    assert_eq!(rig.connector.list_subscriptions("projects/p1", &page(0, "")).await.unwrap().items.len(), 2);
    assert_eq!((rig.pulled(&s1).await, rig.pulled(&s2).await), (vec!["a".into(), "b".into()], Vec::<String>::new()));
    let missing = rig.connector.detach_subscription(&subscription_name("none")).await;
    assert_eq!(missing, Err(Error::NotFound("none".into())));
}

#[tokio::test]
async fn an_idle_subscription_is_removed_after_its_time_to_live_and_not_before() {
    const DAY_MS: u64 = 86_400_000;
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let create = |id, expiration_policy| {
        let draft = SubscriptionDraft { expiration_policy, ..subscription_draft(id, "t11") };
        let connector = rig.connector.clone();
        async move { connector.create_subscription(draft).await.unwrap().subscription }
    };
    let day = Some(Some(Span::seconds(86_400)));
    let (used, idle, forever) = (create("used", day).await, create("idle", day).await, create("forever", Some(None)).await);
    rig.advance_ms(DAY_MS / 2);
    rig.connector.get_subscription(&used.name).await.unwrap();
    rig.connector.remove_idle_subscriptions().await.unwrap();
    rig.advance_ms(DAY_MS / 2 + 1);
    rig.connector.remove_idle_subscriptions().await.unwrap();
    let known = async |subscription: &Subscription| {
        rig.broker.get(crate::broker::Kind::Subscription, subscription.name.as_str()).await.unwrap().is_some()
    };
    assert_eq!((known(&used).await, known(&idle).await, known(&forever).await), (true, false, true));
    rig.advance_ms(40 * DAY_MS);
    rig.connector.remove_idle_subscriptions().await.unwrap();
    assert_eq!((known(&used).await, known(&forever).await), (false, true));
}
