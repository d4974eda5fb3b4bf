//! The matrix of calls and roles over REST: the requests are made from the descriptors' HTTP bindings.

use std::collections::BTreeSet;

use landline::api::proto::FILE_DESCRIPTOR_SET;
use prost_reflect::{DescriptorPool, DynamicMessage, MethodDescriptor, Value as Reflected};
use serde_json::{Map, Value};

use super::{CALLERS, Security, matrix};
use crate::{
    fixture::{Backend, rest},
    for_one_backend,
};

for_one_backend!(every_binding_is_allowed_to_the_roles_that_hold_its_permission);

/// Those that REST does not have.
const GRPC_ONLY: [&str; 5] = [
    "externalscaler.ExternalScaler.GetMetricSpec",
    "externalscaler.ExternalScaler.GetMetrics",
    "externalscaler.ExternalScaler.IsActive",
    "externalscaler.ExternalScaler.StreamIsActive",
    "google.pubsub.v1.Subscriber.StreamingPull",
];

/// One HTTP binding of a method.
struct Binding {
    verb: String,
    template: String,
    body: String,
}

fn bindings(method: &MethodDescriptor) -> Vec<Binding> {
    let http = method.parent_pool().get_extension_by_name("google.api.http").unwrap();
    let options = method.options();
    if !options.has_extension(&http) {
        return Vec::new();
    }
    let option = options.get_extension(&http);
    let rule = option.as_message().unwrap();
    let more = rule.get_field_by_name("additional_bindings").unwrap();
    let more = more.as_list().unwrap().iter().filter_map(Reflected::as_message);
    std::iter::once(rule).chain(more).map(binding).collect()
}

fn binding(rule: &DynamicMessage) -> Binding {
    let text = |field: &str| rule.get_field_by_name(field).and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
    let verb = ["get", "put", "post", "delete", "patch"].into_iter().find(|verb| !text(verb).is_empty()).unwrap();
    Binding { verb: verb.to_uppercase(), template: text(verb), body: text("body") }
}

/// `update_mask` as JSON has it.
fn camel(field: &str) -> String {
    let mut parts = field.split('_');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |name, part| format!("{name}{}{}", part[..1].to_uppercase(), &part[1..]))
}

/// Takes a field out of a request.
fn take(request: &mut Map<String, Value>, field: &str) -> Option<String> {
    match field.split_once('.') {
        Some((outer, inner)) => take(request.get_mut(&camel(outer))?.as_object_mut()?, inner),
        None => request.remove(&camel(field))?.as_str().map(str::to_owned),
    }
}

/// True where a name has the form of a pattern, `projects/*/topics/*`.
fn fits(name: &str, pattern: &str) -> bool {
    let (name, pattern): (Vec<_>, Vec<_>) = (name.split('/').collect(), pattern.split('/').collect());
    name.len() == pattern.len() && name.iter().zip(&pattern).all(|(part, wanted)| *wanted == "*" || part == wanted)
}

impl Binding {
    /// The path and the body that stand for a request.
    fn request(&self, request: &Value) -> (String, String) {
        let mut fields = request.as_object().unwrap().clone();
        let (mut path, mut rest) = (String::new(), self.template.as_str());
        while let Some((before, after)) = rest.split_once('{') {
            let (variable, after) = after.split_once('}').unwrap();
            let (field, pattern) = variable.split_once('=').unwrap_or((variable, "*"));
            let given = take(&mut fields, field);
            // The same call for another kind of resource.
            let other = || pattern.replacen('*', "p1", 1).replace('*', "none");
            path.push_str(before);
            path.push_str(&given.filter(|name| fits(name, pattern)).unwrap_or_else(other));
            rest = after;
        }
        path.push_str(rest);
        let body = match self.body.as_str() {
            "" => String::new(),
            "*" => Value::Object(std::mem::take(&mut fields)).to_string(),
            field => fields.remove(&camel(field)).unwrap_or_default().to_string(),
        };
        let query: Vec<_> =
            fields.iter().filter_map(|(name, value)| Some(format!("{name}={}", rest::escape(value.as_str()?)))).collect();
        (format!("{path}?{}", query.join("&")), body)
    }
}

async fn every_binding_is_allowed_to_the_roles_that_hold_its_permission(backend: Backend) {
    let security = Security::new();
    let fixture = security.start(backend, &[]).await;
    let address = fixture.nodes[0].address;
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let (mut wrong, mut tried, mut without) = (Vec::new(), 0, BTreeSet::new());
    for (method, request, roles) in matrix() {
        let (service, name) = method.rsplit_once('.').unwrap();
        let descriptor = pool.get_service_by_name(service).unwrap().methods().find(|m| m.name() == name).unwrap();
        let bindings = bindings(&descriptor);
        if bindings.is_empty() {
            without.insert(method.clone());
        }
        for binding in bindings {
            let (path, body) = binding.request(&request);
            for caller in CALLERS.into_iter().map(Some).chain([None]) {
                let token = caller.map(|name| format!("Bearer {}", security.token(name)));
                let mut headers = vec![("content-type", "application/json")];
                headers.extend(token.as_deref().map(|token| ("authorization", token)));
                let answer = rest::send(address, &binding.verb, &path, &headers, body.clone()).await;
                let status = answer.status.as_u16();
                let allowed = caller.is_some_and(|name| roles.contains(name.to_uppercase().chars().next().unwrap()));
                // What is allowed may fail for another reason: what it names is not there.
                let right = match (caller, allowed) {
                    (None, _) => status == 401,
                    (Some(_), false) => status == 403,
                    (Some(_), true) => !matches!(status, 401 | 403 | 405 | 500..),
                };
                if !right {
                    wrong.push(format!("{} {} {path}: {status} {:?}", caller.unwrap_or("no one"), binding.verb, answer.body));
                }
                tried += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(without, GRPC_ONLY.map(str::to_owned).into());
    assert!(tried > 300, "{tried} requests");
}
