//! One unary call of the gRPC services within the process.
//!
//! The request looks as if it had come over the network, with the caller's headers as metadata, so that interceptors and
//! validators see no difference.

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Version, header, request::Parts, uri::PathAndQuery};
use http_body_util::{BodyExt, Full};
use prost::Message;
use tonic::{Status, body::Body};
use tower::{BoxError, Service, ServiceExt};

/// Bytes before a message in a gRPC body: a flag for compression and the length.
const FRAME_HEADER_BYTES: usize = 5;
/// How long gcloud says it will wait, in seconds.
const SERVER_TIMEOUT: &str = "x-server-timeout";
/// The largest timeout that gRPC can express has eight digits.
const MAX_TIMEOUT_MILLIS: f64 = 99_999_999.0;

/// Headers about the HTTP message or the connection rather than the call. They do not become metadata.
const NOT_METADATA: [HeaderName; 13] = [
    header::ACCEPT,
    header::ACCEPT_ENCODING,
    header::CONNECTION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::EXPECT,
    header::HOST,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
];

/// Encodes a message as the body of a gRPC request.
pub fn frame(message: &impl Message) -> Result<Bytes, Status> {
    let length = message.encoded_len();
    let prefix = u32::try_from(length).map_err(|_| Status::invalid_argument("The request is too large."))?;
    let mut body = BytesMut::with_capacity(FRAME_HEADER_BYTES + length);
    body.put_u8(0);
    body.put_u32(prefix);
    message.encode(&mut body).map_err(|error| Status::internal(error.to_string()))?;
    Ok(body.freeze())
}

/// Calls a method with a framed message and returns the message of the answer.
///
/// `parts` are those of the HTTP request; its extensions (such as the peer's address) go along.
pub async fn unary<S>(grpc: S, path: PathAndQuery, parts: Parts, body: Bytes) -> Result<Bytes, Status>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Into<BoxError>,
{
    let mut request = Request::new(Body::new(Full::new(body)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = path.into();
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = metadata(parts.headers);
    *request.extensions_mut() = parts.extensions;
    let response = grpc.oneshot(request).await.map_err(|error| Status::from_error(error.into()))?;

    let headers = response.headers();
    if let Some(status) = Status::from_header_map(headers).filter(|status| status.code() != tonic::Code::Ok) {
        return Err(status);
    }
    let body = response.into_body().collect().await?;
    match body.trailers().and_then(Status::from_header_map) {
        Some(status) if status.code() != tonic::Code::Ok => return Err(status),
        _ => {}
    }
    unframe(body.to_bytes())
}

/// The headers of the call.
fn metadata(mut headers: HeaderMap) -> HeaderMap {
    let timeout = headers.remove(SERVER_TIMEOUT).and_then(|seconds| timeout(&seconds));
    let removed: Vec<HeaderName> =
        headers.keys().filter(|name| NOT_METADATA.contains(name) || name.as_str().starts_with("grpc-")).cloned().collect();
    for name in removed {
        headers.remove(name);
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(header::TE, HeaderValue::from_static("trailers"));
    if let Some(timeout) = timeout {
        headers.insert("grpc-timeout", timeout);
    }
    headers
}

/// Seconds as a gRPC timeout. What is no positive number is passed over.
fn timeout(seconds: &HeaderValue) -> Option<HeaderValue> {
    let millis = seconds.to_str().ok()?.trim().parse::<f64>().ok()? * 1000.0;
    let millis = (millis >= 1.0).then(|| millis.min(MAX_TIMEOUT_MILLIS) as u64)?;
    HeaderValue::try_from(format!("{millis}m")).ok()
}

/// The message of a body with one frame.
fn unframe(body: Bytes) -> Result<Bytes, Status> {
    match body.first_chunk::<FRAME_HEADER_BYTES>() {
        Some([0, length @ ..]) if u32::from_be_bytes(*length) as usize == body.len() - FRAME_HEADER_BYTES => {
            Ok(body.slice(FRAME_HEADER_BYTES..))
        }
        _ => {
            tracing::error!("a method answered with a malformed body of {} bytes", body.len());
            Err(Status::internal("The answer could not be read."))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_of_the_caller_become_metadata() {
        let headers = [
            ("authorization", "Bearer x"),
            ("x-goog-user-project", "p"),
            ("user-agent", "test"),
            ("content-length", "5"),
            ("content-type", "text/plain"),
            ("accept-encoding", "gzip"),
            ("grpc-encoding", "gzip"),
            ("grpc-timeout", "1n"),
            ("connection", "close"),
            ("x-server-timeout", "20"),
        ];
        let headers = headers.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        let metadata = metadata(HeaderMap::from_iter(headers));
        let mut found: Vec<_> = metadata.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        found.sort_unstable();
        assert_eq!(
            found,
            [
                ("authorization", "Bearer x"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", "20000m"),
                ("te", "trailers"),
                ("user-agent", "test"),
                ("x-goog-user-project", "p"),
            ]
        );
    }

    #[test]
    fn a_timeout_that_means_nothing_is_passed_over() {
        let read = |text| timeout(&HeaderValue::from_static(text)).map(|value| value.to_str().unwrap().to_owned());
        assert_eq!(read("0.5"), Some("500m".to_owned()));
        assert_eq!(read("1e99"), Some("99999999m".to_owned()));
        for text in ["", "x", "0", "-1", "NaN", "inf x"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn only_one_whole_frame_is_an_answer() {
        let framed = frame(&"text".to_owned()).unwrap();
        assert_eq!(unframe(framed.clone()).unwrap(), framed.slice(FRAME_HEADER_BYTES..));
        assert!(unframe(Bytes::new()).is_err());
        assert!(unframe(framed.slice(..framed.len() - 1)).is_err());
        assert!(unframe([&framed[..], &framed[..]].concat().into()).is_err());
        assert!(unframe(Bytes::from_static(&[1, 0, 0, 0, 0])).is_err());
    }
}
