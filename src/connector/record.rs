//! Resource records: JSON of the model's structs, wrapped with a format version.

use bytes::Bytes;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::Error;
use crate::broker::Record;

/// Format written by this version. Raise it when older servers must not read a record, and migrate in [`decode`].
const FORMAT: u32 = 1;

#[derive(Serialize)]
struct Written<'a, T> {
    format: u32,
    resource: &'a T,
}

#[derive(Deserialize)]
struct Format {
    format: u32,
}

#[derive(Deserialize)]
struct Read<T> {
    resource: T,
}

/// Encodes a resource for the store.
pub fn encode<T: Serialize>(resource: &T) -> Result<Bytes, Error> {
    serde_json::to_vec(&Written { format: FORMAT, resource })
        .map(Bytes::from)
        .map_err(|e| Error::Internal(format!("a record can't be encoded: {e}")))
}

/// Decodes a stored resource.
///
/// # Errors
/// [`Error::Internal`] naming the record when it is damaged or of a newer format.
pub fn decode<T: DeserializeOwned>(record: &Record) -> Result<T, Error> {
    let damaged = |e: serde_json::Error| Error::Internal(format!("the record {} can't be read: {e}", record.name));
    let Format { format } = serde_json::from_slice(&record.body).map_err(damaged)?;
    if format > FORMAT {
        return Err(Error::Internal(format!(
            "the record {} has format {format}, written by a newer version; this one reads formats up to {FORMAT}",
            record.name
        )));
    }
    serde_json::from_slice::<Read<T>>(&record.body).map(|read| read.resource).map_err(damaged)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(body: &str) -> Record {
        Record { name: "projects/p/topics/t1".into(), version: 1, body: Bytes::copy_from_slice(body.as_bytes()) }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let written = encode(&vec![1, 2, 3]).unwrap();
        let read: Vec<u32> = decode(&Record { name: "n".into(), version: 1, body: written }).unwrap();
        assert_eq!(read, [1, 2, 3]);
    }

    #[test]
    fn a_newer_format_is_refused_by_name_even_if_its_content_has_another_shape() {
        let Err(Error::Internal(text)) = decode::<u32>(&record(r#"{"format":2,"thing":{}}"#)) else { panic!("not refused") };
        assert!(text.contains("projects/p/topics/t1") && text.contains("format 2"), "{text}");
    }

    #[test]
    fn a_damaged_record_is_refused_by_name() {
        for body in ["", "{", "[]", r#"{"format":1}"#, r#"{"format":1,"resource":"x"}"#] {
            let Err(Error::Internal(text)) = decode::<u32>(&record(body)) else { panic!("not refused: {body}") };
            assert!(text.contains("projects/p/topics/t1"), "{text}");
        }
    }
}
