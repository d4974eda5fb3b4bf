use super::*;

fn text<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

fn map(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

#[test]
fn labels_follow_the_rules_of_the_cloud() {
    let long = "a".repeat(63);
    for good in [map(&[]), map(&[("a", "")]), map(&[("env-1_x", "0-_z")]), map(&[(&long, &long)]), map(&[("ключ", "値１")])]
    {
        assert!(labels(&good).is_ok(), "{good:?}");
    }
    let longer = "a".repeat(64);
    for bad in [
        map(&[("", "x")]),
        map(&[("1a", "x")]),
        map(&[("-a", "x")]),
        map(&[("A", "x")]),
        map(&[("aB", "x")]),
        map(&[("a b", "x")]),
        map(&[("a", "X")]),
        map(&[("a", "x.y")]),
        map(&[(&longer, "x")]),
        map(&[("a", &longer)]),
    ] {
        let error = text(labels(&bad));
        assert!(error.starts_with("You have passed an invalid argument to the service (argument=Invalid labels: "), "{error}");
    }
    let many = |count: usize| (0..count).map(|i| (format!("k{i}"), String::new())).collect::<Labels>();
    assert!(labels(&many(64)).is_ok());
    assert!(text(labels(&many(65))).contains("65"));
}

#[test]
fn retention_is_ten_minutes_to_thirty_one_days() {
    let ms = |seconds, nanos| subscription_retention_ms(Some(Span { seconds, nanos }));
    assert_eq!(subscription_retention_ms(None), Ok(604_800_000));
    assert_eq!(topic_retention_ms(None), Ok(None));
    assert_eq!(ms(600, 0), Ok(600_000));
    assert_eq!(ms(600, 500_000_000), Ok(600_500));
    assert_eq!(ms(2_678_400, 0), Ok(2_678_400_000));
    assert_eq!(
        text(ms(599, 0)),
        "The value for message retention duration is out of bounds. You passed 9m59s in the request, but the value must be between 10m and 744h."
    );
    for (seconds, nanos) in [(0, 0), (-600, 0), (599, 999_999_999), (2_678_400, 1), (700, -1), (i64::MAX, 0)] {
        assert!(ms(seconds, nanos).is_err(), "{seconds} {nanos}");
        assert!(topic_retention_ms(Some(Span { seconds, nanos })).is_err(), "{seconds} {nanos}");
    }
}

#[test]
fn ack_deadlines_are_ten_to_six_hundred_seconds_and_zero_is_the_default() {
    let options = Options { default_ack_deadline_seconds: 17, ..Options::default() };
    for (given, result) in [(0, Some(17)), (10, Some(10)), (600, Some(600)), (9, None), (1, None), (601, None), (-1, None)] {
        assert_eq!(ack_deadline_seconds(given, &options).ok(), result, "{given}");
    }
    assert!(text(ack_deadline_seconds(9, &options)).contains("ack_deadline_seconds"));
}

#[test]
fn expiration_is_at_least_a_day_or_never() {
    let day = Span::seconds(86_400);
    assert_eq!(expiration(None), Ok(ExpirationPolicy::After { seconds: 2_678_400, nanos: 0 }));
    assert_eq!(expiration(Some(None)), Ok(ExpirationPolicy::Never));
    assert_eq!(expiration(Some(Some(day))), Ok(ExpirationPolicy::After { seconds: 86_400, nanos: 0 }));
    assert_eq!(
        text(expiration(Some(Some(Span::seconds(3600))))),
        "The value for expiration duration is too small. You passed 1h in the request, but the minimum value is 24h."
    );
    assert!(expiration(Some(Some(Span { seconds: 86_400, nanos: -1 }))).is_err());
}

#[test]
fn a_bad_filter_is_named_as_such() {
    assert_eq!(filter(""), Ok(String::new()));
    assert_eq!(filter("attributes:a"), Ok("attributes:a".into()));
    assert!(text(filter("data = \"x\"")).contains("argument=filter: "));
    assert!(text(filter(&"a".repeat(257))).contains("256"));
}

#[test]
fn retry_policies_are_completed_and_bounded() {
    let policy = |minimum: Option<i64>, maximum: Option<i64>| {
        let draft = RetryDraft { minimum_backoff: minimum.map(Span::seconds), maximum_backoff: maximum.map(Span::seconds) };
        retry(Some(&draft)).map(|p| p.map(|p| (p.minimum_backoff_ms, p.maximum_backoff_ms)))
    };
    assert_eq!(retry(None), Ok(None));
    for (minimum, maximum, result) in [
        (None, None, (10_000, 600_000)),
        (Some(20), None, (20_000, 600_000)),
        (None, Some(60), (10_000, 60_000)),
        (Some(0), Some(0), (0, 0)),
        (Some(600), Some(600), (600_000, 600_000)),
    ] {
        assert_eq!(policy(minimum, maximum), Ok(Some(result)));
    }
    assert_eq!(
        text(policy(Some(601), None)),
        "The value for minimum_backoff is out of bounds. You passed 601s in the request, but the value must be between 0s and 600s."
    );
    for (minimum, maximum) in [(None, Some(601)), (Some(-1), None), (Some(60), Some(10)), (None, Some(9))] {
        assert!(policy(minimum, maximum).is_err(), "{minimum:?} {maximum:?}");
    }
}

#[test]
fn dead_letter_policies_need_a_topic_and_five_to_a_hundred_attempts() {
    let policy = |topic: &str, attempts| {
        let draft = DeadLetterDraft { dead_letter_topic: topic.into(), max_delivery_attempts: attempts, topic_cleared: false };
        dead_letter(Some(&draft)).map(|p| p.unwrap().max_delivery_attempts)
    };
    let topic = "projects/p1/topics/dead";
    assert_eq!((policy(topic, 0), policy(topic, 5), policy(topic, 100)), (Ok(5), Ok(5), Ok(100)));
    assert_eq!(
        text(policy(topic, 4)),
        "The value for max_delivery_attempts is too small. You passed 4 in the request, but the minimum value is 5."
    );
    assert_eq!(
        text(policy(topic, 101)),
        "The value for max_delivery_attempts is too large. You passed 101 in the request, but the maximum value is 100."
    );
    assert!(text(policy("", 5)).starts_with("Invalid resource name given (name=)."));
    assert!(policy("dead", 5).is_err() && policy(topic, -1).is_err());
    let cleared = dead_letter(Some(&DeadLetterDraft { topic_cleared: true, ..DeadLetterDraft::default() })).unwrap().unwrap();
    assert_eq!((cleared.dead_letter_topic, cleared.max_delivery_attempts), (None, 5));
}

#[test]
fn key_names_and_regions_have_their_form_checked() {
    assert!(kms_key_name("").is_ok());
    assert!(kms_key_name("projects/p/locations/l/keyRings/r/cryptoKeys/k").is_ok());
    for bad in ["k", "projects/p/locations/l/keyRings/r/cryptoKeys/", "projects/p/locations/l/keyRings/r/cryptoKeys/k/x"] {
        assert!(text(kms_key_name(bad)).contains("kms_key_name"), "{bad}");
    }
    let policy = |regions: &[&str]| {
        let regions = regions.iter().map(|r| r.to_string()).collect();
        storage_policy(Some(&StoragePolicy { allowed_persistence_regions: regions, enforce_in_transit: true }))
    };
    assert_eq!(storage_policy(None), Ok(None));
    assert!(policy(&["europe-west1", "us"]).is_ok());
    assert!(text(policy(&[])).contains("message_storage_policy.allowed_persistence_regions"));
    assert!(policy(&["eu west"]).is_err() && policy(&[""]).is_err());
}

#[test]
fn what_is_not_honoured_is_refused_by_its_field_name() {
    assert!(text(unsupported::ingestion(true)).contains("ingestion_data_source_settings"));
    assert!(text(unsupported::exports(&["bigquery_config"])).contains("bigquery_config"));
    assert!(text(unsupported::exactly_once_push(true, "http://a/")).contains("enable_exactly_once_delivery"));
    assert!(unsupported::exactly_once_push(true, "").is_ok() && unsupported::exactly_once_push(false, "http://a/").is_ok());
}

#[test]
fn an_expire_time_is_in_the_next_seven_days() {
    let now_ms = 1_700_000_000_000;
    let check = |ms: u64| expire_time_ms(Some(Span::from_ms(ms)), now_ms);
    assert_eq!((check(now_ms + 1), check(now_ms + 604_800_000)), (Ok(now_ms + 1), Ok(now_ms + 604_800_000)));
    assert!(check(now_ms).is_err() && check(now_ms + 604_800_001).is_err() && check(0).is_err());
    assert!(text(expire_time_ms(None, now_ms)).contains("expire_time"));
    for (seconds, nanos) in [(253_402_300_800, 0), (-62_135_596_801, 0), (5, -1), (5, 1_000_000_000)] {
        assert!(timestamp("time", Span { seconds, nanos }).is_err());
    }
    assert!(timestamp("time", Span { seconds: 253_402_300_799, nanos: 999_999_999 }).is_ok());
}
