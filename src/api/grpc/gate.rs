//! The one place where calls are let in: what each request needs is said here, for gRPC and REST alike.

use std::{future::Future, sync::Arc, time::Duration};

use prost::Message;
use tonic::{Request, Status};

use crate::{
    api::{
        proto::{iam as iampb, landline as llpb, pubsub as pb},
        status::{refused, to_status},
    },
    auth::{Caller, CallerRef, Cost, Creating, Guard, Mode, Refusal, Refused},
    model::access::Permission as P,
};

/// How often a stream's caller is looked at again: it may have lost the permission, or its key.
const STREAM_CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// Lets requests in; cheap to clone.
#[derive(Clone)]
pub struct Gate {
    guard: Arc<Guard>,
}

/// What a request needs.
pub trait Guarded {
    /// Calls `ask` with every permission and the full name of the resource it is needed on; first the one that the request
    /// is about, whose project is charged.
    fn needs(&self, ask: &mut dyn FnMut(P, &str));

    /// What it asks for beside the call itself.
    fn cost(&self) -> Cost<'_> {
        Cost::Call
    }
}

impl Gate {
    pub fn new(guard: Arc<Guard>) -> Self {
        Self { guard }
    }

    fn is_open(&self) -> bool {
        self.guard.mode() == Mode::Off && !self.guard.meter().is_on()
    }

    /// Lets a request in. Hold the second part of the answer until the request has been carried out.
    pub async fn admit<T: Guarded>(&self, request: Request<T>) -> Result<(Request<T>, Creating), Status> {
        if self.is_open() {
            return Ok((request, None));
        }
        let caller = caller(&request);
        self.check(&caller, |ask| request.get_ref().needs(ask)).await?;
        let creating = self.charge(request.get_ref()).await?;
        Ok((request, creating))
    }

    /// Lets the first request of a stream in.
    pub async fn admit_stream<T: Guarded>(&self, caller: &Caller, first: &T) -> Result<(), Status> {
        if self.is_open() {
            return Ok(());
        }
        self.check(caller, |ask| first.needs(ask)).await?;
        self.charge(first).await.map(|_| ())
    }

    async fn charge<T: Guarded>(&self, request: &T) -> Result<Creating, Status> {
        if !self.guard.meter().is_on() {
            return Ok(None);
        }
        let mut charged = None;
        request.needs(&mut |_, resource| {
            charged.get_or_insert_with(|| resource.split('/').nth(1).unwrap_or_default().to_owned());
        });
        let Some(project) = charged else { return Ok(None) };
        let cost = request.cost();
        self.guard.meter().charge(&project, cost).await.map_err(|error| match error {
            Refused::Exceeded(exceeded) => refused(Refusal::Exceeded(exceeded)),
            Refused::Failed(error) => to_status(error),
        })
    }

    /// Checks permissions on their own.
    pub async fn check(&self, caller: &Caller, needs: impl FnOnce(&mut dyn FnMut(P, &str))) -> Result<(), Status> {
        if self.guard.mode() == Mode::Off {
            return Ok(());
        }
        let missing = self.guard.missing(caller, needs).map_err(refused)?;
        self.guard.settle(caller, missing).await.map_err(refused)
    }

    /// Resolves when a stream's caller may no longer do what the stream does; with nobody to check it never does.
    pub fn until_refused<T: Guarded + Send + 'static>(
        &self,
        caller: Arc<Caller>,
        first: T,
    ) -> Option<impl Future<Output = Status> + Send + 'static> {
        if self.guard.mode() != Mode::Enforce {
            return None;
        }
        let gate = self.clone();
        Some(async move {
            loop {
                tokio::time::sleep(STREAM_CHECK_INTERVAL).await;
                if !gate.guard.is_good(&caller) {
                    return refused(Refusal::Unauthenticated);
                }
                // A broker that does not answer ends streams in its own way.
                match gate.guard.missing(&caller, |ask| first.needs(ask)) {
                    Err(refusal) => return refused(refusal),
                    Ok(missing) => match gate.guard.settle(&caller, missing).await {
                        Ok(()) | Err(Refusal::Failed(_)) => {}
                        Err(refusal) => return refused(refusal),
                    },
                }
            }
        })
    }

    /// Leaves out the names of other projects' resources that the caller may not see.
    pub async fn visible<T>(&self, request: &Request<T>, own: &str, permission: P, names: Vec<String>) -> Vec<String> {
        if self.guard.mode() != Mode::Enforce {
            return names;
        }
        let caller = caller(request);
        let project = |name: &str| name.split('/').nth(1).map(str::to_owned);
        let own = project(own);
        let mut visible = Vec::with_capacity(names.len());
        for name in names {
            let shown =
                project(&name) == own || self.guard.held(&caller, &name).await.is_ok_and(|held| held.contains(permission));
            if shown {
                visible.push(name);
            }
        }
        visible
    }

    /// Which of these permissions the caller has; all of them where nobody is asked who they are.
    pub async fn held<T>(&self, request: &Request<T>, resource: &str, asked: Vec<String>) -> Result<Vec<String>, Status> {
        if self.guard.mode() == Mode::Off {
            return Ok(asked);
        }
        let held = self.guard.held(&caller(request), resource).await.map_err(to_status)?;
        Ok(asked.into_iter().filter(|name| P::parse(name).is_some_and(|permission| held.contains(permission))).collect())
    }

    /// A resource's policy has been changed.
    pub fn policy_changed(&self, resource: &str) {
        self.guard.forget(resource);
    }
}

