//! Bodies: reading them within the size limit, content encodings, and work that is too long for an async task.

use std::io::{Read, Write};

use bytes::{Bytes, BytesMut};
use flate2::{
    Compression,
    read::{MultiGzDecoder, ZlibDecoder},
    write::GzEncoder,
};
use http::{HeaderMap, header};
use http_body_util::BodyExt;
use tonic::{Code, Status};
use tower::BoxError;

use crate::model::limits::MAX_REQUEST_BYTES;

/// A body over the limit is read on up to this size, so that a client that has sent it all gets to see the answer instead of
/// a broken connection. Four times the limit takes in the usual mistakes.
const MAX_DISCARDED_BYTES: usize = 4 * MAX_REQUEST_BYTES;
/// Smaller answers are not compressed: the header of gzip and the time outweigh the gain.
const MIN_GZIP_BYTES: usize = 1024;
/// Bodies from this size on are converted on a thread for blocking work. At some 100 MB/s less takes under a millisecond.
const MIN_OFFLOADED_BYTES: usize = 64 * 1024;

/// How a request body is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    Identity,
    Gzip,
    Deflate,
}

/// The encoding of a request body; an error if it is none that is read here.
pub fn encoding(headers: &HeaderMap) -> Result<Encoding, Status> {
    let name = headers.get(header::CONTENT_ENCODING).map(|value| value.as_bytes().to_ascii_lowercase());
    match name.as_deref() {
        None | Some(b"" | b"identity") => Ok(Encoding::Identity),
        Some(b"gzip" | b"x-gzip") => Ok(Encoding::Gzip),
        Some(b"deflate") => Ok(Encoding::Deflate),
        Some(_) => Err(Status::invalid_argument("Unsupported Content-Encoding: it must be gzip, deflate or identity.")),
    }
}

/// Whether the caller takes gzip. A quality of zero refuses it.
pub fn accepts_gzip(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|choice| {
        let mut parts = choice.split(';').map(str::trim);
        let gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let refused = |part: &str| part.strip_prefix("q=").and_then(|q| q.parse::<f32>().ok()).is_some_and(|q| q <= 0.0);
        gzip && !parts.any(refused)
    })
}

fn too_large() -> Status {
    Status::invalid_argument(format!("Request payload size exceeds the limit: {MAX_REQUEST_BYTES} bytes."))
}

/// Reads a request body as sent, up to the limit.
pub async fn read<B>(body: B, headers: &HeaderMap) -> Result<Bytes, Status>
where
    B: http_body::Body<Data = Bytes> + Send,
    B::Error: Into<BoxError>,
{
    let announced = body.size_hint().lower();
    if announced > MAX_REQUEST_BYTES as u64 && headers.contains_key(header::EXPECT) {
        // The client waits for a sign to go on, and does not get it.
        return Err(too_large());
    }
    let mut body = std::pin::pin!(body);
    let mut whole = BytesMut::new();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(unreadable)?;
        let Ok(data) = frame.into_data() else { continue };
        length += data.len();
        if length > MAX_DISCARDED_BYTES {
            break;
        }
        if length <= MAX_REQUEST_BYTES {
            whole.extend_from_slice(&data);
        }
    }
    if length > MAX_REQUEST_BYTES { Err(too_large()) } else { Ok(whole.freeze()) }
}

/// Why a body can't be read: the transport says so itself where it gave up, as on a body that comes too slowly.
fn unreadable(error: impl Into<BoxError>) -> Status {
    match error.into().downcast::<Status>() {
        Ok(status) if status.code() != Code::Unknown && status.code() != Code::Internal => *status,
        Ok(status) => Status::invalid_argument(format!("The request body can't be read: {}", status.message())),
        Err(error) => Status::invalid_argument(format!("The request body can't be read: {error}")),
    }
}

/// Undoes the content encoding. The limit holds for the result too.
pub fn decode(body: Bytes, encoding: Encoding) -> Result<Bytes, Status> {
    match encoding {
        Encoding::Identity => Ok(body),
        Encoding::Gzip => read_limited(MultiGzDecoder::new(&*body)),
        Encoding::Deflate => read_limited(ZlibDecoder::new(&*body)),
    }
}

