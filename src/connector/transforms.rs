//! Message transforms: checked when they are set, run on what is published to a topic and on what a subscription delivers.
//!
//! A topic's transforms run before anything is stored: an error fails the publish. A subscription's run after its filter,
//! each time a message is about to be delivered: an error is a failed delivery, and a message they drop is acknowledged. So
//! a changed function holds for the whole backlog, and nothing that a function did is stored. Source: the pages on message
//! transforms of the public documentation.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::{
    Connector, Error, SubscriptionEntry,
    channel::Held,
    draft::{TransformDraft, TransformKind},
    listing::check_project,
    screen::note_settled,
};
use crate::{
    broker::{DeadLetter, DeadlineChange, Leased},
    model::{
        EncodedMessage, MessageError, MessageTransform, SubscriptionName, TopicName,
        limits::{MAX_TRANSFORMS, MAX_UDF_BYTES},
    },
    rules::transform::{Metadata, TransformError},
};

mod pool;

#[cfg(test)]
mod tests;

use pool::{Input, Outcome, Undone};
pub(super) use pool::{Pipeline, Pool};

/// Longest time for the messages of one publish. Clients give up after 60 s.
const PUBLISH_TIME: Duration = Duration::from_secs(30);
/// Longest time for a check or a trial.
const CHECK_TIME: Duration = Duration::from_secs(20);
/// Messages of one job, so that a large request does not keep a thread from the others.
const BATCH: usize = 64;
/// Messages leased at once for a subscription with transforms: what can't be done in time is leased in vain.
pub(super) const MAX_LEASED: usize = 100;
/// Without a retry policy a message that failed is delivered again after a pause that doubles from this one, up to the other,
/// so that a faulty function does not keep the server busy.
const FIRST_PAUSE_MS: u64 = 100;
const LONGEST_PAUSE_MS: u64 = 10_000;
/// Transforms of a resource, disabled ones included; a bound against abuse.
const MAX_DISABLED_TOO: usize = 20;

/// Where the transforms of a trial come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialOf {
    Topic(TopicName),
    Subscription(SubscriptionName),
    Transforms(Vec<TransformDraft>),
}

/// What one transform of a trial did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tried {
    Transformed(EncodedMessage),
    Filtered,
    Failed(String),
}

/// The enabled transforms of a resource.
pub(super) fn pipeline(transforms: &[MessageTransform]) -> Pipeline {
    transforms.iter().filter(|transform| !transform.disabled).cloned().collect()
}

fn busy() -> Error {
    Error::Unavailable("message transforms did not get their turn in time".into())
}

fn failed(function: &str, error: &TransformError) -> String {
    format!("message transform {function}: {error}")
}

impl From<Undone> for Error {
    fn from(undone: Undone) -> Self {
        match undone {
            Undone::Busy => busy(),
            Undone::Wedged => Self::Transform("a message transform did not come to an end".into()),
        }
    }
}

impl Connector {
    /// Checks the transforms of a resource: known kinds, at most five enabled ones, legal code that has the function, no name
    /// twice.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the transform and the position in its code, [`Error::Unsupported`] for other kinds.
    pub(super) async fn message_transforms(&self, drafts: &[TransformDraft]) -> Result<Vec<MessageTransform>, Error> {
        let enabled = drafts.iter().filter(|draft| !draft.disabled).count();
        if enabled > MAX_TRANSFORMS {
            return Err(Error::Text(format!(
                "The request exceeds the maximum number of enabled message transforms. Maximum enabled transforms: {MAX_TRANSFORMS}. Enabled transforms: {enabled}"
            )));
        }
        if drafts.len() > MAX_DISABLED_TOO {
            let why = format!("there are {}, but the maximum with disabled ones is {MAX_DISABLED_TOO}", drafts.len());
            return Err(Error::argument("message_transforms", why));
        }
        let mut names = HashSet::new();
        let mut transforms = Vec::with_capacity(drafts.len());
        for (index, draft) in drafts.iter().enumerate() {
            let transform = self.message_transform(&format!("message_transforms[{index}]"), draft).await?;
            if !names.insert(transform.function_name.clone()) {
                let why = format!("the function name '{}' is used twice", transform.function_name);
                return Err(Error::argument(&format!("message_transforms[{index}].javascript_udf.function_name"), why));
            }
            transforms.push(transform);
        }
        Ok(transforms)
    }