/// Who sent a request: what the transport found out, and otherwise nobody.
pub fn caller<T>(request: &Request<T>) -> Arc<Caller> {
    let found = request.extensions().get::<CallerRef>();
    found.map_or_else(|| Arc::new(Caller::anonymous()), |found| found.0.clone())
}

/// The project of a resource, `projects/{id}`. What is no name stays as it is, and is refused for that.
fn project(resource: &str) -> &str {
    resource.match_indices('/').nth(1).map_or(resource, |(at, _)| &resource[..at])
}

/// Whether an update changes a field or a part of it.
fn names(mask: Option<&prost_types::FieldMask>, field: &str) -> bool {
    let of_field = |path: &String| path.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    mask.is_some_and(|mask| mask.paths.iter().any(of_field))
}

/// The schema without its revision.
fn schema(name: &str) -> &str {
    name.split('@').next().unwrap_or(name)
}

/// The permission on a resource of any kind.
fn of_kind(resource: &str, permissions: [P; 4]) -> P {
    let [topic, subscription, snapshot, schema] = permissions;
    match resource.split('/').nth(2) {
        Some("subscriptions") => subscription,
        Some("snapshots") => snapshot,
        Some("schemas") => schema,
        _ => topic,
    }
}

/// Requests that need one permission on the resource that a field names.
macro_rules! guarded {
    ($($message:ty: $permission:ident on $field:ident;)*) => {
        $(impl Guarded for $message {
            fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
                ask(P::$permission, &self.$field);
            }
        })*
    };
}

guarded! {
    pb::GetTopicRequest: TopicsGet on topic;
    pb::ListTopicsRequest: TopicsList on project;
    pb::ListTopicSubscriptionsRequest: TopicsGet on topic;
    pb::ListTopicSnapshotsRequest: TopicsGet on topic;
    pb::DeleteTopicRequest: TopicsDelete on topic;
    pb::GetSubscriptionRequest: SubscriptionsGet on subscription;
    pb::ListSubscriptionsRequest: SubscriptionsList on project;
    pb::DeleteSubscriptionRequest: SubscriptionsDelete on subscription;
    pb::ModifyPushConfigRequest: SubscriptionsUpdate on subscription;
    pb::PullRequest: SubscriptionsConsume on subscription;
    pb::StreamingPullRequest: SubscriptionsConsume on subscription;
    pb::AcknowledgeRequest: SubscriptionsConsume on subscription;
    pb::ModifyAckDeadlineRequest: SubscriptionsConsume on subscription;
    pb::GetSnapshotRequest: SnapshotsGet on snapshot;
    pb::ListSnapshotsRequest: SnapshotsList on project;
    pb::DeleteSnapshotRequest: SnapshotsDelete on snapshot;
    pb::ListSchemasRequest: SchemasList on parent;
    pb::ListSchemaRevisionsRequest: SchemasListRevisions on name;
    pb::CommitSchemaRequest: SchemasCommit on name;
    pb::RollbackSchemaRequest: SchemasRollback on name;
    pb::DeleteSchemaRequest: SchemasDelete on name;
    pb::CreateSchemaRequest: SchemasCreate on parent;
    pb::ValidateSchemaRequest: SchemasValidate on parent;
    llpb::ValidateMessageTransformRequest: MessageTransformsValidate on project;
}

impl Guarded for pb::Topic {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::TopicsCreate, project(&self.name));
        attach_schema(self, ask);
    }

    fn cost(&self) -> Cost<'_> {
        Cost::Topic(&self.name)
    }
}

fn attach_schema(topic: &pb::Topic, ask: &mut dyn FnMut(P, &str)) {
    if let Some(settings) = topic.schema_settings.as_ref().filter(|settings| !settings.schema.is_empty()) {
        ask(P::SchemasAttach, schema(&settings.schema));
    }
}

impl Guarded for pb::UpdateTopicRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        let topic = self.topic.as_ref();
        ask(P::TopicsUpdate, topic.map_or("", |topic| &topic.name));
        if names(self.update_mask.as_ref(), "schema_settings") {
            topic.into_iter().for_each(|topic| attach_schema(topic, ask));
        }
    }
}

