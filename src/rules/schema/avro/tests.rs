//! Definitions, messages and pairs of definitions, by the specification's text.

use serde_json::json;

use super::{Schema, check_mutual};

fn schema(json: serde_json::Value) -> Schema {
    Schema::parse(&json.to_string()).unwrap_or_else(|e| panic!("{json}: {e}"))
}

/// A record `com.x.Outer` with one field `f` of the given type.
fn field(schema: serde_json::Value) -> serde_json::Value {
    json!({"type": "record", "name": "Outer", "namespace": "com.x", "fields": [{"name": "f", "type": schema}]})
}

#[test]
fn legal_definitions_are_accepted() {
    for legal in [
        json!({"type": "record", "name": "R", "fields": []}),
        json!({"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"], "default": null}]}),
        json!({"type": "record", "name": "a.b.R", "doc": "d", "aliases": ["Old", "x.Older"], "other": 1, "fields": []}),
        field(json!({"type": "int", "logicalType": "date"})),
        field(json!({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 9})),
        field(json!({"type": {"type": "string", "logicalType": "uuid"}})),
        field(json!({"type": ["null", "int"]})),
        field(json!({"type": "enum", "name": "E", "symbols": ["A", "B"], "default": "B"})),
        field(json!({"type": "fixed", "name": "F", "size": 0})),
        field(json!({"type": "map", "values": {"type": "array", "items": "Outer"}})),
        // A name without a namespace is found from inside one.
        json!({"type": "record", "name": "R", "fields": [
            {"name": "a", "type": {"type": "fixed", "name": "F", "size": 2}},
            {"name": "b", "type": {"type": "record", "name": "n.S", "fields": [{"name": "c", "type": "F"}]}}]}),
        // The same short name in two namespaces.
        field(json!([{"type": "record", "name": "a.R", "fields": []}, {"type": "record", "name": "b.R", "fields": []}])),
    ] {
        schema(legal);
    }
}