    async fn message_transform(&self, field: &str, draft: &TransformDraft) -> Result<MessageTransform, Error> {
        let (function_name, code) = match &draft.kind {
            TransformKind::JavaScript { function_name, code } => (function_name.clone(), code.clone()),
            TransformKind::Compression => return Err(Error::Unsupported("message_transforms.compression")),
            TransformKind::AiInference => return Err(Error::Unsupported("message_transforms.ai_inference")),
            TransformKind::Unknown => return Err(Error::argument(field, "the transform must be set, to javascript_udf")),
        };
        if function_name.is_empty() {
            return Err(Error::argument(&format!("{field}.javascript_udf.function_name"), "must not be empty"));
        }
        if code.is_empty() || code.len() > MAX_UDF_BYTES {
            let why = format!("there are {} bytes, but there must be 1 to {MAX_UDF_BYTES}", code.len());
            return Err(Error::argument(&format!("{field}.javascript_udf.code"), why));
        }
        let transform = MessageTransform { function_name, code, disabled: draft.disabled, enabled: draft.enabled };
        match self.transforms.check(transform.clone(), Instant::now() + CHECK_TIME).await? {
            Ok(()) => Ok(transform),
            Err(error) => Err(Error::argument(&format!("{field}.javascript_udf.code"), error)),
        }
    }

    /// Checks one transform without storing it.
    ///
    /// # Errors
    /// A bad project, or what is wrong with the transform.
    pub async fn validate_transform(&self, project: &str, draft: &TransformDraft) -> Result<(), Error> {
        check_project(project)?;
        self.message_transform("message_transform", draft).await.map(drop)
    }

    /// Tries transforms on a message, one after the other, and answers what each did; the first that drops the message or
    /// fails ends the trial. Disabled transforms are left out.
    ///
    /// # Errors
    /// A bad project, message or transform, or a topic or subscription that does not exist.
    pub async fn try_transforms(
        &self,
        project: &str,
        of: TrialOf,
        message: EncodedMessage,
        message_id: Option<String>,
    ) -> Result<Vec<Tried>, Error> {
        check_project(project)?;
        let message = self.scan(message.wire().clone())?;
        let transforms = match of {
            TrialOf::Topic(name) => self.topic(&name).await?.transforms.clone(),
            TrialOf::Subscription(name) => self.subscription(&name).await?.transforms.clone(),
            TrialOf::Transforms(drafts) => pipeline(&self.message_transforms(&drafts).await?),
        };
        let metadata = Metadata { message_id, publish_time_ms: self.broker().now_ms() };
        let mut tried = Vec::new();
        let mut message = message;
        for transform in transforms.iter() {
            let input = Input { message, metadata: metadata.clone() };
            let pipeline: Pipeline = [transform.clone()].into();
            let outcomes = self.transforms.run(pipeline.clone(), vec![input], Instant::now() + CHECK_TIME).await?;
            let mut outcome = outcomes.into_iter().next().ok_or_else(busy)?;
            // What one function makes, the next may put right.
            if tried.len() + 1 == transforms.len() {
                outcome = self.legal(&pipeline, outcome, &Bytes::new());
            }
            match outcome {
                Outcome::Passed(changed) => {
                    message = changed.clone();
                    tried.push(Tried::Transformed(changed));
                }
                Outcome::Dropped => {
                    tried.push(Tried::Filtered);
                    break;
                }
                Outcome::Failed { function, error } => {
                    tried.push(Tried::Failed(failed(&function, &error)));
                    break;
                }
            }
        }
        Ok(tried)
    }

