//! Query parameters into request fields: `pageSize=2`, `page_size=2`, `options.requestedPolicyVersion=3`.

use percent_encoding::percent_decode_str;
use prost_reflect::{DynamicMessage, FieldDescriptor, Kind, ReflectMessage};
use serde_json::Value as Json;

use super::json::{Reader, field_by_any_name};
use crate::{api::proto::rpc::bad_request::FieldViolation, model::text::clipped};

/// Parameters that every method of the API takes. They are not fields, and most have no effect here. Names that begin with
/// `$` are such parameters too.
const SYSTEM_PARAMETERS: [&str; 12] = [
    "access_token",
    "alt",
    "callback",
    "fields",
    "key",
    "oauth_token",
    "pp",
    "prettyPrint",
    "quotaUser",
    "uploadType",
    "upload_protocol",
    "userIp",
];

/// Messages whose JSON form is a string.
const WITH_STRING_FORM: [&str; 3] = ["google.protobuf.Duration", "google.protobuf.FieldMask", "google.protobuf.Timestamp"];

/// What the system parameters ask of the answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Format {
    /// Without the line breaks and the indentation that are usual.
    pub one_line: bool,
    /// Enums as numbers instead of names.
    pub enum_numbers: bool,
}

/// The pairs of an encoded query. In a query `+` is a space, as HTML forms have it. Bytes that are not UTF-8 are replaced.
fn pairs(query: &str) -> impl Iterator<Item = (String, String)> {
    let text = |encoded: &str| percent_decode_str(&encoded.replace('+', " ")).decode_utf8_lossy().into_owned();
    query.split('&').filter(|pair| !pair.is_empty()).map(move |pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (text(name), text(value))
    })
}

/// Reads what the system parameters ask of the answer. Values that mean nothing are passed over.
pub fn format(query: &str) -> Format {
    let mut format = Format::default();
    for (name, value) in pairs(query) {
        match name.trim_start_matches('$') {
            "prettyPrint" | "pp" => format.one_line = matches!(value.as_str(), "false" | "0"),
            "alt" => format.enum_numbers = value.split(';').any(|option| option.trim() == "enum-encoding=int"),
            _ => {}
        }
    }
    format
}

/// What the answer is to hold, as the parameter `fields` says; empty for everything.
pub fn fields(query: &str) -> String {
    pairs(query).filter(|(name, _)| name.trim_start_matches('$') == "fields").map(|(_, value)| value).last().unwrap_or_default()
}

/// Sets the fields named in a query.
pub fn read(target: &mut DynamicMessage, query: &str) -> Result<(), Vec<FieldViolation>> {
    let mut reader = Reader::default();
    for (name, value) in pairs(query) {
        if name.starts_with('$') || SYSTEM_PARAMETERS.contains(&name.as_str()) {
            continue;
        }
        if let Err(problem) = set(&mut reader, target, &name, value) {
            let name = clipped(&name);
            reader.refuse(format!("Unknown name \"{name}\": Cannot bind query parameter. Field '{name}' {problem}"));
        }
    }
    reader.finish()
}

/// Sets one field. The error says why the name can't be bound; a bad value is noted by the reader.
fn set(reader: &mut Reader, target: &mut DynamicMessage, name: &str, value: String) -> Result<(), &'static str> {
    let fields = way(target, name)?;
    let Some((last, outer)) = fields.split_last() else { return Ok(()) };
    let path = fields.iter().map(FieldDescriptor::name).collect::<Vec<_>>().join(".");
    let Some(value) = reader.value_at(&path, &last.kind(), &Json::String(value)) else { return Ok(()) };
    let mut message = target;
    for field in outer {
        match message.get_field_mut(field).as_message_mut() {
            Some(inner) => message = inner,
            None => return Err("is not a message."),
        }
    }
    if !last.is_list() {
        message.set_field(last, value);
    } else if let Some(list) = message.get_field_mut(last).as_list_mut() {
        list.push(value);
    }
    Ok(())
}

