use super::*;

fn transform(code: &str) -> MessageTransform {
    MessageTransform { function_name: "f".into(), code: code.into(), disabled: false, enabled: false }
}

fn metadata() -> Metadata {
    Metadata { message_id: Some("17".into()), publish_time_ms: 1_769_860_800_999 }
}

fn instance(code: &str) -> Instance {
    Instance::new(&transform(code), || {}).unwrap()
}

fn call(code: &str, message: &EncodedMessage) -> Result<Option<EncodedMessage>, TransformError> {
    instance(code).call(message, &metadata())
}

/// The error of a function on a small message.
fn error(code: &str) -> TransformError {
    call(code, &EncodedMessage::encode(b"data", [("a", "1")], "")).unwrap_err()
}

fn load_error(code: &str) -> String {
    Instance::new(&transform(code), || {}).err().unwrap().to_string()
}

#[test]
fn a_function_sees_the_message_and_changes_it() {
    let message = EncodedMessage::encode("gr\u{fc}\u{df}e \u{1F600}\0".as_bytes(), [("a", "1"), ("b", "2")], "key");
    let code = "function f(message, metadata) {
        delete message.attributes.a;
        message.attributes.seen = [metadata.message_id, metadata.publish_time, metadata.ordering_key].join(' ');
        message.data = message.data + '!';
        return message;
    }";
    let changed = call(code, &message).unwrap().unwrap();
    assert_eq!(changed.data(), "gr\u{fc}\u{df}e \u{1F600}\0!".as_bytes());
    assert_eq!(changed.ordering_key(), "key");
    let attributes: Vec<_> = changed.attributes().collect();
    assert_eq!(attributes, [("b", "2"), ("seen", "17 2026-01-31T12:00:00Z key")]);
}

