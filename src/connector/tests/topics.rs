use super::*;
use crate::model::StoragePolicy;

fn text<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

#[tokio::test]
async fn a_topic_is_created_once_read_and_deleted_once() {
    let rig = Rig::new().await;
    let draft = TopicDraft {
        labels: [("env".to_owned(), "prod".to_owned())].into(),
        message_storage_policy: Some(StoragePolicy {
            allowed_persistence_regions: vec!["europe-west1".into()],
            enforce_in_transit: true,
        }),
        kms_key_name: "projects/p/locations/l/keyRings/r/cryptoKeys/k".into(),
        message_retention: Some(Span::seconds(3600)),
        ..topic_draft("t11")
    };
    let created = rig.connector.create_topic(draft.clone()).await.unwrap().topic;
    assert_eq!(created.message_retention_ms, Some(3_600_000));
    assert_eq!((&created.labels, &created.kms_key_name), (&draft.labels, &draft.kms_key_name));
    assert_eq!(created.message_storage_policy, draft.message_storage_policy);
    assert_eq!(rig.connector.get_topic(&topic_name("t11")).await.unwrap().topic, created);
    assert_eq!(text(rig.connector.create_topic(draft).await), "Resource already exists in the project (resource=t11).");
    rig.connector.delete_topic(&topic_name("t11")).await.unwrap();
    for result in
        [rig.connector.get_topic(&topic_name("t11")).await.map(|_| ()), rig.connector.delete_topic(&topic_name("t11")).await]
    {
        assert_eq!(text(result), "Resource not found (resource=t11).");
    }
}

#[tokio::test]
async fn what_a_topic_can_not_do_is_refused_and_nothing_is_created() {
    let rig = Rig::new().await;
    let transform = TransformDraft { kind: TransformKind::Unknown, disabled: false, enabled: false };
    for (draft, field) in [
        (TopicDraft { name: "t1".into(), ..TopicDraft::default() }, "Invalid resource name given (name=t1)"),
        (TopicDraft { ingestion: true, ..topic_draft("t11") }, "ingestion_data_source_settings"),
        (TopicDraft { message_transforms: vec![transform], ..topic_draft("t11") }, "message_transforms"),
        (TopicDraft { message_retention: Some(Span::seconds(599)), ..topic_draft("t11") }, "message retention duration"),
        (TopicDraft { labels: [("A".to_owned(), String::new())].into(), ..topic_draft("t11") }, "Invalid labels"),
    ] {
        let error = text(rig.connector.create_topic(draft).await);
        assert!(error.contains(field), "{error}");
    }
    assert_eq!(rig.connector.list_topics("projects/p1", &page(0, "")).await.unwrap().items, []);
}

#[tokio::test]
async fn an_update_changes_the_named_fields_and_no_others() {
    let rig = Rig::new().await;
    let labels = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let draft = TopicDraft {
        labels: labels(&[("a", "1"), ("b", "2")]),
        message_retention: Some(Span::seconds(600)),
        ..topic_draft("t11")
    };
    let before = rig.connector.create_topic(draft).await.unwrap().topic;

    // The bad retention is not named, so it is not looked at.
    let update = TopicDraft { labels: labels(&[("b", "3")]), message_retention: Some(Span::seconds(1)), ..topic_draft("t11") };
    let after = rig.connector.update_topic(update.clone(), &mask(&["labels"])).await.unwrap().topic;
    assert_eq!((after.labels.clone(), after.message_retention_ms), (labels(&[("b", "3")]), Some(600_000)));
    assert_eq!(after.incarnation, before.incarnation);

    for bad in [&["labels", "message_retention_duration"][..], &["labels", "name"], &["labels", "nosuch"], &[]] {
        assert!(rig.connector.update_topic(TopicDraft { labels: labels(&[]), ..update.clone() }, &mask(bad)).await.is_err());
        assert_eq!(rig.connector.get_topic(&topic_name("t11")).await.unwrap().topic, after);
    }

    let cleared =
        rig.connector.update_topic(topic_draft("t11"), &mask(&["labels", "message_retention_duration"])).await.unwrap().topic;
    assert_eq!((cleared.labels, cleared.message_retention_ms), (labels(&[]), None));
    let missing = rig.connector.update_topic(topic_draft("t12"), &mask(&["labels"])).await;
    assert_eq!(missing, Err(Error::NotFound("t12".into())));
}

