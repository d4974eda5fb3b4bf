//! The token endpoint: Google's client libraries exchange a signed assertion for an access token (RFC 7523) at the
//! `token_uri` of their key file.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde_json::json;
use tonic::body::Body;

use crate::auth::{Authenticator, GRANT, Invalid, jwt::MAX_TOKEN_BYTES};

/// Where it is.
pub const PATH: &str = "/token";
/// Bytes of a request: an assertion, percent-encoded at worst, and the name of the grant.
const MAX_BODY_BYTES: usize = 4 * MAX_TOKEN_BYTES;
/// Time to send it in.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers a request.
pub async fn answer(authenticator: Arc<Authenticator>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (status, text) = match exchange(&authenticator, request).await {
        Ok((token, life)) => (StatusCode::OK, json!({ "access_token": token, "expires_in": life, "token_type": "Bearer" })),
        Err((status, error, why)) => (status, json!({ "error": error, "error_description": why })),
    };
    let mut answer = Response::new(Body::new(http_body_util::Full::new(Bytes::from(text.to_string()))));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json; charset=UTF-8"));
    answer.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(answer)
}

type Refused = (StatusCode, &'static str, String);

async fn exchange(authenticator: &Authenticator, request: Request<Incoming>) -> Result<(String, u64), Refused> {
    let refused = |error, why: &str| (StatusCode::BAD_REQUEST, error, why.to_owned());
    if request.method() != Method::POST {
        return Err((StatusCode::METHOD_NOT_ALLOWED, "invalid_request", "it must be a POST".into()));
    }
    let body = Limited::new(request.into_body(), MAX_BODY_BYTES).collect();
    let body = tokio::time::timeout(BODY_TIMEOUT, body).await.map_err(|_| refused("invalid_request", "the body is late"))?;
    let body = body.map_err(|_| refused("invalid_request", "the body can't be read"))?.to_bytes();
    let body = String::from_utf8_lossy(&body);
    let field = |name: &str| {
        let values = body.split('&').filter_map(|pair| pair.split_once('='));
        let value = values.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.replace('+', " "));
        value.map(|value| percent_decode_str(&value).decode_utf8_lossy().into_owned()).unwrap_or_default()
    };
    if field("grant_type") != GRANT {
        return Err(refused("unsupported_grant_type", &format!("grant_type must be {GRANT}")));
    }
    authenticator.exchange(&field("assertion")).map_err(|reason| match reason {
        Invalid::Provider => (StatusCode::SERVICE_UNAVAILABLE, "temporarily_unavailable", "the broker is not ready".into()),
        reason => refused("invalid_grant", &reason.to_string()),
    })
}