impl Guarded for pb::PublishRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::TopicsPublish, &self.topic);
    }

    fn cost(&self) -> Cost<'_> {
        Cost::Publish(self.encoded_len())
    }
}

/// Whoever sets a dead-letter topic has messages published there. Google asks that of the service's own account, which
/// Landline does not have.
fn publish_dead_letters(subscription: &pb::Subscription, ask: &mut dyn FnMut(P, &str)) {
    let policy = subscription.dead_letter_policy.as_ref();
    if let Some(policy) = policy.filter(|policy| !policy.dead_letter_topic.is_empty()) {
        ask(P::TopicsPublish, &policy.dead_letter_topic);
    }
}

impl Guarded for pb::Subscription {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        // Without a name the server chooses one in the topic's project.
        ask(P::SubscriptionsCreate, project(if self.name.is_empty() { &self.topic } else { &self.name }));
        ask(P::TopicsAttachSubscription, &self.topic);
        publish_dead_letters(self, ask);
    }

    fn cost(&self) -> Cost<'_> {
        Cost::Subscription(&self.name)
    }
}

impl Guarded for pb::UpdateSubscriptionRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        let subscription = self.subscription.as_ref();
        ask(P::SubscriptionsUpdate, subscription.map_or("", |subscription| &subscription.name));
        if names(self.update_mask.as_ref(), "dead_letter_policy") {
            subscription.into_iter().for_each(|subscription| publish_dead_letters(subscription, ask));
        }
    }
}

impl Guarded for pb::CreateSnapshotRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SnapshotsCreate, project(if self.name.is_empty() { &self.subscription } else { &self.name }));
        ask(P::SubscriptionsConsume, &self.subscription);
    }
}

impl Guarded for pb::UpdateSnapshotRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SnapshotsUpdate, self.snapshot.as_ref().map_or("", |snapshot| &snapshot.name));
    }
}

impl Guarded for pb::SeekRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SubscriptionsConsume, &self.subscription);
        if let Some(pb::seek_request::Target::Snapshot(snapshot)) = &self.target {
            ask(P::SnapshotsSeek, snapshot);
        }
    }
}

impl Guarded for pb::GetSchemaRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SchemasGet, schema(&self.name));
    }
}

impl Guarded for pb::DeleteSchemaRevisionRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SchemasDelete, schema(&self.name));
    }
}

impl Guarded for pb::ValidateMessageRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        ask(P::SchemasValidate, &self.parent);
        if let Some(pb::validate_message_request::SchemaSpec::Name(name)) = &self.schema_spec {
            ask(P::SchemasGet, schema(name));
        }
    }
}

impl Guarded for llpb::TestMessageTransformsRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        use llpb::test_message_transforms_request::Transforms;
        ask(P::MessageTransformsValidate, &self.project);
        match &self.transforms {
            Some(Transforms::Topic(topic)) => ask(P::TopicsGet, topic),
            Some(Transforms::Subscription(subscription)) => ask(P::SubscriptionsGet, subscription),
            Some(Transforms::MessageTransforms(_)) | None => {}
        }
    }
}

impl Guarded for iampb::GetIamPolicyRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        let kinds = [P::TopicsGetIamPolicy, P::SubscriptionsGetIamPolicy, P::SnapshotsGetIamPolicy, P::SchemasGetIamPolicy];
        ask(of_kind(&self.resource, kinds), &self.resource);
    }
}

impl Guarded for iampb::SetIamPolicyRequest {
    fn needs(&self, ask: &mut dyn FnMut(P, &str)) {
        let kinds = [P::TopicsSetIamPolicy, P::SubscriptionsSetIamPolicy, P::SnapshotsSetIamPolicy, P::SchemasSetIamPolicy];
        ask(of_kind(&self.resource, kinds), &self.resource);
    }
}

/// The topic a subscription is taken from: the permission is on the topic, which the request does not name.
pub struct Detach<'r> {
    pub subscription: &'r str,
    /// The topic, or the subscription's project where there is none.
    pub topic: Option<String>,
}

impl Gate {
    /// Lets a DetachSubscription in. The refusal names the subscription: the topic's name is for those who may see it.
    pub async fn admit_detach<T>(&self, request: &Request<T>, detach: Detach<'_>) -> Result<(), Status> {
        if self.is_open() {
            return Ok(());
        }
        let on = detach.topic.as_deref().unwrap_or_else(|| project(detach.subscription));
        let checked = match self.guard.mode() {
            Mode::Off => Ok(()),
            _ => match self.guard.missing(&caller(request), |ask| ask(P::TopicsDetachSubscription, on)) {
                Ok(missing) => self.guard.settle(&caller(request), missing).await,
                Err(refusal) => Err(refusal),
            },
        };
        checked.map_err(|refusal| match refusal {
            Refusal::Denied(permission, _) => refused(Refusal::Denied(permission, detach.subscription.to_owned())),
            other => refused(other),
        })
    }
}
