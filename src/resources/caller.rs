//! Calls of the API in its JSON shape, of this process or of another.

use std::{convert::Infallible, time::Duration};

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use serde_json::Value;
use tonic::body::Body;
use tower::Service;

use crate::{
    api::rest::{self, Rest, SetupError},
    client::Connection,
};

/// Tries of a call over the network, and the pause before the second; it doubles.
const TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest time one call may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A call that failed: the name of its code, such as `NOT_FOUND`, and the API's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub status: String,
    pub message: String,
}

impl Failure {
    /// True where there is no such resource.
    pub fn is_not_found(&self) -> bool {
        self.status == "NOT_FOUND"
    }
}

/// Makes calls; cheap to clone.
#[derive(Clone)]
pub struct Caller<S> {
    rest: S,
    tries: u32,
}

impl Caller<Rest<Connection>> {
    /// Calls another process.
    ///
    /// # Errors
    /// When the API's descriptors are faulty.
    pub fn remote(connection: Connection) -> Result<Self, SetupError> {
        Ok(Self { rest: rest::service(connection)?, tries: TRIES })
    }
}

impl<S> Caller<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    /// Calls a service within the process, once.
    pub fn within(rest: S) -> Self {
        Self { rest, tries: 1 }
    }

    /// Reads something that may not be there.
    ///
    /// # Errors
    /// Any other failure.
    pub async fn read(&self, path: &str) -> Result<Option<Value>, Failure> {
        match self.call(&Method::GET, path, None).await {
            Err(failure) if failure.is_not_found() => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Reads a list to its end: `projects/p/topics`, and the field that has the items.
    ///
    /// # Errors
    /// What the API says against it.
    pub async fn list(&self, path: &str, field: &str) -> Result<Vec<Value>, Failure> {
        let (mut items, mut token) = (Vec::new(), String::new());
        let separator = if path.contains('?') { '&' } else { '?' };
        loop {
            let page = if token.is_empty() { path.to_owned() } else { format!("{path}{separator}pageToken={token}") };
            let answer = self.call(&Method::GET, &page, None).await?;
            items.extend(answer[field].as_array().into_iter().flatten().cloned());
            token = answer["nextPageToken"].as_str().map(escaped).unwrap_or_default();
            if token.is_empty() {
                return Ok(items);
            }
        }
    }

    /// One call; `path` is what comes after `/v1/`, names as they are.
    ///
    /// # Errors
    /// What the API says against it.
    pub async fn call(&self, method: &Method, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let (mut pause, mut tries) = (FIRST_PAUSE, self.tries);
        loop {
            let answer = self.once(method, path, body).await;
            tries -= 1;
            match answer {
                Err(failure) if failure.status == "UNAVAILABLE" && tries > 0 => tokio::time::sleep(pause).await,
                answer => return answer,
            }
            pause *= 2;
        }
    }

    async fn once(&self, method: &Method, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let local = |message: String| Failure { status: "UNKNOWN".into(), message };
        // Of the characters that names may have, only this one means something in a path.
        let (name, query) = path.split_once('?').map_or((path, None), |(name, query)| (name, Some(query)));
        let name = name.replace('%', "%25");
        let uri = query.map_or_else(|| format!("/v1/{name}"), |query| format!("/v1/{name}?{query}"));
        let body = Body::new(body.map(Value::to_string).unwrap_or_default());
        let request = Request::builder().method(method).uri(uri).body(body).map_err(|e| local(e.to_string()))?;
        let Ok(answer) = tokio::time::timeout(TIMEOUT, self.rest.clone().call(request)).await else {
            return Err(Failure { status: "UNAVAILABLE".into(), message: "there was no answer within a minute".into() });
        };
        let Ok(answer) = answer;
        let code = answer.status();
        let text = answer.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let value: Value = serde_json::from_slice(&text).unwrap_or_default();
        if code.is_success() {
            return Ok(value);
        }
        let text = |field: &str| value["error"][field].as_str().unwrap_or(code.as_str()).to_owned();
        Err(Failure { status: text("status"), message: text("message") })
    }
}

/// A page token in a query.
fn escaped(token: &str) -> String {
    percent_encoding::utf8_percent_encode(token, percent_encoding::NON_ALPHANUMERIC).to_string()
}
