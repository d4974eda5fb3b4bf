//! The table of HTTP bindings, read from the `google.api.http` options of the descriptors.

use std::sync::Arc;

use http::{Method, uri::PathAndQuery};
use prost_reflect::{
    DescriptorError, DescriptorPool, DynamicMessage, ExtensionDescriptor, FieldDescriptor, Kind, MessageDescriptor,
    MethodDescriptor, Value,
};

use super::template::{NotUtf8, Path, Template, TemplateError};

/// Why the REST surface can't be set up: the descriptors the server was built with are faulty.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("descriptors: {0}")]
    Descriptors(#[from] DescriptorError),
    #[error("descriptors lack google.api.http")]
    NoHttpOption,
    #[error("{method}: {source}")]
    Template { method: String, source: TemplateError },
    #[error("{method}: {field:?} can't be bound")]
    Field { method: String, field: String },
}

/// Where the body of a request goes.
#[derive(Debug, Clone)]
pub enum BodyBinding {
    /// All fields that are not in the path. Also for methods without a body: they may be sent `{}`.
    Message,
    /// One field that is a message.
    Field(FieldDescriptor),
}

/// Where the parts of a request go.
#[derive(Debug)]
pub struct Binding {
    /// Fields that the path gives, each as the way from the request to a string.
    pub path_fields: Vec<Vec<FieldDescriptor>>,
    pub body: BodyBinding,
}

/// One HTTP binding of a method.
#[derive(Debug)]
pub struct Route {
    verb: Method,
    template: Template,
    /// Where the parts of a request go.
    pub binding: Arc<Binding>,
    /// Path of the gRPC method.
    pub grpc_path: PathAndQuery,
    pub input: MessageDescriptor,
    pub output: MessageDescriptor,
}

/// All bindings.
#[derive(Debug)]
pub struct Routes {
    routes: Vec<Route>,
    pool: DescriptorPool,
}

impl Routes {
    /// Reads the bindings of every unary method from an encoded `FileDescriptorSet`. Streaming methods have none.
    pub fn from_descriptors(set: &[u8]) -> Result<Self, SetupError> {
        let pool = DescriptorPool::decode(set)?;
        let http = pool.get_extension_by_name("google.api.http").ok_or(SetupError::NoHttpOption)?;
        let mut routes = Vec::new();
        for method in pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()) {
            let streaming = method.is_client_streaming() || method.is_server_streaming();
            if !streaming && method.options().has_extension(&http) {
                add_method(&method, &http, &mut routes)?;
            }
        }
        Ok(Self { routes, pool })
    }

    /// The binding of a request and the values its path gives, or `None` if there is no such method.
    pub fn find(&self, verb: &Method, encoded_path: &str) -> Option<(&Route, Result<Vec<String>, NotUtf8>)> {
        let path = Path::new(encoded_path);
        let mut fitting = self.routes.iter().filter(|route| route.verb == *verb);
        fitting.find_map(|route| route.template.matches(&path).map(|values| (route, values)))
    }

    /// The descriptors.
    pub fn pool(&self) -> &DescriptorPool {
        &self.pool
    }
}

fn add_method(method: &MethodDescriptor, http: &ExtensionDescriptor, routes: &mut Vec<Route>) -> Result<(), SetupError> {
    let options = method.options();
    let option = options.get_extension(http);
    let Some(rule) = option.as_message() else { return Ok(()) };
    add_rule(method, rule, routes)?;
    let more = rule.get_field_by_name("additional_bindings");
    let more = more.as_deref().and_then(Value::as_list).unwrap_or_default();
    more.iter().filter_map(Value::as_message).try_for_each(|rule| add_rule(method, rule, routes))
}

fn add_rule(method: &MethodDescriptor, rule: &DynamicMessage, routes: &mut Vec<Route>) -> Result<(), SetupError> {
    let name = method.full_name().to_owned();
    let text = |field| rule.get_field_by_name(field).and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default();
    let verbs = [
        (Method::GET, "get"),
        (Method::PUT, "put"),
        (Method::POST, "post"),
        (Method::DELETE, "delete"),
        (Method::PATCH, "patch"),
    ];
    let Some((verb, path)) = verbs.into_iter().map(|(verb, field)| (verb, text(field))).find(|(_, path)| !path.is_empty()) else {
        return Err(SetupError::Field { method: name, field: "pattern".into() });
    };
    let template = Template::parse(&path).map_err(|source| SetupError::Template { method: name.clone(), source })?;
    let bind = |path: &str| string_field(&method.input(), path);
    let path_fields = template
        .fields()
        .map(|path| bind(path).ok_or_else(|| SetupError::Field { method: name.clone(), field: path.to_owned() }))
        .collect::<Result<_, _>>()?;
    let body = match text("body").as_str() {
        "" | "*" => BodyBinding::Message,
        field => BodyBinding::Field(
            method
                .input()
                .get_field_by_name(field)
                .filter(|field| !field.is_list() && matches!(field.kind(), Kind::Message(_)))
                .ok_or_else(|| SetupError::Field { method: name.clone(), field: field.to_owned() })?,
        ),
    };
    let grpc_path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let grpc_path = PathAndQuery::try_from(grpc_path).map_err(|_| SetupError::Field { method: name, field: "name".into() })?;
    let binding = Arc::new(Binding { path_fields, body });
    routes.push(Route { verb, template, binding, grpc_path, input: method.input(), output: method.output() });
    Ok(())
}