    /// What a topic's transforms make of messages about to be published; none for those they drop.
    ///
    /// # Errors
    /// [`Error::Transform`] for the first that fails, or that is no legal message any more.
    pub(super) async fn transform_published(
        &self,
        transforms: &Pipeline,
        messages: Vec<EncodedMessage>,
    ) -> Result<Vec<Option<EncodedMessage>>, Error> {
        if transforms.is_empty() {
            return Ok(messages.into_iter().map(Some).collect());
        }
        let until = Instant::now() + PUBLISH_TIME;
        let metadata = Metadata { message_id: None, publish_time_ms: self.broker().now_ms() };
        let mut transformed = Vec::with_capacity(messages.len());
        for batch in messages.chunks(BATCH) {
            let input = |message: &EncodedMessage| Input { message: message.clone(), metadata: metadata.clone() };
            let outcomes = self.transforms.run(transforms.clone(), batch.iter().map(input).collect(), until).await?;
            if outcomes.len() < batch.len() {
                return Err(busy());
            }
            for outcome in outcomes {
                transformed.push(match outcome {
                    Outcome::Passed(message) => Some(
                        self.scan(message.wire().clone())
                            .map_err(|error| Error::Transform(format!("the transformed message can't be published: {error}")))?,
                    ),
                    Outcome::Dropped => None,
                    Outcome::Failed { function, error } => return Err(Error::Transform(failed(&function, &error))),
                });
            }
        }
        Ok(transformed)
    }

    /// What a subscription's transforms make of leased messages. What they drop is acknowledged, what fails is given back as a
    /// failed delivery; neither is in the answer. What can't be done within half of the lease is given back uncounted, and so
    /// is everything when the future is dropped.
    ///
    /// # Errors
    /// None here; a server without transforms refuses.
    pub(super) async fn transform_leased(&self, entry: &SubscriptionEntry, leased: Vec<Leased>) -> Result<Vec<Leased>, Error> {
        if entry.transforms.is_empty() || leased.is_empty() {
            return Ok(leased);
        }
        let mut held = Held::new(self.broker(), self.delivery.tasks.clone(), &entry.queue, leased.iter().map(|l| l.token));
        let ends_ms = leased.iter().map(|l| l.deadline_at_ms).min().unwrap_or_default();
        let until = Instant::now() + Duration::from_millis(ends_ms.saturating_sub(self.broker().now_ms())) / 2;
        let (mut ready, mut dropped, mut failures) = (Vec::new(), Vec::new(), Vec::new());
        for batch in leased.chunks(BATCH) {
            for (leased, outcome) in batch.iter().zip(self.transform_stored(entry, batch, until).await) {
                match self.legal(&entry.transforms, outcome, &leased.message) {
                    Outcome::Passed(message) => {
                        ready.push(Leased { message: resealed(&message, &leased.message), ..leased.clone() })
                    }
                    Outcome::Dropped => dropped.push(leased.token),
                    Outcome::Failed { function, error } => {
                        tracing::debug!(subscription = %entry.subscription.name, "{}", failed(&function, &error));
                        let nack = DeadlineChange {
                            token: leased.token,
                            deadline_ms: pause_ms(entry, leased.token.attempt),
                            bypass_backoff: false,
                            max_life_ms: 0,
                        };
                        failures.push(nack);
                    }
                }
            }
        }
        if !dropped.is_empty() {
            held.forget(&dropped);
            note_settled(entry, self.broker().acknowledge(&entry.queue, &dropped).await);
        }
        if !failures.is_empty() {
            held.forget(&failures.iter().map(|nack| nack.token).collect::<Vec<_>>());
            note_settled(entry, self.broker().modify_deadlines(&entry.queue, &failures).await);
        }
        held.forget(&ready.iter().map(|l| l.token).collect::<Vec<_>>());
        Ok(ready)
    }