#[tokio::test]
async fn a_part_of_the_storage_policy_can_be_changed_alone() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let policy = |regions: &[&str], enforce_in_transit| {
        let allowed_persistence_regions = regions.iter().map(|r| r.to_string()).collect();
        Some(StoragePolicy { allowed_persistence_regions, enforce_in_transit })
    };
    let update = |message_storage_policy, path| {
        let draft = TopicDraft { message_storage_policy, ..topic_draft("t11") };
        let (connector, mask) = (rig.connector.clone(), mask(&[path]));
        async move { connector.update_topic(draft, &mask).await.map(|view| view.topic.message_storage_policy) }
    };
    assert!(update(policy(&[], true), "message_storage_policy.enforce_in_transit").await.is_err());
    let regions = update(policy(&["us"], true), "message_storage_policy.allowed_persistence_regions").await;
    assert_eq!(regions, Ok(policy(&["us"], false)));
    assert_eq!(update(policy(&[], true), "message_storage_policy.enforce_in_transit").await, Ok(policy(&["us"], true)));
    assert_eq!(update(None, "message_storage_policy").await, Ok(None));
}

#[tokio::test]
async fn lists_are_walked_in_pages_that_survive_changes() {
    let rig = Rig::new().await;
    for i in 0..25 {
        rig.topic(&format!("t{i:02}")).await;
    }
    rig.connector.create_topic(TopicDraft { name: "projects/p10/topics/t00".into(), ..TopicDraft::default() }).await.unwrap();
    let list = |size, token: String| {
        let connector = rig.connector.clone();
        async move {
            let page = connector.list_topics("projects/p1", &page(size, &token)).await.unwrap();
            (page.items.iter().map(|view| view.topic.name.id().to_owned()).collect::<Vec<_>>(), page.next_token)
        }
    };
    let ids = |range: std::ops::Range<usize>| range.map(|i| format!("t{i:02}")).collect::<Vec<_>>();
    let (first, token) = list(10, String::new()).await;
    assert_eq!(first, ids(0..10));
    // The last item of the page before and one of the next page go, others come before and after.
    for gone in ["t09", "t12"] {
        rig.connector.delete_topic(&topic_name(gone)).await.unwrap();
    }
    for new in ["t000", "t99"] {
        rig.topic(new).await;
    }
    let (second, token) = list(10, token).await;
    assert_eq!(second, [ids(10..12), ids(13..21)].concat());
    let (third, token) = list(10, token).await;
    assert_eq!((third, token.as_str()), ([ids(21..25), vec!["t99".into()]].concat(), ""));
    assert_eq!((list(0, String::new()).await.0.len(), list(5000, String::new()).await.0.len()), (25, 25));
    assert_eq!(list(25, String::new()).await.1, "");
}

