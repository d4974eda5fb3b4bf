//! The REST surface: one transcoder for every method, driven by the `google.api.http` options of the descriptors.
//!
//! A JSON request becomes the protobuf request that a gRPC client would send, and goes to the same gRPC services within the
//! process; the answer becomes JSON. Validators, interceptors and errors are thereby shared, and no method has code here.
//!
//! [`one_port`] is what a server listens with: it tells gRPC from REST by the content type, over HTTP/1.1 and HTTP/2 alike.
//! There are no CORS headers here: the server adds them where it is told to.

mod body;
mod call;
mod error;
mod json;
mod query;
mod routes;
mod selection;
mod shape;
mod template;

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use http_body_util::Full;
use prost_reflect::{DynamicMessage, MessageDescriptor, SerializeOptions, Value};
use serde::Serialize;
use tonic::{Status, body::Body};
use tower::{BoxError, Service};

use self::{
    query::Format,
    routes::{Binding, BodyBinding, Routes},
    selection::Selection,
};
use super::proto::FILE_DESCRIPTOR_SET;
use crate::model::text::clipped;

pub use self::{routes::SetupError, shape::Shape, template::TemplateError};

/// Content types of gRPC begin with this.
const GRPC_CONTENT_TYPE: &[u8] = b"application/grpc";
/// What the root path answers; tools look for it to see whether the server is up.
const ROOT_ANSWER: &str = "Ok";
/// Lets a POST stand for another verb where only POST can be sent, or where a query is too long for a GET.
const METHOD_OVERRIDE: &str = "x-http-method-override";

/// A service that answers with an HTTP response and does not fail.
type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// Builds the REST service over gRPC services, such as `tonic::service::Routes`, with whatever layers they have.
///
/// Errors if the descriptors the server was built with are faulty.
pub fn service<S>(grpc: S) -> Result<Rest<S>, SetupError> {
    Ok(Rest { routes: Arc::new(Routes::from_descriptors(FILE_DESCRIPTOR_SET)?), grpc })
}

/// Builds the service of a port that speaks both: requests whose content type is `application/grpc*` go to `grpc` as they
/// are, all others to [`service`].
pub fn one_port<S: Clone>(grpc: S) -> Result<OnePort<S>, SetupError> {
    Ok(OnePort { rest: service(grpc.clone())?, grpc })
}

/// See [`service`].
#[derive(Debug, Clone)]
pub struct Rest<S> {
    routes: Arc<Routes>,
    grpc: S,
}

/// See [`one_port`].
#[derive(Debug, Clone)]
pub struct OnePort<S> {
    grpc: S,
    rest: Rest<S>,
}

impl<S, B> Service<Request<B>> for OnePort<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.grpc.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Answer {
        let content_type = request.headers().get(header::CONTENT_TYPE);
        if content_type.is_some_and(|value| value.as_bytes().starts_with(GRPC_CONTENT_TYPE)) {
            Box::pin(self.grpc.call(request.map(Body::new)))
        } else {
            self.rest.call(request)
        }
    }
}

impl<S, B> Service<Request<B>> for Rest<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    /// Always ready: the gRPC services are waited for within the call.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Answer {
        let Self { routes, grpc } = self.clone();
        Box::pin(async move { Ok(respond(routes, grpc, request).await) })
    }
}

impl<S> Rest<S> {
    /// The answer to a request that is refused before it is read.
    pub fn refuse(&self, status: &Status, uri: &http::Uri, headers: &HeaderMap) -> Response<Body> {
        let style = Style { format: query::format(uri.query().unwrap_or_default()), gzip: body::accepts_gzip(headers) };
        error_response(&self.routes, status, style)
    }
}

fn error_response(routes: &Routes, status: &Status, style: Style) -> Response<Body> {
    let envelope = error::envelope(routes.pool(), status);
    let text = to_json(&envelope, style.format).unwrap_or_default();
    json_response(error::http_status(status.code()), style.finish(text))
}

/// Answers one request.
async fn respond<S, B>(routes: Arc<Routes>, grpc: S, request: Request<B>) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<BoxError>,
{
    if request.uri().path() == "/" && [Method::GET, Method::HEAD].contains(request.method()) {
        return response(StatusCode::OK, "text/plain; charset=utf-8", ROOT_ANSWER.into());
    }
    let style =
        Style { format: query::format(request.uri().query().unwrap_or_default()), gzip: body::accepts_gzip(request.headers()) };
    match transcode(&routes, grpc, request, style).await {
        Ok(answer) => json_response(StatusCode::OK, answer),
        Err(status) => error_response(&routes, &status, style),
    }
}

