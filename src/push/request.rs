//! The HTTP request of one message. Source: sections "wrapped" and "unwrapped" of the push documentation.

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use serde::Serialize;

use super::guard::Guard;
use crate::{
    broker::Leased,
    model::{EncodedMessage, PushWrapper, Subscription},
};

const USER_AGENT: &str = "CloudPubSub-Google";
/// An idle connection is given up before common servers do the same, so that a request seldom meets a closed one.
const IDLE: Duration = Duration::from_secs(30);
const CONNECT: Duration = Duration::from_secs(10);
/// Attributes that become headers: bounds of the unwrapped form.
const MAX_HEADER_KEY: usize = 100;
const MAX_HEADER_VALUE: usize = 1024;
/// Headers an attribute must not set: they frame the request, or are the server's to say.
const OWN_HEADERS: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "authorization",
];

/// A client that sends each request as it is: no redirects, no proxy of the environment. It resolves names by the guard.
///
/// # Errors
/// What is wrong with the certificates.
pub fn client(guard: Guard, ca_file: &Path) -> Result<reqwest::Client, String> {
    let mut own = Vec::new();
    if !ca_file.as_os_str().is_empty() {
        let wrong = |what: String| format!("PUSH_CA_FILE {}: {what}", ca_file.display());
        let pem = std::fs::read(ca_file).map_err(|e| wrong(e.to_string()))?;
        own = reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| wrong(e.to_string()))?;
        if own.is_empty() {
            return Err(wrong("there is no certificate in it".into()));
        }
    }
    reqwest::Client::builder()
        .dns_resolver(Arc::new(guard))
        .tls_certs_merge(own)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(USER_AGENT)
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE)
        .no_proxy()
        .build()
        .map_err(|e| format!("the HTTP client of push: {e}"))
}

/// Status codes that acknowledge.
pub fn acknowledges(status: u16) -> bool {
    matches!(status, 102 | 200 | 201 | 202 | 204)
}

#[derive(Serialize)]
struct Wrapped<'a> {
    message: Message<'a>,
    subscription: &'a str,
    #[serde(rename = "deliveryAttempt", skip_serializing_if = "is_zero")]
    delivery_attempt: u32,
}

/// Id and time stand in both spellings, as production sends them.
#[derive(Serialize)]
struct Message<'a> {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    data: String,
    #[serde(rename = "messageId")]
    message_id: &'a str,
    #[serde(rename = "message_id")]
    message_id_too: &'a str,
    #[serde(rename = "orderingKey", skip_serializing_if = "str::is_empty")]
    ordering_key: &'a str,
    #[serde(rename = "publishTime")]
    publish_time: &'a str,
    #[serde(rename = "publish_time")]
    publish_time_too: &'a str,
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// Body and headers for one delivery; `None` when the stored message can't be read.
pub fn build(subscription: &Subscription, leased: &Leased) -> Option<(HeaderMap, Vec<u8>)> {
    let (id, time_ms) = EncodedMessage::sealed(&leased.message)?;
    let message = EncodedMessage::scan_system(leased.message.clone()).ok()?;
    let time = rfc3339(time_ms);
    match subscription.push_config.wrapper {
        Some(PushWrapper::None { write_metadata }) => {
            let mut headers = HeaderMap::new();
            if write_metadata {
                metadata_headers(&mut headers, subscription, &message, id, &time);
            }
            if message.data().is_empty() {
                // It would be left out, and some servers refuse a POST without it.
                headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
            }
            Some((headers, message.data().to_vec()))
        }
        Some(PushWrapper::Pubsub) | None => {
            let wrapped = Wrapped {
                message: Message {
                    attributes: message.attribute_map(),
                    data: STANDARD.encode(message.data()),
                    message_id: id,
                    message_id_too: id,
                    ordering_key: message.ordering_key(),
                    publish_time: &time,
                    publish_time_too: &time,
                },
                subscription: subscription.name.as_str(),
                delivery_attempt: leased.delivery_attempt,
            };
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            Some((headers, serde_json::to_vec(&wrapped).ok()?))
        }
    }
}

/// Attributes first, so that the server's own headers win over attributes of the same name.
fn metadata_headers(headers: &mut HeaderMap, subscription: &Subscription, message: &EncodedMessage, id: &str, time: &str) {
    for (key, value) in message.attribute_map() {
        let fits = key.len() <= MAX_HEADER_KEY && value.len() <= MAX_HEADER_VALUE && !key.starts_with("goog");
        let (Ok(name), Ok(value)) = (HeaderName::try_from(key.as_str()), HeaderValue::try_from(value)) else { continue };
        if fits && !OWN_HEADERS.contains(&name.as_str()) {
            headers.insert(name, value);
        }
    }
    let own = [
        ("x-goog-pubsub-subscription-name", subscription.name.as_str()),
        ("x-goog-pubsub-message-id", id),
        ("x-goog-pubsub-publish-time", time),
        ("x-goog-pubsub-ordering-key", message.ordering_key()),
    ];
    for (name, value) in own {
        if let Ok(value) = HeaderValue::try_from(value)
            && !value.is_empty()
        {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// `2021-02-26T19:13:55.749Z`.
fn rfc3339(ms: u64) -> String {
    let time = prost_types::Timestamp { seconds: (ms / 1000) as i64, nanos: (ms % 1000 * 1_000_000) as i32 };
    time.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_codes_acknowledge_and_no_others() {
        let acks: Vec<u16> = (100..600).filter(|code| acknowledges(*code)).collect();
        assert_eq!(acks, [102, 200, 201, 202, 204]);
    }

    #[test]
    fn times_carry_milliseconds() {
        assert_eq!(rfc3339(1_614_366_835_749), "2021-02-26T19:13:55.749Z");
    }
}
