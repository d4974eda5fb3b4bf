//! Whatever bytes come in, nothing panics and what is accepted means what it says. `LANDLINE_FUZZ_CASES` sets how many
//! inputs each target gets; `tests/fuzz` runs the targets with many.

use std::{convert::Infallible, sync::LazyLock, time::Instant};

use bytes::Bytes;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use landline::{
    api::{proto::pubsub::PubsubMessage, rest},
    auth::jwt::Unverified,
    broker::{LeaseToken, QueueRef},
    connector::ack_id::AckIds,
    model::{EncodedMessage, SubscriptionName, TopicName},
    rules::filter::Filter,
    tls::PeerName,
};
use proptest::{prelude::*, test_runner::TestRunner};
use prost::Message;
use tonic::{Status, body::Body};
use tower::{Service, ServiceExt};

const DEFAULT_CASES: u32 = 2000;

fn run<S: Strategy>(inputs: &S, check: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let cases = std::env::var("LANDLINE_FUZZ_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(DEFAULT_CASES);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let began = Instant::now();
    TestRunner::new(config).run(inputs, check).unwrap();
    println!("{cases} inputs in {:.1} s", began.elapsed().as_secs_f64());
}

/// Bytes of one kind, some of them changed, cut off or doubled.
fn damaged(good: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..6);
    (good, changes).prop_map(|(mut bytes, changes)| {
        for (place, value, kind) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = place.index(bytes.len());
            match kind {
                0 => bytes[at] = value,
                1 => bytes.truncate(at),
                2 => bytes.insert(at, value),
                _ => bytes.extend_from_within(at..),
            }
            bytes.truncate(1 << 20);
        }
        bytes
    })
}

fn message() -> impl Strategy<Value = Vec<u8>> {
    let attributes = prop::collection::btree_map(".{0,20}", ".{0,20}", 0..5);
    (prop::collection::vec(any::<u8>(), 0..100), attributes, ".{0,10}").prop_map(|(data, attributes, ordering_key)| {
        PubsubMessage { data: data.into(), attributes, ordering_key, ..Default::default() }.encode_to_vec()
    })
}

#[test]
fn an_encoded_message_is_refused_or_read_as_its_decoder_reads_it() {
    let inputs = prop_oneof![message().boxed(), damaged(message()).boxed(), prop::collection::vec(any::<u8>(), 0..200).boxed()];
    run(&inputs, |bytes| {
        let Ok(scanned) = EncodedMessage::scan(bytes.into()) else { return Ok(()) };
        // What is kept is what clients decode.
        let decoded = PubsubMessage::decode(&scanned.wire()[..]);
        let decoded = decoded.map_err(|e| TestCaseError::fail(format!("accepted what can't be decoded: {e}")))?;
        prop_assert_eq!(scanned.data(), &decoded.data[..]);
        prop_assert_eq!(scanned.ordering_key(), decoded.ordering_key.as_str());
        prop_assert_eq!(scanned.attribute_map(), decoded.attributes);
        Ok(())
    });
}

#[test]
fn an_ack_id_that_was_not_minted_is_refused() {
    let ids = AckIds::new([7; 16], "node");
    let queue = QueueRef { channel: "p1/s11".into(), incarnation: 3 };
    let minter = ids.minter(&queue);
    let minting = ids.minter(&queue);
    let minted =
        (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<u64>()).prop_map(move |(a, b, c, attempt, at)| {
            minting.mint(&LeaseToken { transaction: a, sequence: b, lease: c, attempt }, at).into_bytes()
        });
    let inputs = minted.prop_flat_map(|good| {
        let others = prop_oneof![damaged(Just(good.clone())).boxed(), prop::collection::vec(any::<u8>(), 0..200).boxed()];
        (Just(good), others)
    });
    run(&inputs, |(good, other)| {
        let good = String::from_utf8(good).expect("text");
        prop_assert!(minter.read(&good).is_ok());
        let other = String::from_utf8_lossy(&other);
        prop_assert!(other == good || minter.read(&other).is_err(), "{} for {}", other, good);
        Ok(())
    });
}

#[test]
fn a_filter_is_refused_or_matches_without_a_panic() {
    let word = prop_oneof![
        "attributes",
        "hasPrefix",
        "AND",
        "OR",
        "NOT",
        r"[():.,=!\-]",
        r#""[^"]{0,8}""#,
        "!=",
        "[a-z]{1,4}",
        r#"\\[nux0-7"]{1,3}"#,
        ".",
    ];
    let inputs = prop_oneof![".{0,300}".boxed(), prop::collection::vec(word, 0..40).prop_map(|words| words.join(" ")).boxed()];
    let sample = EncodedMessage::encode(b"x", [("a", "b"), ("", "")], "k");
    run(&inputs, |text| {
        if let Ok(filter) = Filter::parse(&text) {
            filter.matches(&sample);
        }
        Ok(())
    });
}