#[test]
fn a_message_of_ten_megabytes_passes() {
    let text = format!(r#"{{"text":"{}"}}"#, "\u{e9}x".repeat(3_333_300));
    let message = EncodedMessage::encode(text.as_bytes(), [("a", "1")], "");
    assert_eq!(call("function f(m) { return m; }", &message).unwrap().unwrap().data().len(), message.data().len());
    let written = call("function f(m) { m.attributes.length = String(m.data.length); return m; }", &message).unwrap().unwrap();
    assert_eq!(written.attribute_map()["length"], text.chars().count().to_string());
}

#[test]
fn null_and_undefined_drop_the_message_and_missing_attributes_clear_them() {
    let message = EncodedMessage::encode(b"x", [("a", "1")], "");
    assert_eq!(call("function f() { return null; }", &message), Ok(None));
    assert_eq!(call("function f() {}", &message), Ok(None));
    let cleared = call("const f = (m) => ({ data: m.data });", &message).unwrap().unwrap();
    assert_eq!((cleared.data(), cleared.attributes().count()), (&b"x"[..], 0));
}

#[test]
fn what_is_no_message_is_an_error_that_says_so() {
    for (code, part) in [
        ("function f() { return 5; }", "returned int"),
        ("function f() { return 'x'; }", "returned string"),
        ("function f() { return f; }", "not a message"),
        ("async function f(m) { return m; }", "promise"),
        ("function f() { return {}; }", "data of the returned message is of the type undefined"),
        ("function f() { return { data: 5 }; }", "of the type int, not a string"),
        ("function f() { return { data: '', attributes: {} }; }", "neither data nor attributes"),
        ("function f() { return { data: 'x', attributes: { n: 1 } }; }", "the attribute 'n'"),
        ("function f() { return { data: 'x', attributes: 'y' }; }", "attributes of the returned message"),
        ("function f() { return { data: '\\ud800' }; }", "not legal Unicode"),
    ] {
        let TransformError::Shape(text) = error(code) else { panic!("{code}: {:?}", error(code)) };
        assert!(text.contains(part), "{code}: {text}");
    }
    let binary = EncodedMessage::encode(&[0xff, 0xfe], [], "");
    assert!(call("function f(m) { return m; }", &binary).unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn thrown_errors_are_told_with_their_place() {
    let text = error("function f(m) {\n  return m.nothing.there;\n}").to_string();
    assert!(text.starts_with("TypeError: ") && text.contains("(line 2, column "), "{text}");
    assert_eq!(
        error("function f() { throw new RangeError('too far'); }"),
        TransformError::Thrown("RangeError: too far (line 1, column 26)".into())
    );
    assert_eq!(error("function f() { throw 'plain'; }"), TransformError::Thrown("plain".into()));
    assert!(matches!(error("function f() { throw { toString() { throw 1; } }; }"), TransformError::Thrown(_)));
    assert!(error("function f() { throw 'x'.repeat(100000); }").to_string().len() < 500);
}

#[test]
fn code_that_can_not_be_used_is_refused_with_the_place() {
    let text = load_error("function f(m) {\n  return m +;\n}");
    assert!(text.starts_with("SyntaxError: ") && text.contains("(line 2, column "), "{text}");
    assert!(load_error("function g() {}").contains("no function 'f'"));
    assert!(load_error("const f = 5;").contains("no function 'f'"));
    assert!(load_error("throw new Error('at the start'); function f() {}").contains("at the start"));
    assert!(load_error("function f() {} \0").contains("NUL"));
    assert!(load_error("while (true) {}").contains("longer than 500 ms"));
    let named = MessageTransform { function_name: "f;x".into(), ..transform("function f() {}") };
    assert!(Instance::new(&named, || {}).err().unwrap().to_string().contains("can't name a function"));
}

#[test]
fn what_never_ends_is_ended() {
    for code in [
        "function f() { for (;;) {} }",
        "function f() { for (;;) { try { for (;;) {} } catch (e) {} finally { for (;;) {} } } }",
        "function f() { let x = 0; while (true) { try { x++; } finally { continue; } } }",
        "function f() { throw { get message() { for (;;) {} }, toString() { for (;;) {} } }; }",
        "function f(m) { return { get data() { for (;;) {} } }; }",
        "function f(m) { return new Proxy({}, { get() { for (;;) {} } }); }",
        "function f(m) { return { data: 'x', attributes: new Proxy({}, { ownKeys() { for (;;) {} } }) }; }",
        "function f() { new Array(4294967295).indexOf(1); [].indexOf.call({ length: 2 ** 53 - 1 }, 1); for (;;) {} }",
        // A pattern that looks back more and more.
        "function f() { return /^(a+)+$/.test('a'.repeat(40) + 'b') ? null : f(); }",
        "function* g() { for (;;) yield 1; } function f() { return [...g()].length > 1e12 ? null : f(); }",
    ] {
        let outcome = error(code);
        assert!(matches!(outcome, TransformError::Time | TransformError::Memory), "{code}: {outcome:?}");
    }
}

#[test]
fn what_takes_too_much_memory_fails() {
    for code in [
        "function f() { const all = []; for (;;) all.push(new Array(1000).fill('x')); }",
        "function f() { let s = 'x'; for (;;) s += s + Math.random(); }",
        "function f() { return { data: 'x'.repeat(2 ** 29) }; }",
        "function f() { new ArrayBuffer(2 ** 31); }",
        "function f() { const m = new Map(); for (let i = 0;; i++) m.set(i, { i }); }",
    ] {
        let outcome = error(code);
        let refused = matches!(outcome, TransformError::Memory | TransformError::Time | TransformError::Thrown(_));
        assert!(refused, "{code}: {outcome:?}");
    }
    assert_eq!(error("function f() { const all = []; for (;;) all.push(new Uint8Array(1e6)); }"), TransformError::Memory);
}

#[test]
fn deep_recursion_fails_and_the_thread_lives() {
    let nested = "function f() { JSON.parse('['.repeat(200000)); }";
    let pattern = "function f() { new RegExp('('.repeat(100000) + ')'.repeat(100000)); }";
    for code in [
        "function f() { return f() + 1; }",
        "const o = { toString() { return '' + o; } }; function f() { return '' + o; }",
        nested,
        pattern,
    ] {
        let outcome = std::thread::Builder::new().stack_size(THREAD_STACK).spawn(move || error(code)).unwrap().join().unwrap();
        assert!(matches!(outcome, TransformError::Thrown(_)), "{code}: {outcome:?}");
    }
}

#[test]
fn there_is_nothing_to_reach_the_outside_with() {
    let names = "['require', 'process', 'fetch', 'console', 'setTimeout', 'std', 'os', 'WebAssembly', 'Deno', 'XMLHttpRequest']";
    let code = format!("function f(m) {{ return {{ data: {names}.filter((n) => n in globalThis).join() + '.' }}; }}");
    let seen = call(&code, &EncodedMessage::encode(b"x", [], "")).unwrap().unwrap();
    assert_eq!(seen.data(), b".");
    for code in [
        "function f() { eval('1'); }",
        "function f() { (0, eval)('1'); }",
        "function f() { new Function('return 1')(); }",
        "function f() { (() => {}).constructor('return 1')(); }",
        "function f() { (function* () {}).constructor('yield 1')(); }",
        "function f() { (async () => {}).constructor('return 1')(); }",
    ] {
        assert!(error(code).to_string().contains("EvalError"), "{code}: {:?}", error(code));
    }
    // Atomics could stop the thread.
    let code = "function f() { Atomics.wait(new Int32Array(new SharedArrayBuffer(8)), 0, 0); }";
    assert!(matches!(error(code), TransformError::Thrown(_)));
}

#[test]
fn tricks_with_prototypes_change_nothing_outside_the_function() {
    let message = EncodedMessage::encode(b"x", [("__proto__", "p"), ("constructor", "c"), ("toString", "t"), ("7", "n")], "");
    let same = call("function f(m) { return m; }", &message).unwrap().unwrap();
    assert_eq!(same.attribute_map(), message.attribute_map());
    let poison = "Object.prototype.evil = 'yes'; Object.defineProperty(Object.prototype, 'data', { get() { return 'forged'; } });
        Array.prototype.push = String.prototype.toString = () => { throw 1; };
        function f(m) { return m; }";
    let kept = call(poison, &EncodedMessage::encode(b"x", [("a", "1")], "")).unwrap().unwrap();
    assert_eq!((kept.data(), kept.attribute_map().len()), (&b"x"[..], 1));
    // Another interpreter knows nothing of it.
    let clean = call("function f(m) { return { data: String(({}).evil) }; }", &message).unwrap().unwrap();
    assert_eq!(clean.data(), b"undefined");
}

#[test]
fn an_interpreter_serves_many_messages_until_it_keeps_too_much() {
    let mut instance = instance("const all = []; function f(m) { all.push('y'.repeat(1e5) + Math.random()); return m; }");
    assert!(instance.is_fresh() && instance.is_lean());
    for _ in 0..20 {
        instance.call(&EncodedMessage::encode(b"x", [], ""), &metadata()).unwrap();
    }
    assert!(!instance.is_fresh() && instance.is_lean());
    for _ in 0..100 {
        instance.call(&EncodedMessage::encode(b"x", [], ""), &metadata()).unwrap();
    }
    assert!(!instance.is_lean());
}
