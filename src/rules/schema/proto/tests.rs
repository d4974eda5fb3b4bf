//! Definitions, messages and pairs of definitions.

use prost::Message;
use prost_reflect::DescriptorPool;

use super::{Schema, check_change};

fn schema(source: &str) -> Schema {
    Schema::from_source(source).unwrap_or_else(|e| panic!("{source}: {e}"))
}

/// One message with everything in it.
pub(super) const EVERYTHING: &str = r#"
    syntax = "proto3";
    package a.b;
    // A comment with a brace: {
    option java_package = "com.x";
    message M {
        enum Color { RED = 0; BLUE = 5; }
        message Inner { int32 n = 1; M back = 2; }
        double d = 1; float f = 2; int32 i32 = 3; int64 i64 = 4; uint32 u32 = 5; uint64 u64 = 6; sint32 s32 = 7;
        sint64 s64 = 8; fixed32 x32 = 9; fixed64 x64 = 10; sfixed32 sx32 = 11; sfixed64 sx64 = 12; bool b = 13;
        string text_value = 14; bytes raw = 15; Color color = 16; Inner inner = 17;
        repeated int32 ints = 18; repeated string texts = 19; repeated Inner inners = 20;
        map<string, int32> counts = 21; map<int32, Inner> by_id = 22; map<bool, string> by_bool = 23;
        oneof choice { string left = 24; int32 right = 25; }
        optional int32 maybe = 26 [deprecated = true];
        int32 renamed = 27 [json_name = "other"];
        reserved 100 to 200;
    }
"#;

pub(super) const PROTO2: &str = r#"
    message M {
        required string id = 1;
        optional Part part = 2;
        optional Level level = 3;
        optional group Extra = 4 { optional int32 n = 1; }
        extensions 100 to 200;
        message Part { required int32 n = 1; }
        enum Level { LOW = 1; HIGH = 2; }
        extend M { optional int32 ext = 100; }
    }
"#;

#[test]
fn legal_definitions_are_accepted() {
    schema(EVERYTHING);
    schema(PROTO2);
    schema("syntax = \"proto3\"; message M { Kind k = 1; } enum Kind { A = 0; }");
    schema("message M {}");
    schema("syntax = 'proto3'; package p; service S {} message M { p.M m = 1; }");
}

#[test]
fn illegal_definitions_are_refused_with_the_place() {
    for (source, expected) in [
        ("syntax = \"proto3\"; import \"google/protobuf/timestamp.proto\"; message M {}", "imports are not supported"),
        ("import \"other.proto\"; message M {}", "imports are not supported"),
        ("message A {} message B {}", "exactly one message at the top level, not 2"),
        ("enum E { A = 0; }", "exactly one message at the top level, not 0"),
        ("   ", "exactly one message"),
        ("message M {\n  strin g = 1; }", "schema.proto:2:"),
        ("message M { optional google.protobuf.Timestamp t = 1; }", "google.protobuf.Timestamp"),
        ("message M { optional int32 a = 1; optional int32 b = 1; }", "1"),
        ("message M { optional int32 a = 1; optional int32 a = 2; }", "a"),
        ("syntax = \"proto3\"; message M { required int32 a = 1; }", "required"),
        ("message M { optional int32 a = 0; }", "0"),
        ("message M { optional int32 a = 19500; }", "19500"),
        ("message M { optional int32 a = 1 [nonsense = 1]; }", "nonsense"),
        ("syntax = \"proto4\"; message M {}", "proto4"),
        ("edition = \"2023\"; message M {}", "schema.proto"),
        ("{\"type\":\"record\"}", "schema.proto:1:"),
        ("message M {", "reached end of file"),
    ] {
        let error = Schema::from_source(source).map(drop).unwrap_err();
        assert!(error.contains(expected), "{source}\n{error}");
    }
}

#[test]
fn deep_nesting_is_refused_before_it_is_parsed() {
    let deep = |levels: usize| format!("{}{}", "message M {".repeat(levels), "}".repeat(levels));
    schema(&deep(30));
    assert!(Schema::from_source(&deep(25_000)).unwrap_err().contains("levels of nesting"));
    let option = format!("message M {{ option (x) = {}{}; }}", "{ a ".repeat(25_000), "}".repeat(25_000));
    assert!(Schema::from_source(&option).unwrap_err().contains("levels of nesting"));
}