#[tokio::test]
async fn page_tokens_of_other_lists_and_made_up_ones_are_refused() {
    let rig = Rig::new().await;
    for id in ["t11", "t12"] {
        rig.topic(id).await;
        rig.subscription(&format!("s{id}1"), "t11").await;
        rig.subscription(&format!("s{id}2"), "t11").await;
    }
    let token = rig.connector.list_topics("projects/p1", &page(1, "")).await.unwrap().next_token;
    assert!(!token.is_empty());
    let bad = "You have passed an invalid argument to the service (argument=page_token).";
    assert_eq!(text(rig.connector.list_topics("projects/p2", &page(1, &token)).await), bad);
    assert_eq!(text(rig.connector.list_subscriptions("projects/p1", &page(1, &token)).await.map(|_| ())), bad);
    assert_eq!(text(rig.connector.list_snapshots("projects/p1", &page(1, &token)).await), bad);
    assert_eq!(text(rig.connector.list_topic_subscriptions(&topic_name("t11"), &page(1, &token)).await), bad);
    let of_topic = rig.connector.list_topic_subscriptions(&topic_name("t11"), &page(1, "")).await.unwrap().next_token;
    assert_eq!(text(rig.connector.list_topic_subscriptions(&topic_name("t12"), &page(1, &of_topic)).await), bad);
    for garbage in ["x", "?", "AAAA", &token[1..], &format!("{token}A")] {
        assert_eq!(text(rig.connector.list_topics("projects/p1", &page(1, garbage)).await), bad, "{garbage}");
    }
    // Another node of the same cluster knows the token.
    let other = rig.second_node().await;
    assert_eq!(other.list_topics("projects/p1", &page(1, &token)).await.unwrap().items[0].topic.name.id(), "t12");
    let error = text(rig.connector.list_topics("projects/p1", &page(-1, "")).await);
    assert!(error.contains("page_size") && error.contains("-1"), "{error}");
    for project in ["p1", "projects/", "projects/a/b", ""] {
        assert!(text(rig.connector.list_topics(project, &page(0, "")).await).contains(&format!("(name={project})")));
    }
}

#[tokio::test]
async fn concurrent_updates_of_different_fields_all_hold() {
    let rig = Rig::new().await;
    rig.topic("t11").await;
    let retention = TopicDraft { message_retention: Some(Span::seconds(700)), ..topic_draft("t11") };
    let labels = TopicDraft { labels: [("a".to_owned(), "1".to_owned())].into(), ..topic_draft("t11") };
    let key = TopicDraft { kms_key_name: "projects/p/locations/l/keyRings/r/cryptoKeys/k".into(), ..topic_draft("t11") };
    let (a, b) = (rig.connector.clone(), rig.second_node().await);
    let masks = [mask(&["message_retention_duration"]), mask(&["labels"]), mask(&["kms_key_name"])];
    let (x, y, z) =
        tokio::join!(a.update_topic(retention, &masks[0]), b.update_topic(labels, &masks[1]), a.update_topic(key, &masks[2]));
    assert!(x.is_ok() && y.is_ok() && z.is_ok());
    let topic = rig.connector.get_topic(&topic_name("t11")).await.unwrap().topic;
    assert_eq!((topic.message_retention_ms, topic.labels.len(), topic.kms_key_name.is_empty()), (Some(700_000), 1, false));
}

#[tokio::test]
async fn pages_of_large_resources_are_short_enough_for_any_client() {
    let rig = Rig::new().await;
    let labels: std::collections::BTreeMap<_, _> = (0..64).map(|i| (format!("k{i}"), "値".repeat(63))).collect();
    let bytes: usize = labels.iter().map(|(k, v)| k.len() + v.len()).sum();
    for i in 0..200 {
        let draft = TopicDraft { labels: labels.clone(), ..topic_draft(&format!("t{i:03}")) };
        rig.connector.create_topic(draft).await.unwrap();
    }
    let (mut token, mut seen, mut pages) = (String::new(), 0, 0);
    loop {
        let page = rig.connector.list_topics("projects/p1", &page(1000, &token)).await.unwrap();
        assert!(page.items.len() * bytes < 2 * 1024 * 1024, "{}", page.items.len());
        for topic in &page.items {
            assert_eq!(topic.topic.name.id(), format!("t{seen:03}"));
            seen += 1;
        }
        (token, pages) = (page.next_token, pages + 1);
        if token.is_empty() {
            break;
        }
    }
    assert!(seen == 200 && pages > 1);
}