#[test]
fn a_name_is_refused_or_shown_as_it_was_given() {
    let inputs = prop_oneof![".{0,100}", "projects/[a-z:./%]{0,10}/(topics|subscriptions)/.{0,20}"];
    run(&inputs, |text| {
        if let Ok(name) = TopicName::parse(&text) {
            prop_assert_eq!(name.as_str(), &text);
        }
        if let Ok(name) = SubscriptionName::parse(&text) {
            prop_assert_eq!(name.as_str(), &text);
        }
        Ok(())
    });
}

/// gRPC services that refuse everything: what is tried is the way to them.
#[derive(Clone)]
struct Refusing;

impl Service<Request<Body>> for Refusing {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        std::future::ready(Ok(Status::not_found("x").into_http()))
    }
}

static RUNTIME: LazyLock<tokio::runtime::Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));

#[test]
fn a_rest_request_is_answered_in_json_whatever_it_is() {
    let service = rest::service(Refusing).expect("the descriptors");
    let methods = prop::sample::select(vec![Method::GET, Method::PUT, Method::POST, Method::PATCH, Method::DELETE]);
    let verb = prop::sample::select(vec!["", ":publish", ":pull", ":acknowledge", ":seek", ":setIamPolicy", ":x", ":"]);
    let part = prop_oneof![
        "topics",
        "subscriptions",
        "snapshots",
        "schemas",
        "[a-z]{1,5}",
        "(%[0-9a-fA-F]{2}){1,4}",
        r"[!-~&&[^?#]]{0,6}"
    ];
    let path =
        (prop::collection::vec(part, 0..5), verb).prop_map(|(parts, verb)| format!("/v1/projects/{}{verb}", parts.join("/")));
    let query = prop_oneof![
        "",
        "[a-zA-Z.$=&%0-9_]{0,30}",
        "pageSize=[0-9a-z-]{0,12}",
        r"\$alt=json;enum-encoding=int",
        "updateMask=[a-zA-Z.,]{0,20}"
    ];
    let leaf = prop_oneof![
        Just("null".to_owned()),
        "-?[0-9]{1,25}(\\.[0-9]{1,3})?(e[0-9]{1,3})?",
        r#""[a-zA-Z0-9+/=_-]{0,12}""#,
        Just("true".to_owned())
    ];
    let json = leaf.prop_recursive(6, 40, 4, |inner| {
        let key = prop::sample::select(vec![
            "name",
            "topic",
            "messages",
            "data",
            "attributes",
            "ackIds",
            "labels",
            "policy",
            "time",
            "x",
            "ack_deadline_seconds",
            "pushConfig",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec((key, inner), 0..4).prop_map(|items| format!(
                "{{{}}}",
                items.iter().map(|(k, v)| format!("{k:?}:{v}")).collect::<Vec<_>>().join(",")
            )),
        ]
    });
    let body = prop_oneof![json.clone().prop_map(String::into_bytes).boxed(), damaged(json.prop_map(String::into_bytes)).boxed()];
    let encoding = prop::sample::select(vec!["identity", "gzip", "deflate", "br"]);
    run(&(methods, path, query, body, encoding), |(method, path, query, body, encoding)| {
        let request = Request::builder().method(method).uri(format!("{path}?{query}")).header("content-encoding", encoding);
        let Ok(request) = request.body(Full::new(Bytes::from(body))) else { return Ok(()) };
        let (status, text) = RUNTIME.block_on(async {
            let answer = service.clone().oneshot(request).await.expect("an answer");
            (answer.status(), answer.into_body().collect().await.expect("a body").to_bytes())
        });
        prop_assert!(status.is_client_error(), "{}", status);
        prop_assert!(serde_json::from_slice::<serde_json::Value>(&text).is_ok());
        Ok(())
    });
}

#[test]
fn a_token_or_a_certificate_is_refused_without_a_panic() {
    let part = "[A-Za-z0-9_-]{0,40}";
    let claims = prop_oneof![
        Just(r#"{"alg":"RS256","kid":"x"}"#.to_owned()),
        r#"\{"(exp|iat|nbf)":-?[0-9]{1,30}(\.[0-9]+)?(e[0-9]{1,3})?\}"#,
        r#"\{"aud":(null|1|"x"|\["x","y"\]|\[\[\]\])\}"#,
    ];
    let encoded = claims.prop_map(|text| base64::Engine::encode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, text));
    let header = Just("eyJhbGciOiJSUzI1NiJ9".to_owned());
    let token = prop_oneof![
        ".{0,200}".boxed(),
        (part, part, part).prop_map(|(a, b, c)| format!("{a}.{b}.{c}")).boxed(),
        (header, encoded, part).prop_map(|(a, b, c)| format!("{a}.{b}.{c}")).boxed(),
    ];
    run(&token, |token| {
        if let Ok(unverified) = Unverified::parse(&token) {
            let _ = unverified.claims.check_times(1_800_000_000);
        }
        Ok(())
    });
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate =
        rcgen::CertificateParams::new(vec!["a.example".to_owned()]).expect("a name").self_signed(&key).expect("a certificate");
    let der = certificate.der().to_vec();
    run(&damaged(Just(der)), |der| {
        let _ = PeerName::of(&der.into());
        Ok(())
    });
}
