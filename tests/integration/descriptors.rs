//! The API's descriptors against those of the official Python packages, fact by fact.
//!
//! `tests/descriptors.txt` holds the facts of the packages, printed by `tests/descriptors.py`.

use std::{collections::BTreeSet, path::PathBuf, process::Command};

use landline::api::proto;
use prost_reflect::{
    DescriptorPool, DynamicMessage, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor, MethodDescriptor,
    ServiceDescriptor, Value,
};

/// What the server has and the packages do not: nothing at present. Each line is a fact in the form of the file.
const NEWER: [&str; 0] = [];

/// What `tests/descriptors.py` exits with if the packages can't be imported.
const PACKAGES_MISSING: i32 = 3;

fn tests_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn type_of(field: &FieldDescriptor) -> String {
    let named = match field.kind() {
        Kind::Message(entry) if entry.is_map_entry() => {
            let [key, value] = [entry.map_entry_key_field(), entry.map_entry_value_field()];
            return format!("map<{},{}>", type_of(&key), type_of(&value));
        }
        Kind::Message(message) => message.full_name().to_owned(),
        Kind::Enum(named) => named.full_name().to_owned(),
        scalar => format!("{scalar:?}").to_lowercase(),
    };
    if field.is_list() { format!("repeated {named}") } else { named }
}

fn field_fact(field: &FieldDescriptor) -> String {
    let oneof = match field.containing_oneof() {
        Some(_) if field.field_descriptor_proto().proto3_optional() => " optional".to_owned(),
        Some(oneof) => format!(" oneof {}", oneof.name()),
        None => String::new(),
    };
    format!("field {} = {} {}{oneof}", field.full_name(), field.number(), type_of(field))
}

fn message_facts(message: &MessageDescriptor, facts: &mut BTreeSet<String>) {
    facts.insert(format!("message {}", message.full_name()));
    facts.extend(message.fields().map(|field| field_fact(&field)));
}

fn enum_facts(named: &EnumDescriptor, facts: &mut BTreeSet<String>) {
    facts.insert(format!("enum {}", named.full_name()));
    facts.extend(named.values().map(|value| format!("value {}.{} = {}", named.full_name(), value.name(), value.number())));
}

fn text(rule: &DynamicMessage, field: &str) -> String {
    rule.get_field_by_name(field).and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}

fn http_facts(path: &str, rule: &DynamicMessage, facts: &mut BTreeSet<String>) {
    for verb in ["get", "put", "post", "delete", "patch"] {
        let template = text(rule, verb);
        if !template.is_empty() {
            let body = text(rule, "body");
            let body = if body.is_empty() { String::new() } else { format!(" body={body}") };
            facts.insert(format!("http {path} {} {template}{body}", verb.to_uppercase()));
        }
    }
    let more = rule.get_field_by_name("additional_bindings").unwrap();
    for rule in more.as_list().unwrap().iter().filter_map(Value::as_message) {
        http_facts(path, rule, facts);
    }
}

fn method_facts(method: &MethodDescriptor, facts: &mut BTreeSet<String>) {
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let stream = |flag| if flag { "stream " } else { "" };
    facts.insert(format!(
        "method {path} {}{} -> {}{}",
        stream(method.is_client_streaming()),
        method.input().full_name(),
        stream(method.is_server_streaming()),
        method.output().full_name(),
    ));
    let http = method.parent_pool().get_extension_by_name("google.api.http").unwrap();
    if method.options().has_extension(&http) {
        http_facts(&path, method.options().get_extension(&http).as_message().unwrap(), facts);
    }
}

fn service_facts(service: &ServiceDescriptor, facts: &mut BTreeSet<String>) {
    facts.insert(format!("service {}", service.full_name()));
    service.methods().for_each(|method| method_facts(&method, facts));
}

/// Packages that are no part of the API: what the compiler supplies, the server's own methods, and what KEDA asks.
const OTHERS: [&str; 3] = ["google.protobuf", "landline.v1", "externalscaler"];

/// The facts of the server's descriptors of the API.
fn our_facts() -> BTreeSet<String> {
    let pool = DescriptorPool::decode(proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut facts = BTreeSet::new();
    for message in pool.all_messages().filter(|m| !m.is_map_entry() && !OTHERS.contains(&m.package_name())) {
        message_facts(&message, &mut facts);
    }
    for named in pool.all_enums().filter(|named| !OTHERS.contains(&named.package_name())) {
        enum_facts(&named, &mut facts);
    }
    for extension in pool.all_extensions() {
        let list = if extension.is_list() { "repeated " } else { "" };
        let kind = extension.kind();
        let named = kind.as_message().map(|message| message.full_name().to_owned());
        let named = named.or_else(|| kind.as_enum().map(|named| named.full_name().to_owned())).unwrap();
        facts.insert(format!("extension {} = {} {list}{named}", extension.full_name(), extension.number()));
    }
    pool.services().filter(|s| !OTHERS.contains(&s.package_name())).for_each(|service| service_facts(&service, &mut facts));
    facts
}

fn official_facts() -> BTreeSet<String> {
    let file = std::fs::read_to_string(tests_dir().join("descriptors.txt")).unwrap();
    file.lines().map(str::to_owned).collect()
}

#[test]
fn descriptors_have_every_fact_of_the_official_packages() {
    let missing: Vec<_> = official_facts().difference(&our_facts()).cloned().collect();
    assert!(missing.is_empty(), "not in the server's descriptors:\n{}", missing.join("\n"));
}

#[test]
fn descriptors_have_only_the_listed_facts_beyond_the_official_packages() {
    let extra: Vec<_> = our_facts().difference(&official_facts()).cloned().collect();
    assert_eq!(extra, NEWER);
}

/// Where Python and the packages are installed they are asked again, so that a newer release shows up here.
#[test]
fn the_listed_facts_are_those_of_the_installed_packages() {
    let Ok(output) = Command::new("python3").arg(tests_dir().join("descriptors.py")).output() else {
        return;
    };
    if output.status.code() == Some(PACKAGES_MISSING) {
        return;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: BTreeSet<String> = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
    assert_eq!(printed.symmetric_difference(&official_facts()).collect::<Vec<_>>(), Vec::<&String>::new());
}

/// The two fields that pass messages through undecoded are bytes in the code and messages in the descriptors.
#[test]
fn messages_pass_through_generated_code_as_they_were_encoded() {
    use prost::Message;

    let message = proto::pubsub::PubsubMessage { data: "payload".into(), ordering_key: "key".into(), ..Default::default() };
    let encoded = message.encode_to_vec();
    let request = proto::pubsub::PublishRequest { topic: "t".into(), messages: vec![encoded.clone().into()] };

    let pool = DescriptorPool::decode(proto::FILE_DESCRIPTOR_SET).unwrap();
    let descriptor = pool.get_message_by_name("google.pubsub.v1.PublishRequest").unwrap();
    let decoded = DynamicMessage::decode(descriptor, request.encode_to_vec().as_slice()).unwrap();

    let messages = decoded.get_field_by_name("messages").unwrap().into_owned();
    let first = messages.as_list().unwrap()[0].as_message().unwrap().clone();
    assert_eq!(first.encode_to_vec(), encoded);
    assert_eq!(text(&first, "ordering_key"), "key");
}
