#![allow(clippy::unwrap_used)]

use aws_lc_rs::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::*;
use crate::{broker::embedded::Embedded, connector::Connector};

const EMAIL: &str = "orders@shop.example";

struct Rig {
    file: KeyFile,
    key_id: String,
    authenticator: Authenticator,
}

fn rig() -> Rig {
    let (file, key) = KeyFile::create(EMAIL, "shop", "https://h/token").unwrap();
    let authenticator =
        Authenticator::open(&Options { mode: Some(Mode::Enforce), ..Options::default() }, "pubsub.shop:443").unwrap();
    let key_id = key.id.clone();
    authenticator.replace_keys(Registry { keys: vec![key] });
    authenticator.use_secret(&[7; 32]);
    Rig { file, key_id, authenticator }
}

impl Rig {
    async fn check(&self, token: &str) -> Result<String, Invalid> {
        let header = format!("Bearer {token}");
        self.authenticator.authenticate(Some(header.as_bytes()), &Peer::default()).await.map(|caller| caller.to_string())
    }

    /// A token with claims of the test's own.
    fn sign(&self, change: Value) -> String {
        let mut claims = json!({"iss": EMAIL, "sub": EMAIL, "aud": "https://pubsub.googleapis.com/", "iat": jwt::now(), "exp": jwt::now() + 3600});
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        self.file.sign_claims(&claims).unwrap()
    }
}

#[tokio::test]
async fn a_token_that_the_holder_of_a_key_signed_names_that_holder() {
    let rig = rig();
    let scope = "https://www.googleapis.com/auth/cloud-platform https://www.googleapis.com/auth/pubsub";
    for claims in [
        json!({}),
        json!({"aud": "https://pubsub.googleapis.com/google.pubsub.v1.Publisher"}),
        json!({"aud": "https://us-east1-pubsub.googleapis.com/"}),
        json!({"aud": "https://pubsub.shop:443/"}),
        json!({"aud": "https://pubsub.shop/google.pubsub.v1.Publisher"}),
        json!({"aud": ["https://other", "https://localhost:8085/"]}),
        json!({"aud": null, "scope": scope}),
        json!({"aud": "", "scope": scope}),
        json!({"sub": ""}),
    ] {
        assert_eq!(rig.check(&rig.sign(claims.clone())).await.as_deref(), Ok("serviceAccount:orders@shop.example"), "{claims}");
    }
}

#[tokio::test]
async fn a_token_that_is_old_foreign_or_for_others_is_refused_for_that() {
    let rig = rig();
    let now = jwt::now();
    for (claims, expected) in [
        (json!({"aud": "https://storage.googleapis.com/"}), Invalid::Audience),
        (json!({"aud": "https://storage.googleapis.com/", "scope": SCOPES[0]}), Invalid::Audience),
        (json!({"aud": "https://evil.example/pubsub.googleapis.com/"}), Invalid::Audience),
        (json!({"aud": "https://pubsub.shop:8443/"}), Invalid::Audience),
        (json!({"aud": "https://pubsub.googleapis.com.evil.example/"}), Invalid::Audience),
        (json!({"aud": null, "scope": "https://www.googleapis.com/auth/devstorage"}), Invalid::Audience),
        (json!({"aud": null}), Invalid::Audience),
        (json!({"iat": now - 7200, "exp": now - 3600}), Invalid::Expired),
        (json!({"iat": now + 600}), Invalid::NotYet),
        (json!({"exp": now + 86_400}), Invalid::NotYet),
        (json!({"exp": null}), Invalid::Malformed),
        (json!({"iss": "other@shop.example", "sub": "other@shop.example"}), Invalid::Issuer),
        (json!({"sub": "other@shop.example"}), Invalid::Issuer),
    ] {
        assert_eq!(rig.check(&rig.sign(claims.clone())).await, Err(expected), "{claims}");
    }
    let mut unnamed = rig;
    unnamed.file.private_key_id.clear();
    assert!(unnamed.check(&unnamed.sign(json!({}))).await.is_ok(), "a token need not name its key");
    let rig = unnamed;
    let (stranger, _) = KeyFile::create(EMAIL, "shop", "https://h/token").unwrap();
    assert_eq!(rig.check(&stranger.sign("https://pubsub.googleapis.com/").unwrap()).await, Err(Invalid::UnknownKey));
}

