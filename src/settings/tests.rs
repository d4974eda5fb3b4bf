#![allow(clippy::unwrap_used)]

use std::fs;

use super::*;

fn set(texts: &[&str]) -> Result<Loaded, Vec<Wrong>> {
    load(None, [], &texts.iter().map(ToString::to_string).collect::<Vec<_>>())
}

fn env(items: &[(&str, &str)]) -> Result<Loaded, Vec<Wrong>> {
    load(None, items.iter().map(|(k, v)| (k.to_string(), v.to_string())), &[])
}

fn file(name: &str, text: &str) -> Result<Loaded, Vec<Wrong>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    fs::write(&path, text).unwrap();
    load(Some(&path), [], &[])
}

/// The only error's text.
fn error(result: Result<Loaded, Vec<Wrong>>) -> String {
    let wrong = result.unwrap_err();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    let text = wrong[0].to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    text
}

#[test]
fn without_any_source_every_key_has_its_documented_default() {
    let settings = env(&[("PATH", "/bin"), ("PUBSUB_PROJECT_ID", "x")]).unwrap().settings;
    assert_eq!(settings.port, 8085);
    assert_eq!(settings.broker, BrokerUrl::Embedded("./data".into()));
    assert_eq!(settings.max_concurrent_streams, 65_536);
    assert_eq!(settings.connector.max_message_bytes, 10_485_760);
    assert!(settings.enable_reflection);
}

#[test]
fn every_default_is_in_its_own_range() {
    for key in keys::KEYS {
        let mut settings = Settings::default();
        let default = (key.get)(&settings);
        assert!((key.set)(&mut settings, &default), "{} = {default:?}", key.name);
        assert_eq!((key.get)(&settings), default, "{}", key.name);
    }
}

#[test]
fn each_range_ends_where_it_says() {
    for (key, good, bad) in [
        ("PORT", &["0", "65535"][..], &["-1", "65536", "", "8o85", "1.0", "+1"][..]),
        ("OTLP_ENDPOINT", &["", "http://otel:4317", "https://otel.example/otlp"], &["otel:4317", "http://otel/"]),
        ("OTLP_PROTOCOL", &["grpc", "http"], &["", "json"]),
        ("OTLP_METRICS_SECONDS", &["0", "86400"], &["-1", "86401"]),
        ("OTLP_TRACES", &["off"], &["", "on", "1.1", "-0.1", "NaN"]),
        ("OTLP_RESOURCE_ATTRIBUTES", &["", "service.name=messages,deployment.environment.name=prod"], &["prod", "=x"]),
        ("DEFAULT_ACK_DEADLINE_SECONDS", &["10", "600"], &["9", "601"]),
        ("MAX_OUTSTANDING_MESSAGES", &["1", "4294967295"], &["0", "-5", "4294967296"]),
        ("MAX_INFLIGHT_PER_SUBSCRIPTION", &["1"], &["0"]),
        ("STREAM_CLOSE_SECONDS", &["1"], &["0", "18446744073709551616"]),
        ("MAX_MESSAGE_BYTES", &["1", "2147483647"], &["0", "2147483648"]),
        ("MAX_CONCURRENT_STREAMS", &["1", "2147483647"], &["0", "2147483648"]),
        ("MAX_CONNECTIONS", &["1"], &["0"]),
        ("MAX_ACK_EXTENSION_SECONDS", &["0", "3600"], &["3601"]),
        ("MIN_ACK_EXTENSION_SECONDS", &["0", "10"], &["11"]),
        ("NACK_BYPASSES_BACKOFF", &["true", "FALSE"], &["yes", "1", ""]),
        ("EXACTLY_ONCE_SCOPE", &["cluster", "node"], &["both", "Node"]),
        ("PUSH_INTERNAL_NETWORKS", &["allow", "deny"], &["", "true", "Allow"]),
        (
            "PUSH_ISSUER",
            &["", "http://landline:8085", "https://id.example/landline"],
            &["id.example", "https://", "https://id.example/", "ftp://x", "https:///x", "https://x?y"],
        ),
        ("LIMIT_TOPICS", &["0", "1000000"], &["-1", "1000001"]),
        ("AUTH", &["", "off", "audit"], &["on", "Enforce"]),
        ("AUTH_ADMINS", &["", "serviceAccount:a@b, user:c@d", "allAuthenticatedUsers"], &["a@b", "serviceAccount:"]),
        ("AUTH_OIDC_ISSUERS", &[""], &["example.com", "http://example.com"]),
        ("NODE_ID", &["", "node-1.a_b"], &["a b", "a/b", &"x".repeat(65)]),
        (
            "ADVERTISED_ENDPOINT",
            &["", "pubsub.example:443", "[::1]:8085"],
            &["host", "host:0", ":1", "a b:1", "http://h:1", "::1:1"],
        ),
        (
            "BIND",
            &["localhost", "0.0.0.0", "[::]", "::1", "10.0.0.1, [::1]"],
            &["", "example.com", "0.0.0.0:80", "[::1", "1.2.3"],
        ),
        (
            "BROKER_URL",
            &["memory:", "embedded:/x", "redis://h", "rediss://u:p@h:1/0", "redis+cluster://a:1,b:2", "redis+sentinel://s/m"],
            &["embedded:", "memory:x", "redis:h", "redis://", "http://h", "/data", ""],
        ),
        ("DURABILITY", &["none", "fsync"], &["replicas:0", "replicas:17", "replicas", "disk"]),
        ("LOG", &["off", "debug", "warn,landline=trace"], &["verbose", "landline=loud", ""]),
        ("LOG_FORMAT", &["text", "json"], &["xml"]),
        ("PRELOAD", &["", "proj,topic:sub1:sub2,other;second,third"], &["proj", "proj,to", "proj,topic:", "pr/oj,topic"]),
    ] {
        for value in good {
            set(&[&format!("{key}={value}"), "AUTH=off"]).unwrap_or_else(|e| panic!("{e:?}"));
        }
        for value in bad {
            let text = error(set(&[&format!("{key}={value}")]));
            assert!(text.contains(key) && text.contains(&format!("{value:?}")) && text.contains("must be"), "{text}");
        }
    }
}

