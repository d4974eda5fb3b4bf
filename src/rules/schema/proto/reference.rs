//! prost-reflect's dynamic messages as a reference: what they hold is accepted here, what is accepted here they can hold.

use std::sync::OnceLock;

use proptest::prelude::*;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor};
use prost_types::{FileDescriptorProto, FileDescriptorSet};

use super::Schema;

const SOURCE: &str = r#"
    syntax = "proto3";
    message M {
        enum E { A = 0; B = 1; }
        double d = 1; float f = 2; int32 i = 3; uint64 u = 4; sint64 s = 5; fixed32 x = 6; sfixed64 y = 7; bool b = 8;
        string t = 9; bytes raw = 10; E e = 11; M m = 12; repeated int32 is = 13; repeated M ms = 14; repeated string ts = 15;
        map<string, M> by_name = 16; map<int64, bool> flags = 17;
        oneof choice { string left = 18; E right = 19; }
    }
"#;

fn both() -> &'static (Schema, MessageDescriptor) {
    static BOTH: OnceLock<(Schema, MessageDescriptor)> = OnceLock::new();
    BOTH.get_or_init(|| {
        let mut pool = DescriptorPool::new();
        let file = protox::file::File::from_source("s.proto", SOURCE).unwrap();
        pool.add_file_descriptor_proto(file.file_descriptor_proto().clone()).unwrap();
        (Schema::from_source(SOURCE).unwrap(), pool.get_message_by_name("M").unwrap())
    })
}

fn any_scalar() -> impl Strategy<Value = serde_json::Value> {
    prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i32>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        any::<i64>().prop_map(|v| v.to_string().into()),
        any::<f32>().prop_map(Into::into),
        (-3i32..3).prop_map(Into::into),
        prop::sample::select(vec!["A", "B", "C", "", "AAA=", "true", "1", "-0", "NaN", "1.5", "é"]).prop_map(Into::into),
    ]
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    let names = vec![
        "d", "f", "i", "u", "s", "x", "y", "b", "t", "raw", "e", "m", "is", "ms", "ts", "byName", "by_name", "flags", "left",
        "right", "1", "true", "z",
    ];
    any_scalar().prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Into::into),
            prop::collection::vec((prop::sample::select(names.clone()), inner), 0..4).prop_map(|entries| entries
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v))
                .collect::<serde_json::Map<_, _>>()
                .into()),
        ]
    })
}

/// A message of the schema in JSON, correct more often than not.
fn likely_json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        ("[dfiusxy]", any::<u8>()).prop_map(|(k, v)| serde_json::json!({ k: v })),
        any::<bool>().prop_map(|v| serde_json::json!({"b": v})),
        any::<String>().prop_map(|v| serde_json::json!({"t": v, "left": v})),
        prop::collection::vec(any::<i32>(), 0..4).prop_map(|v| serde_json::json!({"is": v})),
        prop::collection::hash_map(any::<i64>(), any::<bool>(), 0..3).prop_map(|v| serde_json::json!({"flags": v})),
        Just(serde_json::json!({"e": "B", "raw": "AAE="})),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(|v| serde_json::json!({"m": v})),
            prop::collection::vec(inner.clone(), 0..3).prop_map(|v| serde_json::json!({"ms": v})),
            prop::collection::hash_map("[a-c]", inner.clone(), 0..3).prop_map(|v| serde_json::json!({"byName": v})),
            (inner.clone(), inner).prop_map(|(mut a, b)| {
                if let (Some(a), serde_json::Value::Object(b)) = (a.as_object_mut(), b) {
                    a.extend(b);
                }
                a
            }),
        ]
    })
}