#[tokio::test]
async fn a_token_whose_signature_is_missing_or_of_another_kind_is_refused() {
    let rig = rig();
    let good = rig.sign(json!({}));
    let (signed, signature) = good.rsplit_once('.').unwrap();
    let claims = signed.split_once('.').unwrap().1;
    let header = |alg: &str| URL_SAFE_NO_PAD.encode(json!({"alg": alg, "kid": rig.key_id}).to_string());
    for alg in ["none", "HS256", "ES256", "RS1", ""] {
        for signature in ["", signature] {
            let token = format!("{}.{claims}.{signature}", header(alg));
            assert_eq!(rig.check(&token).await, Err(Invalid::Signature), "{alg}");
        }
    }
    for token in ["", ".", "..", "a.b.c", signed, &format!("{good}x"), &"a".repeat(100_000), "ll1.a.b"] {
        assert!(rig.check(token).await.is_err());
    }
    assert_eq!(rig.authenticator.authenticate(None, &Peer::default()).await, Err(Invalid::Missing));
    assert_eq!(rig.authenticator.authenticate(Some(b"Basic eA=="), &Peer::default()).await, Err(Invalid::Malformed));
}

#[tokio::test]
async fn a_key_that_is_taken_back_is_refused_where_it_was_known() {
    let rig = rig();
    let peer = Peer::default();
    let header = format!("Bearer {}", rig.sign(json!({})));
    let header = Some(header.as_bytes());
    assert!(rig.authenticator.known(header, &peer).is_none());
    let caller = rig.authenticator.authenticate(header, &peer).await.unwrap();
    assert_eq!(rig.authenticator.known(header, &peer), Some(caller.clone()));
    assert!(rig.authenticator.is_good(&caller));
    let assertion = rig.sign(json!({"aud": "https://oauth2.googleapis.com/token"}));
    let (token, _) = rig.authenticator.exchange(&assertion).unwrap();

    rig.authenticator.replace_keys(Registry::default());
    assert!(rig.authenticator.known(header, &peer).is_none());
    assert_eq!(rig.authenticator.authenticate(header, &peer).await, Err(Invalid::UnknownKey));
    assert!(!rig.authenticator.is_good(&caller));
    assert_eq!(rig.check(&token).await, Err(Invalid::UnknownKey));
}

#[tokio::test]
async fn an_assertion_for_the_token_address_is_exchanged_and_no_other() {
    let rig = rig();
    for audience in ["https://oauth2.googleapis.com/token", "https://localhost:8085/token", "http://pubsub.shop:443/token"] {
        let (token, life) = rig.authenticator.exchange(&rig.sign(json!({"aud": audience, "scope": SCOPES[1]}))).unwrap();
        assert_eq!(life, 3600);
        assert_eq!(rig.check(&token).await.as_deref(), Ok("serviceAccount:orders@shop.example"));
    }
    for audience in ["https://pubsub.googleapis.com/", "https://evil.example/token", "https://oauth2.googleapis.com/tokens"] {
        assert_eq!(rig.authenticator.exchange(&rig.sign(json!({"aud": audience}))).unwrap_err(), Invalid::Audience, "{audience}");
    }
}

#[tokio::test]
async fn audit_lets_everyone_pass_and_counts_those_without_credentials() {
    let options = Options { mode: Some(Mode::Audit), ..Options::default() };
    let authenticator = Authenticator::open(&options, "").unwrap();
    for header in [None, Some(&b"Bearer x"[..])] {
        assert!(authenticator.authenticate(header, &Peer::default()).await.unwrap().is_anonymous());
    }
    assert_eq!(authenticator.unauthenticated(), 2);
}

#[tokio::test]
async fn a_client_certificate_names_its_holder_unless_there_is_a_token() {
    let rig = rig();
    let peer = Peer::new(Some("orders"));
    assert_eq!(rig.authenticator.authenticate(None, &peer).await.unwrap().to_string(), "principal://tls/orders");
    let header = format!("Bearer {}", rig.sign(json!({})));
    let caller = rig.authenticator.authenticate(Some(header.as_bytes()), &peer).await.unwrap();
    assert_eq!(caller.to_string(), "serviceAccount:orders@shop.example");
    assert!(rig.authenticator.authenticate(Some(b"Bearer x"), &peer).await.is_err(), "a bad token is not passed over");
}

const ISSUER: &str = "https://idp.example/realms/shop";

struct Provider {
    pair: EcdsaKeyPair,
    folder: tempfile::TempDir,
}