/// The way to a field that one string can give a value to.
fn way(target: &DynamicMessage, name: &str) -> Result<Vec<FieldDescriptor>, &'static str> {
    const UNKNOWN: &str = "could not be found in request message.";
    let mut fields: Vec<FieldDescriptor> = Vec::new();
    let mut message = Some(target.descriptor());
    for part in name.split('.') {
        let field = message.take().and_then(|message| field_by_any_name(&message, part)).ok_or(UNKNOWN)?;
        message = match field.kind() {
            Kind::Message(inner) if !field.is_list() && !field.is_map() => Some(inner),
            _ => None,
        };
        fields.push(field);
    }
    let Some(last) = fields.last() else { return Err(UNKNOWN) };
    match last.kind() {
        Kind::Message(inner) if !WITH_STRING_FORM.contains(&inner.full_name()) => {
            Err("is a message type. Parameters can only be bound to primitive types.")
        }
        _ => Ok(fields),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::sync::LazyLock;

    use prost_reflect::DescriptorPool;
    use serde_json::json;

    use super::*;
    use crate::api::proto::FILE_DESCRIPTOR_SET;

    fn read_as(name: &str, query: &str) -> Result<Json, String> {
        static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap());
        let mut message = DynamicMessage::new(POOL.get_message_by_name(name).unwrap());
        let result = read(&mut message, query);
        result.map(|()| serde_json::to_value(message).unwrap()).map_err(|bad| bad[0].description.clone())
    }

    fn list(query: &str) -> Result<Json, String> {
        read_as("google.pubsub.v1.ListSchemasRequest", query)
    }

    #[test]
    fn both_spellings_set_a_field() {
        let expected = json!({"pageSize": 2, "pageToken": "a b+c"});
        assert_eq!(list("pageSize=2&pageToken=a+b%2Bc").unwrap(), expected);
        assert_eq!(list("page_size=2&page_token=a%20b%2Bc").unwrap(), expected);
    }

    #[test]
    fn enums_are_names_or_numbers() {
        assert_eq!(list("view=FULL").unwrap(), json!({"view": "FULL"}));
        assert_eq!(list("view=2").unwrap(), json!({"view": "FULL"}));
    }

    #[test]
    fn a_dot_leads_into_a_message() {
        let policy = |query| read_as("google.iam.v1.GetIamPolicyRequest", query);
        let expected = json!({"options": {"requestedPolicyVersion": 3}});
        assert_eq!(policy("options.requestedPolicyVersion=3").unwrap(), expected);
        assert_eq!(policy("options.requested_policy_version=3").unwrap(), expected);
        assert!(policy("options=3").unwrap_err().contains("is a message type"));
    }

    #[test]
    fn a_mask_and_repeated_fields_can_be_given() {
        let update = read_as("google.pubsub.v1.UpdateTopicRequest", "updateMask=labels%2CkmsKeyName").unwrap();
        assert_eq!(update, json!({"updateMask": "labels,kmsKeyName"}));
        let test = read_as("google.iam.v1.TestIamPermissionsRequest", "permissions=a&permissions=b").unwrap();
        assert_eq!(test, json!({"permissions": ["a", "b"]}));
    }

    #[test]
    fn bad_values_are_refused() {
        assert_eq!(list("pageSize=abc").unwrap_err(), "Invalid value at 'page_size' (TYPE_INT32), \"abc\"");
        assert_eq!(list("pageSize=").unwrap_err(), "Invalid value at 'page_size' (TYPE_INT32), \"\"");
        assert!(list("view=").is_err());
        assert_eq!(list("pageToken=&&").unwrap(), json!({}));
    }

    #[test]
    fn unknown_names_are_refused() {
        let text = "Invalid JSON payload received. Unknown name \"x\": Cannot bind query parameter. \
                    Field 'x' could not be found in request message.";
        assert_eq!(list("x=1").unwrap_err(), text);
        for name in ["pageSize.x", "", ".", "view.", "parent..x"] {
            assert!(list(&format!("{name}=1")).is_err(), "{name}");
        }
        assert!(read_as("google.pubsub.v1.Topic", "labels.key=1").is_err());
        assert!(read_as("google.pubsub.v1.PublishRequest", "messages.data=1").is_err());
    }

    #[test]
    fn system_parameters_are_not_fields() {
        let query = "$alt=json%3Benum-encoding%3Dint&alt=json&prettyPrint=false&key=abc&fields=name&quotaUser=x&$.xgafv=1\
                     &access_token=t";
        assert_eq!(list(query).unwrap(), json!({}));
        assert_eq!(format(query), Format { one_line: true, enum_numbers: false });
        assert_eq!((fields(query).as_str(), fields("pageSize=1").as_str()), ("name", ""));
    }

    #[test]
    fn system_parameters_choose_the_form_of_the_answer() {
        assert!(format("$alt=json%3Benum-encoding%3Dint").enum_numbers);
        assert!(format("$alt=json;enum-encoding=int").enum_numbers);
        assert!(!format("$alt=json").enum_numbers);
        assert!(!format("prettyPrint=true").one_line && !format("$prettyPrint=1").one_line && !format("").one_line);
        assert!(format("prettyPrint=false").one_line && format("pp=0").one_line);
    }

    proptest! {
        #[test]
        fn any_query_is_read_or_refused_without_a_panic(query in "([a-z.$]{0,8}|[%=&;+]|pageSize|labels|options|.){0,16}") {
            let _ = format(&query);
            for name in ["google.pubsub.v1.Subscription", "google.iam.v1.GetIamPolicyRequest", "google.pubsub.v1.SeekRequest"] {
                let _ = read_as(name, &query);
            }
        }
    }
}