    /// A message that could not be published is no better than none: the last function failed. The server itself may have
    /// added attributes to a stored message, so that there are more than a publisher may give.
    fn legal(&self, transforms: &Pipeline, outcome: Outcome, stored: &Bytes) -> Outcome {
        let Outcome::Passed(message) = &outcome else { return outcome };
        let given = || EncodedMessage::scan_system(stored.clone()).map_or(0, |message| message.attribute_map().len());
        let error = match self.scan(message.wire().clone()) {
            Ok(_) => return outcome,
            Err(Error::Message(MessageError::TooManyAttributes(count))) if count <= given() => return outcome,
            Err(error) => error,
        };
        let function = transforms.last().map(|transform| transform.function_name.clone()).unwrap_or_default();
        Outcome::Failed { function, error: TransformError::Shape(format!("the returned message is not legal: {error}")) }
    }

    /// One outcome a message that there was time for; none when the functions don't get to run.
    async fn transform_stored(&self, entry: &SubscriptionEntry, batch: &[Leased], until: Instant) -> Vec<Outcome> {
        let mut inputs = Vec::with_capacity(batch.len());
        for leased in batch {
            match input(&leased.message) {
                Some(input) => inputs.push(input),
                None => {
                    tracing::error!(subscription = %entry.subscription.name, sequence = leased.token.sequence, "a stored message can't be read");
                    break;
                }
            }
        }
        match self.transforms.run(entry.transforms.clone(), inputs, until).await {
            Ok(outcomes) => outcomes,
            Err(Undone::Busy) => Vec::new(),
            Err(Undone::Wedged) => {
                let error = TransformError::Thrown("did not come to an end".into());
                vec![Outcome::Failed { function: String::new(), error }; batch.len()]
            }
        }
    }

    /// What a subscription's transforms say of dead letters: the error of each that they fail on. Nothing of it is stored with
    /// a failed delivery, so the functions are asked once more.
    pub(super) async fn transform_errors(&self, entry: &SubscriptionEntry, letters: &[DeadLetter]) -> Vec<Option<String>> {
        let mut errors = vec![None; letters.len()];
        if entry.transforms.is_empty() {
            return errors;
        }
        for (letter, error) in letters.iter().zip(&mut errors) {
            let Some(input) = input(&letter.message) else { continue };
            let outcomes = self.transforms.run(entry.transforms.clone(), vec![input], Instant::now() + CHECK_TIME).await;
            let outcome = outcomes.map(|outcomes| outcomes.into_iter().next());
            *error = match outcome.map(|outcome| outcome.map(|outcome| self.legal(&entry.transforms, outcome, &letter.message))) {
                Ok(Some(Outcome::Failed { function, error })) => Some(failed(&function, &error)),
                Ok(_) | Err(Undone::Busy) => None,
                Err(Undone::Wedged) => Some("a message transform did not come to an end".into()),
            };
        }
        errors
    }
}

/// A stored message for a function.
fn input(stored: &Bytes) -> Option<Input> {
    let (id, publish_time_ms) = EncodedMessage::sealed(stored)?;
    let metadata = Metadata { message_id: Some(id.to_owned()), publish_time_ms };
    Some(Input { message: EncodedMessage::scan_system(stored.clone()).ok()?, metadata })
}

/// A transformed message with the id and the time of the stored one.
fn resealed(message: &EncodedMessage, stored: &Bytes) -> Bytes {
    let (id, time_ms) = EncodedMessage::sealed(stored).unwrap_or_default();
    let mut wire = Vec::with_capacity(message.wire().len() + EncodedMessage::SEAL_BYTES);
    message.seal(id.parse().unwrap_or_default(), time_ms, &mut wire);
    wire.into()
}

/// How long a message that failed stays leased: not at all with a retry policy, which has a backoff of its own.
fn pause_ms(entry: &SubscriptionEntry, attempt: u32) -> u64 {
    match entry.subscription.retry_policy {
        Some(_) => 0,
        None => (FIRST_PAUSE_MS << attempt.saturating_sub(1).min(16)).min(LONGEST_PAUSE_MS),
    }
}