/// Small changes anywhere in a file's description.
fn any_edit() -> impl Strategy<Value = (prop::sample::Index, u8)> {
    (any::<prop::sample::Index>(), any::<u8>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn json_is_judged_like_the_reference_judges_it(json in prop_oneof![any_json(), likely_json()]) {
        let (schema, descriptor) = both();
        let text = json.to_string();
        let reference = DynamicMessage::deserialize(descriptor.clone(), &mut serde_json::Deserializer::from_str(&text));
        let outcome = schema.validate_json(text.as_bytes());
        prop_assert_eq!(outcome.is_ok(), reference.is_ok(), "{}\n{:?}\n{:?}", text, outcome, reference.err());
    }

    #[test]
    fn what_the_reference_writes_is_accepted(json in likely_json()) {
        let (schema, descriptor) = both();
        if let Ok(message) = DynamicMessage::deserialize(descriptor.clone(), json) {
            let wire = message.encode_to_vec();
            prop_assert_eq!(schema.validate_binary(&wire), Ok(()), "{:x?}", wire);
            prop_assert!(schema.validate_binary(&[wire.as_slice(), &[0xa0, 0x06, 0x01]].concat()).is_err());
        }
    }

    #[test]
    fn what_is_accepted_the_reference_can_read(json in likely_json(), edits in prop::collection::vec(any_edit(), 0..4)) {
        let (schema, descriptor) = both();
        let mut wire = DynamicMessage::deserialize(descriptor.clone(), json).map(|m| m.encode_to_vec()).unwrap_or_default();
        for (place, byte) in edits {
            if !wire.is_empty() {
                let at = place.index(wire.len());
                wire[at] = byte;
            }
        }
        let reference = DynamicMessage::decode(descriptor.clone(), &wire[..]);
        match schema.validate_binary(&wire) {
            Ok(()) => prop_assert!(reference.is_ok_and(|m| m.unknown_fields().next().is_none()), "{:x?}", wire),
            // What is refused is malformed, or holds a field that is unknown at some depth.
            Err(error) => prop_assert!(reference.is_err() || error.contains("no field") || error.contains("wire type"), "{:x?} {}", wire, error),
        }
    }

    #[test]
    fn no_input_makes_a_check_panic(data in any::<Vec<u8>>(), text in any::<String>()) {
        let (schema, _) = both();
        let _ = schema.validate_binary(&data);
        let _ = schema.validate_json(&data);
        let _ = schema.validate_json(text.as_bytes());
        let _ = Schema::from_descriptors(&data, &text);
    }

    #[test]
    fn damaged_definitions_never_panic(edits in prop::collection::vec(any_edit(), 1..4), from_source in any::<bool>()) {
        if from_source {
            let mut source = super::tests::EVERYTHING.as_bytes().to_vec();
            for (place, byte) in &edits {
                let at = place.index(source.len());
                source[at] = byte % 0x80;
            }
            let _ = Schema::from_source(&String::from_utf8_lossy(&source));
        } else {
            let mut files = super::tests::compiled(super::tests::PROTO2);
            for (place, byte) in &edits {
                let at = place.index(files.len());
                files[at] = *byte;
            }
            let _ = Schema::from_descriptors(&files, "M");
        }
    }

    #[test]
    fn descriptions_of_the_wrong_shape_never_panic(
        number in any::<i32>(), kind in 0i32..20, label in 0i32..5, oneof in proptest::option::of(-2i32..3),
        type_name in prop::sample::select(vec!["", ".", "M", ".M", ".M.E", "x", ".M.ByNameEntry"]), entry in any::<bool>(),
        range in (any::<i32>(), any::<i32>()), at in any::<prop::sample::Index>(),
    ) {
        let set = FileDescriptorSet::decode(&super::tests::compiled(SOURCE)[..]).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let mut file: FileDescriptorProto = set.file[0].clone();
        let message = &mut file.message_type[0];
        let at = at.index(message.field.len());
        let field = &mut message.field[at];
        (field.number, field.r#type, field.label, field.oneof_index) = (Some(number), Some(kind), Some(label), oneof);
        field.type_name = Some(type_name.to_owned());
        field.default_value = (number % 2 == 0).then(|| type_name.to_owned());
        message.extension_range = vec![prost_types::descriptor_proto::ExtensionRange { start: Some(range.0), end: Some(range.1), options: None }];
        message.reserved_range = vec![prost_types::descriptor_proto::ReservedRange { start: Some(range.1), end: Some(range.0) }];
        message.options = entry.then(|| prost_types::MessageOptions { map_entry: Some(true), ..Default::default() });
        file.source_code_info = None;
        let files = FileDescriptorSet { file: vec![file] }.encode_to_vec();
        if let Ok(schema) = Schema::from_descriptors(&files, "M") {
            let _ = schema.validate_json(br#"{"d":1,"m":{},"byName":{"a":{}},"is":[1]}"#);
            let _ = schema.validate_binary(b"\x1a\x01\x01");
        }
    }
}