#[test]
fn illegal_definitions_are_refused_with_the_place() {
    let record = |fields: serde_json::Value| json!({"type": "record", "name": "R", "fields": fields}).to_string();
    for (text, expected) in [
        (r#"{"not_actually":"avro"}"#.to_owned(), "without 'type'"),
        ("syntax = \"proto3\";".into(), "not a JSON text"),
        ("".into(), "not a JSON text"),
        ("null".into(), "null is not a schema"),
        (r#""string""#.into(), "outermost type must be a record"),
        (r#"{"type":"long"}"#.into(), "outermost type must be a record"),
        (r#"{"type":"enum","name":"E","symbols":["A"]}"#.into(), "outermost type must be a record"),
        (r#"["null",{"type":"record","name":"R","fields":[]}]"#.into(), "outermost type must be a record"),
        (r#"{"type":"record","fields":[]}"#.into(), "needs a 'name'"),
        (r#"{"type":"record","name":"R"}"#.into(), "record R: no array 'fields'"),
        (r#"{"type":"record","name":"int","fields":[]}"#.into(), "primitive"),
        (r#"{"type":"record","name":"a-b","fields":[]}"#.into(), "not a legal name"),
        (r#"{"type":"record","name":"a..b","fields":[]}"#.into(), "not a legal name"),
        (r#"{"type":"record","name":"R","aliases":["1"],"fields":[]}"#.into(), "not a legal name"),
        (r#"{"type":"record","name":"R","fields":[]} x"#.into(), "not a JSON text"),
        (record(json!([{"name": "a", "type": "S"}])), "record R: field a: the type \"S\" is not defined"),
        (record(json!([{"name": "a"}])), "field a: no 'type'"),
        (record(json!([{"name": "a", "type": "int"}, {"name": "a", "type": "int"}])), "defined twice"),
        (record(json!([{"name": "a b", "type": "int"}])), "not a legal name"),
        (record(json!([{"name": "a", "type": "int", "order": "up"}])), "not an order"),
        (record(json!([{"name": "a", "type": {"type": "record", "name": "R", "fields": []}}])), "\"R\" is defined twice"),
        (record(json!([{"name": "a", "type": []}])), "at least one branch"),
        (record(json!([{"name": "a", "type": ["int", "int"]}])), "branch \"int\" twice"),
        (record(json!([{"name": "a", "type": ["int", ["null"]]}])), "a branch of a union"),
        (record(json!([{"name": "a", "type": {"type": "array"}}])), "needs 'items'"),
        (record(json!([{"name": "a", "type": {"type": "map"}}])), "needs 'values'"),
        (record(json!([{"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A", "A"]}}])), "there twice"),
        (record(json!([{"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["a-b"]}}])), "not a legal name"),
        (
            record(json!([{"name": "a", "type": {"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}}])),
            "among the symbols",
        ),
        (record(json!([{"name": "a", "type": {"type": "fixed", "name": "F", "size": -1}}])), "'size' must be"),
        (record(json!([{"name": "a", "type": {"type": "fixed", "name": "F", "size": 3_000_000_000u64}}])), "'size' must be"),
        (record(json!([{"name": "a", "type": "int", "default": "x"}])), "default of R.a"),
        (record(json!([{"name": "a", "type": "int", "default": 2_147_483_648u64}])), "default of R.a"),
        (record(json!([{"name": "a", "type": ["null", "int"], "default": "x"}])), "default of R.a"),
        (
            record(json!([{"name": "a", "type": "int"}, {"name": "b", "type": ["R", "null"], "default": {}}])),
            "field a of R is missing",
        ),
    ] {
        let error = Schema::parse(&text).map(drop).unwrap_err();
        assert!(error.contains(expected), "{text}\n{error}");
    }
}

#[test]
fn default_values_are_written_without_branch_names() {
    for (kind, default) in [
        (json!(["null", "int"]), json!(null)),
        (json!(["int", "null"]), json!(7)),
        (json!(["null", "int"]), json!(7)),
        (json!("bytes"), json!("\u{ff}")),
        (json!({"type": "array", "items": ["null", "string"]}), json!([null, "x"])),
        (json!({"type": "map", "values": "double"}), json!({"a": 1, "b": 1.5})),
        (
            json!({"type": "record", "name": "I", "fields": [{"name": "a", "type": "int"}, {"name": "b", "type": "int", "default": 1}]}),
            json!({"a": 5}),
        ),
    ] {
        schema(json!({"type": "record", "name": "R", "fields": [{"name": "f", "type": kind, "default": default}]}));
    }
}

#[test]
fn a_default_that_could_be_tried_in_endlessly_many_ways_is_decided_at_once() {
    let branch = |name: &str| json!({"type": "record", "name": name, "fields": [{"name": "f", "type": "W"}]});
    let wrapper = json!({"type": "record", "name": "W", "fields": [{"name": "u", "type": ["null", branch("A"), branch("B"), branch("C")]}]});
    let mut value = json!(0);
    for _ in 0..50 {
        value = json!({"f": {"u": value}});
    }
    let text = json!({"type": "record", "name": "R", "fields": [{"name": "f", "type": wrapper, "default": {"u": value}}]});
    assert!(Schema::parse(&text.to_string()).is_err());
}

#[test]
fn json_messages_follow_the_avro_encoding_to_the_letter() {
    let inner = json!({"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}]});
    let fixed = json!({"type": "fixed", "name": "F", "size": 2});
    let symbols = json!({"type": "enum", "name": "E", "symbols": ["A", "B"]});
    let timestamp = json!({"type": "long", "logicalType": "timestamp-millis"});
    let decimal = json!({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2});
    let union = json!(["null", "string", "int", inner, {"type": "array", "items": "int"}]);
    let table = [
        (json!(["null", "string"]), r#"{"f":"x"}"#, false),
        (json!(["null", "string"]), r#"{"f":{"string":"x"}}"#, true),
        (json!(["null", "string"]), r#"{"f":null}"#, true),
        (json!(["null", "string"]), r#"{"f":{"null":null}}"#, false),
        (json!(["null", "string"]), r#"{"f":{}}"#, false),
        (json!(["null", "string"]), r#"{"f":{"string":null}}"#, false),
        (json!(["null", "string"]), r#"{"f":{"string":"x","string":"y"}}"#, false),
        (json!(["null", "string"]), "{}", false),
        (json!(["int", "string"]), r#"{"f":null}"#, false),
        (union.clone(), r#"{"f":{"com.x.R":{"a":1}}}"#, true),
        (union.clone(), r#"{"f":{"R":{"a":1}}}"#, false),
        (union.clone(), r#"{"f":{"array":[1]}}"#, true),
        (union.clone(), r#"{"f":{"int":1,"string":"x"}}"#, false),
        (union, r#"{"f":{"long":1}}"#, false),
        (json!("bytes"), r#"{"f":"\u00ff\u0000"}"#, true),
        (json!("bytes"), r#"{"f":"\u0100"}"#, false),
        (json!("bytes"), r#"{"f":[1]}"#, false),
        (fixed.clone(), r#"{"f":"\u00ffa"}"#, true),
        (fixed.clone(), r#"{"f":"a"}"#, false),
        (fixed, r#"{"f":"abc"}"#, false),
        (symbols.clone(), r#"{"f":"B"}"#, true),
        (symbols.clone(), r#"{"f":"C"}"#, false),
        (symbols, r#"{"f":0}"#, false),
        (timestamp.clone(), r#"{"f":1700000000000}"#, true),
        (timestamp, r#"{"f":"2024-01-01T00:00:00Z"}"#, false),
        (decimal.clone(), r#"{"f":"\u0001\u00f4"}"#, true),
        (decimal, r#"{"f":5.00}"#, false),
        (json!("int"), r#"{"f":2147483647}"#, true),
        (json!("int"), r#"{"f":2147483648}"#, false),
        (json!("int"), r#"{"f":-2147483649}"#, false),
        (json!("int"), r#"{"f":1.0}"#, false),
        (json!("int"), r#"{"f":"1"}"#, false),
        (json!("int"), r#"{"f":true}"#, false),
        (json!("long"), r#"{"f":9223372036854775807}"#, true),
        (json!("long"), r#"{"f":9223372036854775808}"#, false),
        (json!("long"), r#"{"f":1e3}"#, false),
        (json!("float"), r#"{"f":1}"#, true),
        (json!("double"), r#"{"f":-1.5e300}"#, true),
        (json!("double"), r#"{"f":18446744073709551616}"#, true),
        (json!("double"), r#"{"f":"NaN"}"#, true),
        (json!("double"), r#"{"f":"1.5"}"#, false),
        (json!("boolean"), r#"{"f":true}"#, true),
        (json!("boolean"), r#"{"f":1}"#, false),
        (json!("null"), r#"{"f":null}"#, true),
        (json!("string"), r#"{"f":"x"}"#, true),
        (json!("string"), r#"{"f":null}"#, false),
        (json!("string"), r#"{"f":"x","g":1}"#, false),
        (json!("string"), r#"{"f":"x","f":"y"}"#, false),
        (json!("string"), r#"{"f":"x"} "#, true),
        (json!("string"), r#"{"f":"x"}{}"#, false),
        (json!("string"), "", false),
        (json!("string"), r#"["x"]"#, false),
        (json!("string"), "{\"f\":\"\u{fffd}\"}", true),
        (json!({"type": "array", "items": "int"}), r#"{"f":[1,2]}"#, true),
        (json!({"type": "array", "items": "int"}), r#"{"f":[1,"2"]}"#, false),
        (json!({"type": "array", "items": "int"}), r#"{"f":{}}"#, false),
        (json!({"type": "map", "values": "int"}), r#"{"f":{"a":1,"b c":2}}"#, true),
        (json!({"type": "map", "values": "int"}), r#"{"f":{"a":null}}"#, false),
        (json!({"type": "map", "values": "int"}), r#"{"f":[]}"#, false),
    ];
    for (kind, message, legal) in table {
        let outcome = schema(field(kind.clone())).validate_json(message.as_bytes());
        assert_eq!(outcome.is_ok(), legal, "{kind} {message}: {outcome:?}");
    }
    assert!(schema(field(json!("string"))).validate_json(b"{\"f\":\"\xff\"}").is_err());
}

#[test]
fn a_missing_field_is_refused_even_with_a_default() {
    let with_default = schema(json!({"type": "record", "name": "R", "fields": [{"name": "f", "type": "int", "default": 1}]}));
    assert_eq!(with_default.validate_json(b"{\"f\":2}"), Ok(()));
    assert!(with_default.validate_json(b"{}").unwrap_err().contains("field f of R is missing"));
}

#[test]
fn binary_messages_are_one_value_and_nothing_more() {
    let symbols = json!({"type": "enum", "name": "E", "symbols": ["A", "B"]});
    let ints = json!({"type": "array", "items": "int"});
    let table: [(serde_json::Value, &[u8], bool); 38] = [
        (json!("int"), b"\x02", true),
        (json!("int"), b"\x02\x00", false),
        (json!("int"), b"", false),
        (json!("int"), b"\x80", false),
        (json!("int"), b"\xff\xff\xff\xff\x0f", true),
        (json!("int"), b"\xff\xff\xff\xff\x10", false),
        (json!("int"), b"\xff\xff\xff\xff\xff\x01", false),
        (json!("long"), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", true),
        (json!("long"), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", false),
        (json!("long"), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", false),
        (json!("null"), b"", true),
        (json!("null"), b"\x00", false),
        (json!("boolean"), b"\x01", true),
        (json!("boolean"), b"\x02", false),
        (json!("float"), b"\x00\x00\x80\x3f", true),
        (json!("float"), b"\x00\x00\x80", false),
        (json!("double"), b"\x00\x00\x00\x00\x00\x00\xf0\x3f", true),
        (json!("string"), b"\x06foo", true),
        (json!("string"), b"\x08foo", false),
        (json!("string"), b"\x01", false),
        (json!("string"), b"\x02\xff", false),
        (json!("bytes"), b"\x02\xff", true),
        (json!("bytes"), b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", false),
        (json!({"type": "fixed", "name": "F", "size": 3}), b"abc", true),
        (json!({"type": "fixed", "name": "F", "size": 3}), b"ab", false),
        (symbols.clone(), b"\x02", true),
        (symbols.clone(), b"\x04", false),
        (symbols, b"\x01", false),
        (json!(["null", "int"]), b"\x00", true),
        (json!(["null", "int"]), b"\x02\x05", true),
        (json!(["null", "int"]), b"\x04", false),
        (ints.clone(), b"\x00", true),
        (ints.clone(), b"\x04\x02\x04\x00", true),
        (ints.clone(), b"\x04\x02\x04", false),
        // A block with its length before it.
        (ints.clone(), b"\x03\x04\x02\x04\x00", true),
        (ints.clone(), b"\x03\x06\x02\x04\x00\x00", false),
        (ints, b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x04\x02\x04\x00", false),
        (json!({"type": "map", "values": "int"}), b"\x02\x02a\x05\x00", true),
    ];
    for (kind, message, legal) in table {
        let outcome = schema(field(kind.clone())).validate_binary(message);
        assert_eq!(outcome.is_ok(), legal, "{kind} {message:x?}: {outcome:?}");
    }
    let error = schema(field(json!("int"))).validate_binary(b"\x02\x00").unwrap_err();
    assert!(error.starts_with("Too much data to parse for schema"), "{error}");
}

#[test]
fn a_few_bytes_do_not_buy_endless_work_or_depth() {
    let nulls = schema(field(json!({"type": "array", "items": "null"})));
    assert!(nulls.validate_binary(b"\x80\x80\x80\x80\x80\x80\x80\x80\x40\x00").unwrap_err().contains("more values"));
    assert_eq!(nulls.validate_binary(b"\xd0\x0f\x00"), Ok(()));

    let endless = schema(json!({"type": "record", "name": "R", "fields": [{"name": "f", "type": "R"}]}));
    assert!(endless.validate_binary(b"").unwrap_err().contains("more values"));
    assert!(endless.validate_json("{\"f\":".repeat(100_000).as_bytes()).is_err());

    let list = schema(json!({"type": "record", "name": "R", "fields": [{"name": "next", "type": ["null", "R"]}]}));
    let chain = |length: usize| [vec![2; length], vec![0]].concat();
    assert_eq!(list.validate_binary(&chain(5000)), Ok(()));
    assert!(list.validate_binary(&chain(5_000_000)).unwrap_err().contains("nest deeper"));
}

#[test]
fn the_nesting_of_a_definition_is_bounded() {
    let deep = |levels: usize| {
        let kind = format!("{}\"int\"{}", "{\"type\":\"array\",\"items\":".repeat(levels), "}".repeat(levels));
        format!("{{\"type\":\"record\",\"name\":\"R\",\"fields\":[{{\"name\":\"f\",\"type\":{kind}}}]}}")
    };
    assert!(Schema::parse(&deep(100)).is_ok());
    assert!(Schema::parse(&deep(10_000)).unwrap_err().contains("recursion limit"));
}

#[test]
fn revisions_must_be_readable_both_ways() {
    let record = |fields: serde_json::Value| json!({"type": "record", "name": "Outer", "namespace": "com.x", "fields": fields});
    let symbols = |symbols: &[&str]| field(json!({"type": "enum", "name": "E", "symbols": symbols}));
    let with_default = |symbols: &[&str]| field(json!({"type": "enum", "name": "E", "symbols": symbols, "default": symbols[0]}));
    let fixed = |size: u32| field(json!({"type": "fixed", "name": "F", "size": size}));
    let decimal = |scale: u32| field(json!({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": scale}));
    let int = json!({"name": "f", "type": "int"});
    let extra = json!({"name": "g", "type": "int"});
    let defaulted = json!({"name": "g", "type": "int", "default": 0});
    let list = |next: &str| json!({"type": "record", "name": "L", "fields": [{"name": "next", "type": ["null", "L"]}, {"name": "v", "type": next}]});
    let table = [
        (record(json!([int])), record(json!([int])), true),
        (record(json!([int])), record(json!([int, defaulted])), true),
        (record(json!([int, defaulted])), record(json!([int])), true),
        (record(json!([int])), record(json!([int, extra])), false),
        (record(json!([int, extra])), record(json!([int])), false),
        (record(json!([int, extra])), record(json!([extra, int])), true),
        (field(json!("int")), field(json!("long")), false),
        (field(json!("int")), field(json!("string")), false),
        (field(json!("string")), field(json!("bytes")), true),
        (field(json!("int")), field(json!(["null", "int"])), false),
        (field(json!(["null", "int"])), field(json!(["int", "null"])), true),
        (field(json!(["null", "int"])), field(json!(["null", "int", "string"])), false),
        (symbols(&["A", "B"]), symbols(&["B", "A"]), true),
        (symbols(&["A"]), symbols(&["A", "B"]), false),
        (with_default(&["A"]), with_default(&["A", "B"]), true),
        (fixed(2), fixed(2), true),
        (fixed(2), fixed(3), false),
        (decimal(2), decimal(2), true),
        (decimal(2), decimal(3), false),
        (field(json!("bytes")), decimal(3), true),
        (field(json!({"type": "array", "items": "int"})), field(json!({"type": "array", "items": "string"})), false),
        (field(json!({"type": "map", "values": "int"})), field(json!({"type": "map", "values": "int"})), true),
        (field(json!({"type": "map", "values": "int"})), field(json!({"type": "array", "items": "int"})), false),
        (list("int"), list("int"), true),
        (list("int"), list("boolean"), false),
        (record(json!([])), json!({"type": "record", "name": "Outer", "namespace": "org.y", "fields": []}), true),
        (record(json!([])), json!({"type": "record", "name": "Other", "namespace": "com.x", "fields": []}), false),
    ];
    for (old, new, compatible) in table {
        let outcome = check_mutual(&schema(new.clone()), &schema(old.clone()));
        assert_eq!(outcome.is_ok(), compatible, "{old} -> {new}: {outcome:?}");
    }
}

#[test]
fn recursive_definitions_of_different_length_are_compared_in_bounded_time() {
    let ring = |length: usize| {
        let mut kind = json!("R0");
        for index in (0..length).rev() {
            kind = json!({"type": "record", "name": format!("R{index}"), "aliases": ["X"], "fields": [{"name": "n", "type": ["null", kind]}]});
        }
        schema(kind)
    };
    let outcome = check_mutual(&ring(30), &ring(31));
    assert!(outcome.is_err(), "names differ");
    assert_eq!(check_mutual(&ring(30), &ring(30)), Ok(()));
}
