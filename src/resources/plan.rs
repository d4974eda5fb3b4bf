//! The way from what is there to what the file asks for.

use std::convert::Infallible;

use futures::{StreamExt, TryStreamExt, stream};
use http::{Method, Request, Response};
use serde_json::{Map, Value, json};
use tonic::body::Body;
use tower::Service;

use super::{
    caller::{Caller, Failure},
    compare::{self, Change},
    document::{Document, Kind, Resource},
};

/// Resources that are read, or changed, at a time.
const CONCURRENCY: usize = 16;

/// What happens to a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Create,
    Update,
    /// The file wants what can't be had without making the resource anew.
    Impossible,
    Delete,
}

/// What there is to do about one resource.
#[derive(Debug, Clone)]
pub struct Step {
    pub kind: Kind,
    pub name: String,
    /// Where the file asks for it.
    pub place: String,
    pub action: Action,
    pub changes: Vec<Change>,
    calls: Vec<(Method, String, Option<Value>)>,
}

/// Everything there is to do, in order.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Resources that are as the file has them.
    pub unchanged: usize,
}

impl Plan {
    /// Compares; changes nothing. Of the projects in `prune`, what the file does not have is to be deleted.
    ///
    /// # Errors
    /// What could not be read, with the place that asks for it.
    pub async fn make<S>(document: &Document, caller: &Caller<S>, prune: &[String]) -> Result<Self, (String, Failure)>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
    {
        let steps = stream::iter(&document.resources).map(|resource| async move {
            let step = step(resource, caller).await;
            step.map_err(|failure| (format!("{}: {}", resource.place, resource.name), failure))
        });
        let steps: Vec<_> = steps.buffered(CONCURRENCY).try_collect().await?;
        let unchanged = steps.iter().filter(|step| step.is_none()).count();
        let mut plan = Self { steps: steps.into_iter().flatten().collect(), unchanged };
        for project in prune {
            let deletions = deletions(document, caller, project).await;
            plan.steps.extend(deletions.map_err(|failure| (format!("projects/{project}"), failure))?);
        }
        Ok(plan)
    }

    /// The steps of one action.
    pub fn count(&self, action: Action) -> usize {
        self.steps.iter().filter(|step| step.action == action).count()
    }

    /// Carries the plan out, leaving out what can't be done.
    ///
    /// # Errors
    /// The steps that failed. What depends on a failed step is not tried.
    pub async fn carry_out<S>(&self, caller: &Caller<S>) -> Result<(), Vec<(Step, Failure)>>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
    {
        let possible: Vec<_> = self.steps.iter().filter(|step| step.action != Action::Impossible).collect();
        let same = |one: &&Step, other: &&Step| {
            one.kind == other.kind && (one.action == Action::Delete) == (other.action == Action::Delete)
        };
        for group in possible.chunk_by(same) {
            let done = stream::iter(group).map(|step| async move { (*step, step.carry_out(caller).await) });
            let done: Vec<_> = done.buffered(CONCURRENCY).collect().await;
            let failed: Vec<_> = done.into_iter().filter_map(|(step, done)| Some((step.clone(), done.err()?))).collect();
            if !failed.is_empty() {
                return Err(failed);
            }
        }
        Ok(())
    }
}

impl Step {
    async fn carry_out<S>(&self, caller: &Caller<S>) -> Result<(), Failure>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
    {
        for (method, path, body) in &self.calls {
            match caller.call(method, path, body.as_ref()).await {
                // Another node starts at the same time, or the answer to the first try was lost.
                Err(failure) if self.action == Action::Create && failure.status == "ALREADY_EXISTS" => {}
                Err(failure) if self.action == Action::Delete && failure.is_not_found() => {}
                answer => _ = answer?,
            }
        }
        Ok(())
    }
}

async fn step<S>(resource: &Resource, caller: &Caller<S>) -> Result<Option<Step>, Failure>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let step = |action, changes: Vec<Change>, calls| Step {
        kind: resource.kind,
        name: resource.name.clone(),
        place: resource.place.clone(),
        action,
        changes,
        calls,
    };
    match resource.kind {
        Kind::Schema => {
            let have = revisions(resource, caller).await?;
            Ok(schema(resource, &have).map(|(action, changes, calls)| step(action, changes, calls)))
        }
        Kind::Policy => {
            let path = format!("{}:getIamPolicy?options.requestedPolicyVersion=3", resource.name);
            let have = caller.read(&path).await?.unwrap_or_default();
            let changes = compare::policies(&Value::Object(resource.fields.clone()), &have);
            let call =
                (Method::POST, format!("{}:setIamPolicy", resource.name), Some(json!({"policy": policy(resource, &have)})));
            // Without bindings there is no policy yet.
            let new = changes.iter().all(|change| change.old.is_null()) && compare::policies(&have, &Value::Null).is_empty();
            let action = if new { Action::Create } else { Action::Update };
            Ok((!changes.is_empty()).then(|| step(action, changes, vec![call])))
        }
        Kind::Topic | Kind::Subscription => {
            let Some(have) = caller.read(&resource.name).await? else {
                let call = (Method::PUT, resource.name.clone(), Some(Value::Object(resource.fields.clone())));
                return Ok(Some(step(Action::Create, shown(resource), vec![call])));
            };
            let (changes, body, mask) = compare::fields(resource, have.as_object().unwrap_or(&Map::new()));
            if changes.is_empty() {
                return Ok(None);
            }
            if changes.iter().any(|change| change.fixed) {
                return Ok(Some(step(Action::Impossible, changes, Vec::new())));
            }
            let mut body = body;
            body.insert("name".into(), json!(resource.name));
            let body = json!({(resource.kind.noun()): body, "updateMask": mask.join(",")});
            Ok(Some(step(Action::Update, changes, vec![(Method::PATCH, resource.name.clone(), Some(body))])))
        }
    }
}