#[test]
fn the_error_names_key_value_and_range_as_given_in_each_source() {
    assert_eq!(
        error(env(&[("CONNECTORS_GCP_DEFAULT_ACK_DEADLINE_SECONDS", "5")])),
        r#"CONNECTORS_GCP_DEFAULT_ACK_DEADLINE_SECONDS="5": must be 10..600"#
    );
    for (name, text) in
        [("landline.yaml", "default_ack_deadline_seconds: 5"), ("landline.toml", "default_ack_deadline_seconds = 5")]
    {
        let text = error(file(name, text));
        assert!(text.ends_with(&format!(r#"{name}: default_ack_deadline_seconds="5": must be 10..600"#)), "{text}");
    }
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    let text = error(env(&[("CONNECTORS_GCP_PROT", "1")]));
    assert!(text.starts_with(r#"CONNECTORS_GCP_PROT="1": unknown key; did you mean PORT? "#), "{text}");
    let text = error(file("a.yaml", "colour: red"));
    assert!(text.contains(r#"colour="red": unknown key; the keys are PORT, BIND"#), "{text}");
    assert!(error(set(&["NOISE=1"])).contains("--set NOISE"));
}

#[test]
fn everything_wrong_is_reported_at_once() {
    let wrong = env(&[("CONNECTORS_GCP_PORT", "x"), ("CONNECTORS_GCP_WORKERS", "-1"), ("CONNECTORS_GCP_NONSENSE", "")]);
    assert_eq!(wrong.unwrap_err().len(), 3);
}

#[test]
fn a_later_source_wins_over_an_earlier_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("l.toml");
    fs::write(&path, "port = 1\nworkers = 1\ndrain_seconds = 1").unwrap();
    let environment = [("CONNECTORS_GCP_WORKERS", "2"), ("CONNECTORS_GCP_DRAIN_SECONDS", "2")];
    let environment = environment.map(|(k, v)| (k.to_string(), v.to_string()));
    let loaded = load(Some(&path), environment, &["drain_seconds=3".into()]).unwrap();
    let s = &loaded.settings;
    assert_eq!((s.port, s.workers, s.drain_seconds), (1, 2, 3));
    let shown = loaded.to_string();
    let origins = ["file", "environment", "command line", "default"];
    for (key, origin) in ["port: 1", "workers: 2", "drain_seconds: 3", "log: info"].iter().zip(origins) {
        assert!(shown.lines().any(|l| l.starts_with(key) && l.ends_with(&format!("# {origin}"))), "{key} in\n{shown}");
    }
}

#[test]
fn a_file_may_nest_keys_spell_them_in_full_or_be_empty() {
    for text in ["connectors:\n  gcp:\n    port: 7", "CONNECTORS_GCP_PORT: 7", "PORT: '7'", "port: 7\n"] {
        assert_eq!(file("f.yml", text).unwrap().settings.port, 7, "{text}");
    }
    assert_eq!(file("f.toml", "[connectors.gcp]\nport = 7").unwrap().settings.port, 7);
    assert_eq!(file("f.yaml", "# nothing\n\n").unwrap().settings.port, 8085);
    let lists = file("f.yaml", "bind: [127.0.0.1, '::1']\npreload: ['one,aaa:bbb', 'two,ccc']").unwrap().settings;
    assert_eq!((lists.bind.addresses.len(), lists.preload.topics.len()), (2, 2));
    assert!(error(file("f.yaml", "port: 1\nPORT: 2")).contains("given twice"));
}

#[test]
fn a_file_that_cannot_be_read_is_one_line() {
    assert!(error(file("f.yaml", "port: [")).contains("f.yaml: "));
    assert!(error(file("f.toml", "port 1")).contains("f.toml: "));
    assert!(error(file("f.json", "{}")).contains(".yaml, .yml or .toml"));
    assert!(error(load(Some(Path::new("/no/such.yaml")), [], &[])).contains("/no/such.yaml: "));
}

#[test]
fn replicas_need_a_redis_broker() {
    assert!(error(set(&["DURABILITY=replicas:1"])).contains("BROKER_URL=\"embedded:./data\""));
    assert!(set(&["DURABILITY=replicas:1", "BROKER_URL=redis://h"]).is_ok());
}

#[test]
fn passwords_are_never_shown() {
    let urls = [
        "redis://:s3cret@h:1/0",
        "rediss://user:s3cret@h",
        "redis+sentinel://u:p@s3cret@a:1,b:2/m",
        "redis+sentinel://a:1/m?sentinel_password=s3cret&db=1",
        "redis://s3cret@h",
    ];
    for url in urls {
        let loaded = set(&[&format!("BROKER_URL={url}")]).unwrap();
        let texts = [loaded.to_string(), loaded.settings.broker.to_string(), format!("{:?}", loaded.settings)];
        assert!(texts.iter().all(|text| !text.contains("s3cret")), "{texts:?}");
        assert!(texts[0].contains("***"));
        assert!(!error(set(&[&format!("BROKER_ULR={url}")])).contains("s3cret"));
    }
    assert!(!error(set(&["BROKER_PASSWORD=s3cret"])).contains("s3cret"));
    assert!(!error(set(&["BROKER_URL=redes://:s3cret@h"])).contains("s3cret"));
}

#[test]
fn variables_of_the_emulator_image_join_the_preload() {
    let own = [("PUBSUB_PROJECT2", "second,ccc"), ("PUBSUB_PROJECT1", "first,aaa:bbb"), ("CONNECTORS_GCP_PRELOAD", "own,ddd")];
    let names: Vec<_> = env(&own).unwrap().settings.preload.topics.iter().map(|(t, s)| (t.to_string(), s.len())).collect();
    let expected = [("projects/own/topics/ddd", 0), ("projects/first/topics/aaa", 1), ("projects/second/topics/ccc", 0)];
    assert_eq!(names, expected.map(|(t, s)| (t.to_string(), s)));
    assert!(error(env(&[("PUBSUB_PROJECT1", "first,a")])).starts_with("PUBSUB_PROJECT1="));
}

#[test]
fn the_settings_in_force_are_a_settings_file() {
    let shown = set(&["BIND=0.0.0.0,[::1]", "AUTH=off", "PRELOAD=p,aaa:bbb"]).unwrap();
    let again = file("again.yaml", &shown.to_string()).unwrap();
    assert_eq!(again.to_string().replace("# file", ""), shown.to_string().replace("# default", "").replace("# command line", ""));
}

#[test]
fn the_examples_hold_every_key_with_its_default() {
    for (name, text) in [
        ("landline.yaml", include_str!("../../config/landline.yaml")),
        ("landline.toml", include_str!("../../config/landline.toml")),
    ] {
        let loaded = file(name, text).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        for (key, origin) in keys::KEYS.iter().zip(&loaded.origins) {
            assert_eq!(*origin, Origin::File, "{} is missing in {name}", key.name);
            assert_eq!((key.get)(&loaded.settings), (key.get)(&Settings::default()), "{} in {name}", key.name);
        }
    }
}

#[test]
fn the_readme_holds_the_table_of_keys() {
    let table = keys::markdown();
    assert!(include_str!("../../README.md").contains(&table), "the README's table should be:\n{table}");
}

#[test]
fn headers_of_the_collector_are_pairs_that_are_never_shown() {
    let shown = set(&["OTLP_HEADERS=authorization=Basic aGk=, x-tenant=a", "OTLP_ENDPOINT=http://h:1"]).unwrap();
    assert_eq!(shown.settings.telemetry.headers[0], ("authorization".into(), "Basic aGk=".into()));
    assert!(shown.to_string().contains("authorization=***,x-tenant=***"), "{shown}");
    for bad in ["authorization", "=word", "a b=word", "a=word\n"] {
        let text = error(set(&[&format!("OTLP_HEADERS={bad}")]));
        assert!(text.contains("OTLP_HEADERS") && text.contains("must be") && !text.contains("word"), "{text}");
    }
}

#[test]
fn traces_need_a_collector() {
    assert!(error(set(&["OTLP_TRACES=0.5"])).contains("OTLP_ENDPOINT"));
    let loaded = set(&["OTLP_TRACES=0.5", "OTLP_ENDPOINT=http://h:1"]).unwrap();
    assert_eq!(loaded.settings.telemetry.traces, Some(0.5));
}

#[test]
fn an_address_that_others_reach_needs_a_word_about_authentication() {
    for bind in ["0.0.0.0", "[::]", "127.0.0.1,10.0.0.1", "::ffff:10.0.0.1"] {
        let bind = format!("BIND={bind}");
        assert!(error(set(&[&bind])).contains("AUTH must be given"), "{bind}");
        for auth in [&["AUTH=off"][..], &["AUTH=audit"], &["AUTH=enforce", "AUTH_ADMINS=user:a@b"]] {
            assert!(set(&[&[bind.as_str()], auth].concat()).is_ok(), "{bind} {auth:?}");
        }
    }
    for bind in ["localhost", "127.0.0.1", "::1", "127.8.0.1"] {
        assert!(set(&[&format!("BIND={bind}")]).is_ok(), "{bind}");
    }
}

#[test]
fn settings_of_security_that_only_work_together_are_asked_for_together() {
    for (texts, named) in [
        (&["AUTH=enforce"][..], "AUTH_ADMINS"),
        (&["AUTH_OIDC_ISSUERS=https://idp"], "AUTH_AUDIENCES"),
        (&["AUTH_OIDC_ISSUERS=http://localhost:8085", "AUTH_AUDIENCES=a"], "AUTH_OIDC_ISSUERS"),
        (&["AUTH_OIDC_ISSUERS=https://a.b", "AUTH_AUDIENCES=a", "PUSH_ISSUER=https://a.b"], "AUTH_OIDC_ISSUERS"),
        (&["TLS_CERT_FILE=a"], "TLS_KEY_FILE"),
        (&["TLS_KEY_FILE=a"], "TLS_CERT_FILE"),
        (&["TLS_CERT_FILE=a", "TLS_KEY_FILE=b", "TLS_CLIENT_AUTH=required"], "TLS_CLIENT_CA_FILE"),
        (&["TLS_CERT_FILE=a", "TLS_KEY_FILE=b", "TLS_CLIENT_CA_FILE=c"], "TLS_CLIENT_AUTH"),
    ] {
        assert!(error(set(texts)).contains(named), "{texts:?}");
    }
}