fn read_limited(reader: impl Read) -> Result<Bytes, Status> {
    let mut plain = Vec::new();
    let limit = MAX_REQUEST_BYTES as u64;
    reader
        .take(limit + 1)
        .read_to_end(&mut plain)
        .map_err(|error| Status::invalid_argument(format!("The request body can't be decompressed: {error}")))?;
    if plain.len() > MAX_REQUEST_BYTES { Err(too_large()) } else { Ok(plain.into()) }
}

/// Compresses an answer if it is worth it.
pub fn gzip(body: &[u8]) -> Option<Bytes> {
    if body.len() < MIN_GZIP_BYTES {
        return None;
    }
    let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 2), Compression::fast());
    // Writing to a vector can't fail; if it did, the plain answer is as good.
    encoder.write_all(body).ok()?;
    encoder.finish().ok().map(Bytes::from)
}

/// Carries out work on a body of some size, on a thread for blocking work if the size is large.
pub async fn offload<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    if bytes < MIN_OFFLOADED_BYTES {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => {
            tracing::error!("converting a body failed: {error}");
            Err(Status::internal("The request could not be processed."))
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use http_body_util::Full;

    use super::*;

    fn headers(name: header::HeaderName, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_static(value))])
    }

    #[test]
    fn gzip_is_taken_where_it_is_accepted() {
        for (value, expected) in [
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("br", false),
            ("gzip;q=0", false),
            ("gzip; q=0.0", false),
            ("identity", false),
            ("", false),
        ] {
            assert_eq!(accepts_gzip(&headers(header::ACCEPT_ENCODING, value)), expected, "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn unknown_encodings_are_refused() {
        assert_eq!(encoding(&HeaderMap::new()).unwrap(), Encoding::Identity);
        assert_eq!(encoding(&headers(header::CONTENT_ENCODING, "GZip")).unwrap(), Encoding::Gzip);
        assert_eq!(encoding(&headers(header::CONTENT_ENCODING, "deflate")).unwrap(), Encoding::Deflate);
        assert!(encoding(&headers(header::CONTENT_ENCODING, "br")).is_err());
    }

    #[test]
    fn the_limit_holds_for_the_decoded_body() {
        let plain = vec![b' '; MAX_REQUEST_BYTES];
        assert_eq!(decode(gzip(&plain).unwrap(), Encoding::Gzip).unwrap(), plain);
        let larger = gzip(&vec![b' '; MAX_REQUEST_BYTES + 1]).unwrap();
        assert!(larger.len() < MAX_REQUEST_BYTES);
        let error = decode(larger, Encoding::Gzip).unwrap_err();
        assert_eq!(error.message(), "Request payload size exceeds the limit: 10485760 bytes.");
        assert_eq!(error.code(), tonic::Code::InvalidArgument);
    }

    #[test]
    fn damaged_gzip_is_refused() {
        assert!(decode(Bytes::from_static(b"not gzip"), Encoding::Gzip).is_err());
        let whole = gzip(&[b'x'; 5000]).unwrap();
        assert!(decode(whole.slice(..whole.len() - 4), Encoding::Gzip).is_err());
    }

    #[tokio::test]
    async fn a_body_over_the_limit_is_read_to_its_end_and_refused() {
        let body = |bytes| Full::new(Bytes::from(vec![b' '; bytes]));
        assert_eq!(read(body(MAX_REQUEST_BYTES), &HeaderMap::new()).await.unwrap().len(), MAX_REQUEST_BYTES);
        assert!(read(body(MAX_REQUEST_BYTES + 1), &HeaderMap::new()).await.is_err());
        assert!(read(body(MAX_REQUEST_BYTES + 1), &headers(header::EXPECT, "100-continue")).await.is_err());
    }

    #[tokio::test]
    async fn large_work_gives_the_same_result_as_small() {
        for size in [0, MIN_OFFLOADED_BYTES] {
            assert_eq!(offload(size, move || Ok(size)).await.unwrap(), size);
        }
    }
}