/// The way to a string field, `topic.name`.
fn string_field(message: &MessageDescriptor, path: &str) -> Option<Vec<FieldDescriptor>> {
    let mut fields = Vec::new();
    let mut message = Some(message.clone());
    for name in path.split('.') {
        let field = message.take()?.get_field_by_name(name).filter(|field| !field.is_list())?;
        if let Kind::Message(next) = field.kind() {
            message = Some(next);
        }
        fields.push(field);
    }
    fields.last().is_some_and(|field| field.kind() == Kind::String).then_some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::proto::FILE_DESCRIPTOR_SET;

    fn found(verb: Method, path: &str) -> Option<(String, Vec<String>)> {
        let routes = Routes::from_descriptors(FILE_DESCRIPTOR_SET).unwrap();
        routes.find(&verb, path).map(|(route, values)| (route.grpc_path.to_string(), values.unwrap()))
    }

    #[test]
    fn every_kind_of_binding_is_found() {
        for (verb, path, method, value) in [
            (Method::PUT, "/v1/projects/p/topics/t", "Publisher/CreateTopic", "projects/p/topics/t"),
            (Method::PATCH, "/v1/projects/p/topics/t", "Publisher/UpdateTopic", "projects/p/topics/t"),
            (Method::POST, "/v1/projects/p/topics/t:publish", "Publisher/Publish", "projects/p/topics/t"),
            (Method::GET, "/v1/projects/p/topics/t/snapshots", "Publisher/ListTopicSnapshots", "projects/p/topics/t"),
            (Method::POST, "/v1/projects/p/subscriptions/s:detach", "Publisher/DetachSubscription", "projects/p/subscriptions/s"),
            (Method::POST, "/v1/projects/p/subscriptions/s:pull", "Subscriber/Pull", "projects/p/subscriptions/s"),
            (Method::DELETE, "/v1/projects/p/snapshots/s", "Subscriber/DeleteSnapshot", "projects/p/snapshots/s"),
            (Method::POST, "/v1/projects/p/schemas", "SchemaService/CreateSchema", "projects/p"),
            (Method::POST, "/v1/projects/p/schemas:validateMessage", "SchemaService/ValidateMessage", "projects/p"),
            (
                Method::GET,
                "/v1/projects/p/schemas/s@abc:listRevisions",
                "SchemaService/ListSchemaRevisions",
                "projects/p/schemas/s@abc",
            ),
        ] {
            assert_eq!(found(verb, path), Some((format!("/google.pubsub.v1.{method}"), vec![value.to_owned()])));
        }
    }

    #[test]
    fn access_policies_are_bound_for_all_four_kinds() {
        for kind in ["topics", "subscriptions", "snapshots", "schemas"] {
            for (verb, method) in
                [(Method::GET, "getIamPolicy"), (Method::POST, "setIamPolicy"), (Method::POST, "testIamPermissions")]
            {
                let (path, values) = found(verb, &format!("/v1/projects/p/{kind}/x:{method}")).unwrap();
                assert!(path.to_lowercase().ends_with(&format!("/google.iam.v1.iampolicy/{method}").to_lowercase()));
                assert_eq!(values, [format!("projects/p/{kind}/x")]);
            }
        }
    }

    #[test]
    fn the_streaming_method_has_no_binding() {
        assert_eq!(found(Method::POST, "/v1/projects/p/subscriptions/s:streamingPull"), None);
        assert_eq!(found(Method::POST, "/google.pubsub.v1.Subscriber/StreamingPull"), None);
    }

    #[test]
    fn another_verb_is_not_found() {
        assert_eq!(found(Method::POST, "/v1/projects/p/topics/t"), None);
        assert_eq!(found(Method::GET, "/v1/projects/p/topics/t:publish"), None);
    }
}