#[test]
fn json_messages_follow_the_mapping() {
    let schema = schema(EVERYTHING);
    for (message, legal) in [
        ("{}", true),
        ("", false),
        ("null", false),
        ("[]", false),
        ("{} x", false),
        (r#"{"d":1,"f":1.5,"i32":-1,"i64":"-5","u32":1,"u64":"18446744073709551615","b":true}"#, true),
        (r#"{"s32":1.0,"s64":1e3,"x32":"7","x64":8,"sx32":-1,"sx64":"-9223372036854775808"}"#, true),
        (r#"{"d":"NaN","f":"-Infinity"}"#, true),
        (r#"{"d":"nan"}"#, false),
        (r#"{"f":1e39}"#, false),
        (r#"{"i32":2147483648}"#, false),
        (r#"{"i32":1.5}"#, false),
        (r#"{"i32":"x"}"#, false),
        (r#"{"i32":true}"#, false),
        (r#"{"u32":-1}"#, false),
        (r#"{"u64":18446744073709551616}"#, false),
        (r#"{"i64":9223372036854775808}"#, false),
        (r#"{"b":"true"}"#, false),
        (r#"{"textValue":"x"}"#, true),
        (r#"{"text_value":"x"}"#, true),
        (r#"{"textValue":"x","text_value":"y"}"#, false),
        (r#"{"textValue":1}"#, false),
        (r#"{"other":1}"#, true),
        (r#"{"renamed":1}"#, true),
        (r#"{"raw":"AAE="}"#, true),
        (r#"{"raw":"_-8"}"#, true),
        (r#"{"raw":"A*"}"#, false),
        (r#"{"color":"BLUE"}"#, true),
        (r#"{"color":5}"#, true),
        (r#"{"color":77}"#, true),
        (r#"{"color":"GREEN"}"#, false),
        (r#"{"inner":{"n":1,"back":{"d":1}}}"#, true),
        (r#"{"inner":{"m":1}}"#, false),
        (r#"{"inner":[]}"#, false),
        (r#"{"ints":[1,"2"]}"#, true),
        (r#"{"ints":[1,null]}"#, false),
        (r#"{"ints":1}"#, false),
        (r#"{"inners":[{},{"n":1}]}"#, true),
        (r#"{"counts":{"a":1,"":2}}"#, true),
        (r#"{"counts":{"a":null}}"#, false),
        (r#"{"byId":{"1":{"n":1}}}"#, true),
        (r#"{"byId":{"x":{}}}"#, false),
        (r#"{"byBool":{"true":"x"}}"#, true),
        (r#"{"byBool":{"yes":"x"}}"#, false),
        (r#"{"left":"x"}"#, true),
        (r#"{"left":"x","right":1}"#, false),
        (r#"{"left":"x","right":null}"#, true),
        (r#"{"i32":null,"inner":null,"ints":null,"counts":null,"color":null}"#, true),
        (r#"{"nope":1}"#, false),
        (r#"{"i32":1,"i32":1}"#, false),
    ] {
        let outcome = schema.validate_json(message.as_bytes());
        assert_eq!(outcome.is_ok(), legal, "{message}: {outcome:?}");
    }
    let deep = "{\"inner\":{\"back\":".repeat(50_000);
    assert!(schema.validate_json(deep.as_bytes()).is_err());
}

#[test]
fn binary_messages_hold_known_fields_of_their_types_only() {
    let schema = schema(EVERYTHING);
    let table: [(&[u8], bool); 27] = [
        (b"", true),
        (b"\x18\x01", true),
        (b"\x18", false),
        (b"\x18\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", false),
        (b"\x18\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", true),
        (b"\x09\x00\x00\x00\x00\x00\x00\x00\x00", true),
        (b"\x09\x00\x00\x00\x00", false),
        (b"\x15\x00\x00\x00\x00", true),
        (b"\x72\x01x", true),
        (b"\x72\x01\xff", false),
        (b"\x72\x05x", false),
        (b"\x7a\x01\xff", true),
        (b"\x80\x01\x05", true),
        (b"\x80\x01\x4d", true),
        (b"\x8a\x01\x02\x08\x01", true),
        (b"\x8a\x01\x02\x18\x01", false),
        (b"\x8a\x01\x05\x08\x01", false),
        (b"\x92\x01\x02\x01\x02", true),
        (b"\x90\x01\x01\x90\x01\x02", true),
        (b"\x92\x01\x02\x01\x80", false),
        (b"\xaa\x01\x05\x0a\x01a\x10\x01", true),
        (b"\xaa\x01\x02\x18\x01", false),
        // Unknown field, number 0, a group, an open group, a wrong wire type.
        (b"\xa0\x06\x01", false),
        (b"\x00\x01", false),
        (b"\x1b\x1c", false),
        (b"\x1c", false),
        (b"\x1a\x01a", false),
    ];
    for (message, legal) in table {
        let outcome = schema.validate_binary(message);
        assert_eq!(outcome.is_ok(), legal, "{message:x?}: {outcome:?}");
    }
    // Field 17 (inner), field 2 (back), and so on.
    let mut deep = Vec::new();
    for level in 0..200 {
        let mut outer = if level % 2 == 0 { vec![0x12] } else { vec![0x8a, 0x01] };
        prost::encoding::encode_varint(deep.len() as u64, &mut outer);
        outer.extend_from_slice(&deep);
        deep = outer;
    }
    assert!(schema.validate_binary(&deep).unwrap_err().contains("nest deeper"));
}

#[test]
fn proto2_demands_its_required_fields_and_its_enum_values() {
    let schema = schema(PROTO2);
    for (message, legal) in [
        (r#"{"id":"x"}"#, true),
        ("{}", false),
        (r#"{"id":null}"#, false),
        (r#"{"id":"x","part":{}}"#, false),
        (r#"{"id":"x","part":{"n":1}}"#, true),
        (r#"{"id":"x","level":"HIGH"}"#, true),
        (r#"{"id":"x","level":3}"#, false),
        (r#"{"id":"x","extra":{"n":1}}"#, true),
        (r#"{"id":"x","[M.ext]":1}"#, true),
        (r#"{"id":"x","[M.no]":1}"#, false),
    ] {
        let outcome = schema.validate_json(message.as_bytes());
        assert_eq!(outcome.is_ok(), legal, "{message}: {outcome:?}");
    }
    let table: [(&[u8], bool); 11] = [
        (b"\x0a\x01x", true),
        (b"", false),
        (b"\x0a\x01\xff", true),
        (b"\x0a\x01x\x12\x00", false),
        (b"\x0a\x01x\x12\x02\x08\x01", true),
        (b"\x0a\x01x\x18\x02", true),
        (b"\x0a\x01x\x18\x03", false),
        (b"\x0a\x01x\x23\x08\x01\x24", true),
        (b"\x0a\x01x\x23\x08\x01", false),
        (b"\x0a\x01x\x23\x08\x01\x2c", false),
        (b"\x0a\x01x\xa0\x06\x01", true),
    ];
    for (message, legal) in table {
        let outcome = schema.validate_binary(message);
        assert_eq!(outcome.is_ok(), legal, "{message:x?}: {outcome:?}");
    }
    assert!(schema.validate_binary(b"").unwrap_err().contains("required field id of M is missing"));
}

/// The descriptors of a source, in their encoded form.
pub(super) fn compiled(source: &str) -> Vec<u8> {
    let mut pool = DescriptorPool::new();
    let file = protox::file::File::from_source("s.proto", source).unwrap();
    pool.add_file_descriptor_proto(file.file_descriptor_proto().clone()).unwrap();
    pool.encode_to_vec()
}

#[test]
pub(super) fn compiled_files_are_accepted_with_the_name_of_their_message() {
    let files = compiled("syntax = \"proto3\"; package p; message A { B b = 1; } message B { int32 n = 1; }");
    for root in ["p.A", ".p.A"] {
        let schema = Schema::from_descriptors(&files, root).unwrap();
        assert_eq!(schema.validate_json(br#"{"b":{"n":1}}"#), Ok(()));
        assert!(schema.validate_json(br#"{"n":1}"#).is_err());
    }
    assert_eq!(Schema::from_descriptors(&files, "p.B").unwrap().validate_json(br#"{"n":1}"#), Ok(()));
    for root in ["", "A", "p.C", "p"] {
        assert!(Schema::from_descriptors(&files, root).unwrap_err().contains("no message"), "{root}");
    }
    assert!(Schema::from_descriptors(b"\xff", "p.A").is_err());
    assert!(Schema::from_descriptors(b"", "p.A").is_err());
}

#[test]
fn types_of_google_protobuf_have_their_own_json() {
    let mut pool = DescriptorPool::global();
    let source = r#"
        syntax = "proto3";
        import "google/protobuf/any.proto"; import "google/protobuf/duration.proto"; import "google/protobuf/field_mask.proto";
        import "google/protobuf/struct.proto"; import "google/protobuf/timestamp.proto"; import "google/protobuf/wrappers.proto";
        message M {
            google.protobuf.Any any = 1; google.protobuf.Duration duration = 2; google.protobuf.FieldMask mask = 3;
            google.protobuf.Struct struct = 4; google.protobuf.Value value = 5; google.protobuf.ListValue list = 6;
            google.protobuf.Timestamp time = 7; google.protobuf.Int64Value number = 8; google.protobuf.BoolValue flag = 9;
            repeated google.protobuf.Value values = 10; google.protobuf.NullValue null = 11;
        }
    "#;
    let file = protox::file::File::from_source("s.proto", source).unwrap();
    pool.add_file_descriptor_proto(file.file_descriptor_proto().clone()).unwrap();
    let schema = Schema::from_descriptors(&pool.encode_to_vec(), "M").unwrap();
    for (message, legal) in [
        (r#"{"duration":"1.5s"}"#, true),
        (r#"{"duration":"x"}"#, false),
        (r#"{"duration":{"seconds":1}}"#, false),
        (r#"{"mask":"fooBar,b"}"#, true),
        (r#"{"mask":"foo_bar"}"#, false),
        (r#"{"struct":{"a":[1,{"b":null}]}}"#, true),
        (r#"{"struct":[]}"#, false),
        (r#"{"value":null}"#, true),
        (r#"{"value":[1,"x",{}]}"#, true),
        (r#"{"value":true}"#, true),
        (r#"{"values":[null,1,"x",true,{},[]]}"#, true),
        (r#"{"list":[1,null]}"#, true),
        (r#"{"list":{}}"#, false),
        (r#"{"time":"2024-01-02T03:04:05.678Z"}"#, true),
        (r#"{"time":"yesterday"}"#, false),
        (r#"{"number":"5"}"#, true),
        (r#"{"number":{"value":5}}"#, false),
        (r#"{"flag":true}"#, true),
        (r#"{"flag":1}"#, false),
        (r#"{"null":null}"#, true),
        (r#"{"any":{"@type":"x"}}"#, false),
    ] {
        let outcome = schema.validate_json(message.as_bytes());
        assert_eq!(outcome.is_ok(), legal, "{message}: {outcome:?}");
    }
}

#[test]
fn only_optional_fields_come_and_go() {
    let message = |fields: &str| format!("message M {{ {fields} }}");
    let base = "optional int32 a = 1; required string id = 2;";
    let nested = |inner: &str| format!("optional int32 a = 1; optional Inner i = 2; message Inner {{ {inner} }}");
    let symbols = |values: &str| format!("optional E e = 1; enum E {{ {values} }}");
    for (old, new, allowed) in [
        (base.into(), base.into(), true),
        (base.into(), format!("{base} optional int32 b = 3;"), true),
        (base.into(), format!("{base} repeated int32 b = 3;"), true),
        (format!("{base} optional int32 b = 3;"), base.into(), true),
        (base.into(), format!("{base} required int32 b = 3;"), false),
        (base.into(), "optional int32 a = 1;".into(), false),
        (base.into(), "optional int64 a = 1; required string id = 2;".into(), false),
        (base.into(), "optional int32 a = 3; required string id = 2;".into(), false),
        (base.into(), "optional int32 b = 1; required string id = 2;".into(), false),
        (base.into(), "repeated int32 a = 1; required string id = 2;".into(), false),
        (base.into(), "optional int32 a = 1; optional string id = 2;".into(), false),
        (base.into(), "oneof o { int32 a = 1; } required string id = 2;".into(), false),
        (nested("optional int32 n = 1;"), nested("optional int32 n = 1; optional M back = 2;"), true),
        (nested("optional int32 n = 1;"), nested("optional bool n = 1;"), false),
        (symbols("A = 0;"), symbols("A = 0; B = 1;"), true),
        (symbols("A = 0; B = 1;"), symbols("A = 0;"), false),
        (symbols("A = 0;"), symbols("A = 1;"), false),
    ] {
        let (old, new) = (message(&old), message(&new));
        let outcome = check_change(&schema(&new), &schema(&old));
        assert_eq!(outcome.is_ok(), allowed, "{old} -> {new}: {outcome:?}");
    }
    assert_eq!(check_change(&schema(EVERYTHING), &schema(EVERYTHING)), Ok(()));
}

#[test]
pub(super) fn compiled_entries_of_maps_must_be_entries() {
    use prost_types::{FieldDescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};
    let mut set = FileDescriptorSet::decode(&compiled(EVERYTHING)[..]).unwrap();
    let entry = |set: &mut FileDescriptorSet| {
        let nested = &mut set.file[0].message_type[0].nested_type;
        nested.iter().position(|m| m.options.is_some()).unwrap()
    };
    let at = entry(&mut set);
    let change = |edit: &dyn Fn(&mut Vec<FieldDescriptorProto>)| {
        let mut changed = set.clone();
        edit(&mut changed.file[0].message_type[0].nested_type[at].field);
        Schema::from_descriptors(&changed.encode_to_vec(), "a.b.M").map(drop)
    };
    assert_eq!(change(&|_| {}), Ok(()));
    assert!(change(&|fields| fields.clear()).is_err());
    assert!(change(&|fields| drop(fields.pop())).is_err());
    assert!(change(&|fields| fields[0].set_type(Type::Double)).is_err());
    assert!(change(&|fields| fields[0].number = Some(3)).is_err());
}