/// Calls the method that a request is bound to and converts its answer.
async fn transcode<S, B>(routes: &Arc<Routes>, grpc: S, request: Request<B>, style: Style) -> Result<Text, Status>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    let verb = verb(&parts);
    let Some((route, values)) = routes.find(&verb, parts.uri.path()) else {
        let (verb, path) = (clipped(verb.as_str()), clipped(parts.uri.path()));
        return Err(Status::not_found(format!("Method not found: {verb} {path} is not part of this API.")));
    };
    let values = values.map_err(|error| Status::invalid_argument(error.to_string()))?;
    let encoding = body::encoding(&parts.headers)?;
    let mut body = body::read(body, &parts.headers).await?;
    let mut query = parts.uri.query().unwrap_or_default().to_owned();
    if verb == Method::GET && parts.method == Method::POST && is_form(&parts.headers) {
        // A GET in the clothes of a POST has its query in the body.
        query = format!("{query}&{}", String::from_utf8_lossy(&body::decode(std::mem::take(&mut body), encoding)?));
    }

    let selection = Selection::parse(&query::fields(&query)).map_err(|at| {
        Status::invalid_argument(format!("Invalid field selection: it is not understood from '{}' on.", clipped(&at)))
    })?;
    let (binding, input, output) = (Arc::clone(&route.binding), route.input.clone(), route.output.clone());
    let framed = body::offload(body.len(), move || {
        let body = body::decode(body, encoding)?;
        call::frame(&read_request(&input, &binding, values, &query, &body)?)
    })
    .await?;
    let answer = call::unary(grpc, route.grpc_path.clone(), parts, framed).await?;
    body::offload(answer.len(), move || Ok(style.finish(write_response(output, answer, style.format, &selection)?))).await
}

/// The verb of a request, after the override.
fn verb(parts: &Parts) -> Method {
    let other = parts.headers.get(METHOD_OVERRIDE).filter(|_| parts.method == Method::POST);
    other.and_then(|other| Method::from_bytes(other.as_bytes()).ok()).unwrap_or_else(|| parts.method.clone())
}

fn is_form(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/x-www-form-urlencoded"))
}

/// Puts a request together. The body wins over the query, the path over both.
fn read_request(
    input: &MessageDescriptor,
    binding: &Binding,
    values: Vec<String>,
    query: &str,
    body: &[u8],
) -> Result<DynamicMessage, Status> {
    let mut message = DynamicMessage::new(input.clone());
    query::read(&mut message, query).map_err(error::bad_request)?;
    let target = match &binding.body {
        BodyBinding::Message => Some(&mut message),
        BodyBinding::Field(_) if body.is_empty() => None,
        BodyBinding::Field(field) => message.get_field_mut(field).as_message_mut(),
    };
    if let Some(target) = target {
        json::read_body(target, body).map_err(error::bad_request)?;
    }
    for (way, value) in binding.path_fields.iter().zip(values) {
        let Some((last, outer)) = way.split_last() else { continue };
        let inner = outer.iter().try_fold(&mut message, |message, field| message.get_field_mut(field).as_message_mut());
        if let Some(inner) = inner {
            inner.set_field(last, Value::String(value));
        }
    }
    Ok(message)
}

/// The answer of a method as JSON. Fields with their default are left out, 64-bit integers are strings.
fn write_response(output: MessageDescriptor, answer: Bytes, format: Format, selection: &Selection) -> Result<Vec<u8>, Status> {
    let fault = |text: String| {
        tracing::error!("an answer can't be shown as JSON: {text}");
        Status::internal("The answer could not be read.")
    };
    let message = DynamicMessage::decode(output, answer).map_err(|error| fault(error.to_string()))?;
    let options = SerializeOptions::new().use_enum_numbers(format.enum_numbers);
    let message = Serialized { message, options };
    if selection.is_everything() {
        return to_json(&message, format).map_err(|error| fault(error.to_string()));
    }
    let mut value = serde_json::to_value(message).map_err(|error| fault(error.to_string()))?;
    selection.keep(&mut value);
    to_json(&value, format).map_err(|error| fault(error.to_string()))
}

/// A message together with the way to write it.
struct Serialized {
    message: DynamicMessage,
    options: SerializeOptions,
}

impl Serialize for Serialized {
    fn serialize<W: serde::Serializer>(&self, serializer: W) -> Result<W::Ok, W::Error> {
        self.message.serialize_with_options(serializer, &self.options)
    }
}

fn to_json(value: &impl Serialize, format: Format) -> serde_json::Result<Vec<u8>> {
    if format.one_line {
        return serde_json::to_vec(value);
    }
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

/// How an answer is written.
#[derive(Debug, Clone, Copy)]
struct Style {
    format: Format,
    gzip: bool,
}

/// A finished body.
struct Text {
    body: Bytes,
    gzip: bool,
}

impl Style {
    fn finish(self, text: Vec<u8>) -> Text {
        match self.gzip.then(|| body::gzip(&text)).flatten() {
            Some(body) => Text { body, gzip: true },
            None => Text { body: text.into(), gzip: false },
        }
    }
}

fn json_response(status: StatusCode, text: Text) -> Response<Body> {
    let mut response = response(status, "application/json; charset=UTF-8", text.body);
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if text.gzip {
        response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

fn response(status: StatusCode, content_type: &'static str, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::new(Full::new(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests;
