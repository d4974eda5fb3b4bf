//! JSON of resources that does not come by a request: read and written as requests and answers are.

use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use serde_json::Value;

use super::{
    Serialized,
    json::{field_by_any_name, read_body},
    routes::SetupError,
};
use crate::api::proto::{FILE_DESCRIPTOR_SET, rpc::bad_request::FieldViolation};

/// A type of the API, such as `google.pubsub.v1.Topic`.
#[derive(Debug, Clone)]
pub struct Shape(MessageDescriptor);

impl Shape {
    /// The types of these names.
    ///
    /// # Errors
    /// When the API has no such type.
    pub fn of<const N: usize>(names: [&str; N]) -> Result<[Self; N], SetupError> {
        let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET)?;
        let find = |name| pool.get_message_by_name(name).map(Self);
        let field = |name: &str| SetupError::Field { method: name.to_owned(), field: "message".into() };
        let found = names.iter().map(|name| find(name).ok_or_else(|| field(name))).collect::<Result<Vec<_>, _>>()?;
        found.try_into().map_err(|_| field("names"))
    }

    /// The name that answers have for a field: camelCase.
    pub fn json_name(&self, field: &str) -> Option<String> {
        field_by_any_name(&self.0, field).map(|field| field.json_name().to_owned())
    }

    /// An object as an answer would show it: names in camelCase, values in one spelling, nothing that is a default.
    ///
    /// # Errors
    /// Every field that the type does not have or whose value does not fit.
    pub fn canonical(&self, object: &Value) -> Result<Value, Vec<FieldViolation>> {
        let mut message = DynamicMessage::new(self.0.clone());
        read_body(&mut message, object.to_string().as_bytes())?;
        serde_json::to_value(Serialized { message, options: SerializeOptions::new() })
            .map_err(|e| vec![FieldViolation { description: e.to_string(), ..FieldViolation::default() }])
    }
}