impl Provider {
    fn new() -> Self {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        let provider = Self { pair, folder: tempfile::tempdir().unwrap() };
        provider.show("k1");
        provider
    }

    /// Publishes the key under an id.
    fn show(&self, id: &str) {
        let point = self.pair.public_key().as_ref();
        let part = |range: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(&point[range]);
        let key = json!({"kty": "EC", "crv": "P-256", "kid": id, "use": "sig", "x": part(1..33), "y": part(33..65)});
        std::fs::write(self.folder.path().join("keys.json"), json!({"keys": [key]}).to_string()).unwrap();
    }

    fn sign(&self, id: &str, change: Value) -> String {
        let now = jwt::now();
        let mut claims = json!({"iss": ISSUER, "sub": "1234", "aud": "landline", "iat": now, "exp": now + 300,
            "email": "ann@shop.example", "email_verified": true, "groups": ["dev"]});
        for (name, value) in change.as_object().unwrap() {
            claims[name] = value.clone();
        }
        let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(json!({"alg": "ES256", "kid": id})), part(claims));
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
    }

    fn authenticator(&self) -> Authenticator {
        let keys = self.folder.path().join("keys.json").display().to_string();
        let options = Options {
            mode: Some(Mode::Enforce),
            issuers: vec![IssuerSpec { issuer: ISSUER.into(), keys: Some(keys) }],
            audiences: vec!["landline".into()],
            ..Options::default()
        };
        Authenticator::open(&options, "").unwrap()
    }
}

async fn members(authenticator: &Authenticator, token: &str) -> Result<Vec<String>, Invalid> {
    let header = format!("Bearer {token}");
    let caller = authenticator.authenticate(Some(header.as_bytes()), &Peer::default()).await?;
    Ok(caller.members().to_vec())
}

#[tokio::test]
async fn the_subject_of_a_provider_is_known_by_its_claims() {
    let provider = Provider::new();
    let authenticator = provider.authenticator();
    let all = [
        "principal://idp.example/realms/shop/subject/1234",
        "group:dev",
        "user:ann@shop.example",
        "domain:shop.example",
        "allAuthenticatedUsers",
        "allUsers",
    ];
    assert_eq!(members(&authenticator, &provider.sign("k1", json!({}))).await.unwrap(), all);
    let unverified = members(&authenticator, &provider.sign("k1", json!({"email_verified": false, "groups": []}))).await.unwrap();
    assert_eq!(unverified, [all[0], all[4], all[5]]);
    for (claims, expected) in [
        (json!({"aud": "other"}), Invalid::Audience),
        (json!({"aud": "https://pubsub.googleapis.com/"}), Invalid::Audience),
        (json!({"exp": 1}), Invalid::Expired),
        (json!({"sub": ""}), Invalid::Malformed),
        (json!({"iss": "https://other"}), Invalid::UnknownKey),
    ] {
        assert_eq!(members(&authenticator, &provider.sign("k1", claims.clone())).await, Err(expected), "{claims}");
    }
    let stranger = Provider::new();
    assert_eq!(members(&authenticator, &stranger.sign("k1", json!({}))).await, Err(Invalid::Signature));
}

#[tokio::test]
async fn an_unknown_key_of_a_provider_is_looked_for_once_and_then_not_for_a_while() {
    let provider = Provider::new();
    let authenticator = provider.authenticator();
    provider.show("k2");
    assert!(members(&authenticator, &provider.sign("k2", json!({}))).await.is_ok(), "fetched on the first call");
    provider.show("k3");
    let late = members(&authenticator, &provider.sign("k3", json!({}))).await;
    assert_eq!(late, Err(Invalid::UnknownKey), "made-up key ids are no load on the provider");
}

#[tokio::test]
async fn each_project_has_its_own_limits() {
    let connector = Connector::open(Embedded::memory(), Default::default()).await.unwrap();
    let meter = limits::Meter::new(Limits { requests_per_second: 2, ..Limits::default() }, connector);
    for project in ["a", "b"] {
        for _ in 0..2 {
            assert!(meter.charge(project, Cost::Call).await.is_ok());
        }
        let Err(Refused::Exceeded(exceeded)) = meter.charge(project, Cost::Call).await else { panic!("no limit") };
        assert_eq!((exceeded.limit, exceeded.value, exceeded.project.as_str()), ("LIMIT_REQUESTS_PER_SECOND", 2, project));
    }
}
