//! The Apache implementation as a reference: what it writes is accepted here, what is accepted here it can read.

use std::sync::atomic::{AtomicU32, Ordering};

use apache_avro::{Schema as Reference, reader::datum::GenericDatumReader, types::Value, writer::datum::GenericDatumWriter};
use proptest::prelude::*;
use serde_json::json;

use super::Schema;

/// A type with values of it: its definition, and for each value the reference's form and the JSON encoding.
#[derive(Debug, Clone)]
struct Sample {
    definition: serde_json::Value,
    /// What JSON calls a union's branch of this type.
    branch: String,
    value: Value,
    json: serde_json::Value,
}

fn sample(definition: &str, value: Value, json: serde_json::Value) -> Sample {
    Sample { definition: json!(definition), branch: definition.to_owned(), value, json }
}

fn latin(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(*b)).collect()
}

fn leaf() -> impl Strategy<Value = Sample> {
    prop_oneof![
        Just(sample("null", Value::Null, json!(null))),
        any::<bool>().prop_map(|v| sample("boolean", Value::Boolean(v), json!(v))),
        any::<i32>().prop_map(|v| sample("int", Value::Int(v), json!(v))),
        any::<i64>().prop_map(|v| sample("long", Value::Long(v), json!(v))),
        any::<i16>().prop_map(|v| sample("float", Value::Float(v.into()), json!(v))),
        any::<i32>().prop_map(|v| sample("double", Value::Double(v.into()), json!(f64::from(v)))),
        any::<Vec<u8>>().prop_map(|v| sample("bytes", Value::Bytes(v.clone()), json!(latin(&v)))),
        any::<String>().prop_map(|v| sample("string", Value::String(v.clone()), json!(v))),
    ]
}

/// No name may be defined twice in one schema, so none is in one test run.
fn new_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("ns.N{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn record(fields: Vec<Sample>) -> Sample {
    let fields: Vec<_> = fields.into_iter().enumerate().map(|(i, field)| (format!("f{i}"), field)).collect();
    let definitions: Vec<_> = fields.iter().map(|(name, f)| json!({"name": name, "type": f.definition})).collect();
    let name = new_name();
    Sample {
        definition: json!({"type": "record", "name": name, "fields": definitions}),
        branch: name,
        value: Value::Record(fields.iter().map(|(name, f)| (name.clone(), f.value.clone())).collect()),
        json: fields.iter().map(|(name, f)| (name.clone(), f.json.clone())).collect::<serde_json::Map<_, _>>().into(),
    }
}

fn any_sample() -> impl Strategy<Value = Sample> {
    leaf().prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(record),
            (inner.clone(), 0usize..4).prop_map(|(item, count)| Sample {
                definition: json!({"type": "array", "items": item.definition}),
                branch: "array".into(),
                value: Value::Array(vec![item.value; count]),
                json: json!(vec![item.json; count]),
            }),
            (inner.clone(), prop::collection::hash_set("[a-z]{0,3}", 0..4)).prop_map(|(item, keys)| Sample {
                definition: json!({"type": "map", "values": item.definition}),
                branch: "map".into(),
                value: Value::Map(keys.iter().map(|k| (k.clone(), item.value.clone())).collect()),
                json: keys.iter().map(|k| (k.clone(), item.json.clone())).collect::<serde_json::Map<_, _>>().into(),
            }),
            (inner, any::<bool>())
                .prop_map(|(item, second)| {
                    let other = if item.branch == "null" { "int" } else { "null" };
                    let json = if item.branch == "null" { item.json } else { json!({item.branch: item.json}) };
                    let union = if second { json!([other, item.definition]) } else { json!([item.definition, other]) };
                    Sample {
                        definition: union,
                        branch: "union".into(),
                        value: Value::Union(u32::from(second), Box::new(item.value)),
                        json,
                    }
                })
                .prop_filter("a union is no branch of a union", |s| {
                    s.definition.as_array().is_some_and(|branches| branches.iter().all(|b| !b.is_array()))
                }),
            (0usize..3, any::<[u8; 3]>()).prop_map(|(size, bytes)| (size, bytes, new_name())).prop_map(|(size, bytes, name)| {
                Sample {
                    definition: json!({"type": "fixed", "name": name, "size": size}),
                    branch: name,
                    value: Value::Fixed(size, bytes[..size].to_vec()),
                    json: json!(latin(&bytes[..size])),
                }
            }),
            (0u32..3).prop_map(|index| (index, new_name())).prop_map(|(index, name)| Sample {
                definition: json!({"type": "enum", "name": name, "symbols": ["A", "B", "C"]}),
                branch: name,
                value: Value::Enum(index, ["A", "B", "C"][index as usize].into()),
                json: json!(["A", "B", "C"][index as usize]),
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn what_the_reference_writes_is_accepted_in_both_encodings(fields in prop::collection::vec(any_sample(), 0..4), cut in any::<prop::sample::Index>()) {
        let sample = record(fields);
        let text = sample.definition.to_string();
        let reference = Reference::parse_str(&text).map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
        let schema = Schema::parse(&text).map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
        let writer = GenericDatumWriter::builder(&reference).build().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let datum = writer.write_value_to_vec(sample.value.clone()).map_err(|e| TestCaseError::fail(format!("{text}: {e}")))?;
        prop_assert_eq!(schema.validate_binary(&datum), Ok(()), "{} {:x?}", text, datum);
        let longer = [datum.as_slice(), &[0]].concat();
        prop_assert!(schema.validate_binary(&longer).is_err());
        if !datum.is_empty() {
            let shorter = &datum[..cut.index(datum.len())];
            prop_assert!(schema.validate_binary(shorter).is_err(), "{} {:x?}", text, shorter);
        }
        prop_assert_eq!(schema.validate_json(sample.json.to_string().as_bytes()), Ok(()), "{} {}", text, sample.json);
    }

    #[test]
    fn what_is_accepted_here_the_reference_can_read(
        fields in prop::collection::vec(any_sample(), 0..4),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let sample = record(fields);
        let text = sample.definition.to_string();
        let (Ok(reference), Ok(schema)) = (Reference::parse_str(&text), Schema::parse(&text)) else {
            return Err(TestCaseError::fail(text));
        };
        let writer = GenericDatumWriter::builder(&reference).build().map_err(|e| TestCaseError::fail(e.to_string()))?;
        let mut datum = writer.write_value_to_vec(sample.value.clone()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        for (place, byte) in edits {
            if !datum.is_empty() {
                let at = place.index(datum.len());
                datum[at] = byte;
            }
        }
        if schema.validate_binary(&datum).is_ok() {
            let reader = GenericDatumReader::builder(&reference).build().map_err(|e| TestCaseError::fail(e.to_string()))?;
            let mut input = datum.as_slice();
            let read = reader.read_value(&mut input);
            prop_assert!(read.is_ok(), "{} {:x?}: {:?}", text, datum, read);
            prop_assert!(input.is_empty());
        }
    }

    #[test]
    fn no_bytes_make_a_check_panic(sample in any_sample(), data in any::<Vec<u8>>(), text in any::<String>()) {
        let schema = Schema::parse(&record(vec![sample]).definition.to_string()).map_err(TestCaseError::fail)?;
        let _ = schema.validate_binary(&data);
        let _ = schema.validate_json(&data);
        let _ = schema.validate_json(text.as_bytes());
        let _ = Schema::parse(&text);
    }
}