/// The fields of a resource that is to be made.
fn shown(resource: &Resource) -> Vec<Change> {
    let fields = resource.fields.iter().filter(|(field, _)| *field != "name");
    fields.map(|(field, value)| Change { field: field.clone(), old: Value::Null, new: value.clone(), fixed: false }).collect()
}

/// The policy to set, for the state that was read.
fn policy(resource: &Resource, have: &Value) -> Value {
    let bindings = resource.fields.get("bindings").cloned().unwrap_or_else(|| json!([]));
    let conditional = bindings.as_array().into_iter().flatten().any(|binding| !binding["condition"].is_null());
    let mut policy = json!({"version": if conditional { 3 } else { 1 }, "bindings": bindings});
    if let Some(etag) = have.get("etag") {
        policy["etag"] = etag.clone();
    }
    policy
}

/// The definitions that a schema has, the oldest first.
async fn revisions<S>(resource: &Resource, caller: &Caller<S>) -> Result<Vec<Value>, Failure>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let mut found = match caller.list(&format!("{}:listRevisions?view=FULL", resource.name), "schemas").await {
        Err(failure) if failure.is_not_found() => return Ok(Vec::new()),
        found => found?,
    };
    found.reverse();
    for revision in &mut found {
        if let Value::Object(fields) = revision {
            ["name", "revisionId", "revisionCreateTime"].iter().for_each(|field| _ = fields.remove(*field));
        }
    }
    Ok(found)
}

type Steps = (Action, Vec<Change>, Vec<(Method, String, Option<Value>)>);

/// Commits what the schema lacks in the file's order, and then the file's last definition unless it is the newest.
fn schema(resource: &Resource, have: &[Value]) -> Option<Steps> {
    let want = &resource.revisions;
    let (first, last) = (want.first()?, want.last()?);
    let change =
        |field: &str, old: &Value, new: &Value, fixed| Change { field: field.into(), old: old.clone(), new: new.clone(), fixed };
    if let Some(there) = have.last()
        && there["type"] != last["type"]
    {
        return Some((Action::Impossible, vec![change("type", &there["type"], &last["type"], true)], Vec::new()));
    }
    let mut missing: Vec<&Value> = want.iter().filter(|revision| !have.contains(revision)).collect();
    if missing.last().copied().or(have.last()) != Some(last) {
        missing.push(last);
    }
    if missing.is_empty() {
        return None;
    }
    let (parent, id) = resource.name.split_once("/schemas/")?;
    let named = |revision: &Value| {
        let mut revision = revision.clone();
        revision["name"] = json!(resource.name);
        revision
    };
    let commit = |revision: &Value| (Method::POST, format!("{}:commit", resource.name), Some(json!({"schema": named(revision)})));
    let changes = |of: &[&Value]| of.iter().map(|new| change("revision", &Value::Null, &text(new), false)).collect();
    if !have.is_empty() {
        return Some((Action::Update, changes(&missing), missing.into_iter().map(commit).collect()));
    }
    let create = (Method::POST, format!("{parent}/schemas?schemaId={id}"), Some(named(first)));
    let calls = std::iter::once(create).chain(want[1..].iter().map(commit)).collect();
    Some((Action::Create, changes(&want.iter().collect::<Vec<_>>()), calls))
}

fn text(revision: &Value) -> Value {
    revision.get("definition").unwrap_or(revision).clone()
}

/// Deletions of what a project has and the file has not.
async fn deletions<S>(document: &Document, caller: &Caller<S>, project: &str) -> Result<Vec<Step>, Failure>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let mut steps = Vec::new();
    for kind in [Kind::Subscription, Kind::Topic, Kind::Schema] {
        let found = caller.list(&format!("projects/{project}/{}", kind.list()), kind.list()).await?;
        for name in found.iter().filter_map(|item| item["name"].as_str()) {
            let known = document.resources.iter().any(|resource| resource.kind == kind && resource.name == name);
            if !known {
                let calls = vec![(Method::DELETE, name.to_owned(), None)];
                let (name, place) = (name.to_owned(), format!("--prune {project}"));
                steps.push(Step { kind, name, place, action: Action::Delete, changes: Vec::new(), calls });
            }
        }
    }
    Ok(steps)
}
