//! User-defined functions of message transforms: JavaScript, run by QuickJS in an interpreter of its own.
//!
//! A function sees its message and what it brings itself: no files, network, timers, modules or code from text. Memory, stack
//! and processor time are bounded, so whatever it does ends with an error for its message. Source: the section on
//! user-defined functions of the public documentation.

use std::{cell::Cell, rc::Rc, time::Duration};

use rquickjs::{
    CatchResultExt, CaughtError, Coerced, Context, Ctx, Exception, Function, Object, Persistent, Runtime, Value,
    context::{EvalOptions, intrinsic},
    object::Property,
};
use rustix::time::{ClockId, clock_gettime};

use crate::model::{EncodedMessage, MessageTransform, text::clipped};

#[cfg(test)]
mod tests;

/// Processor time of one function for one message. Time of the thread, so that a busy machine fails nobody's messages.
pub const MAX_TIME: Duration = Duration::from_millis(500);
/// Memory of one interpreter: a message of 10 MB parsed from JSON and written again has room, and all threads together stay
/// within a small server.
const MAX_MEMORY: usize = 128 * 1024 * 1024;
/// Stack of the interpreter. Its threads have [`THREAD_STACK`], so that it ends first.
const MAX_STACK: usize = 512 * 1024;
/// Stack that a thread needs to run functions.
pub const THREAD_STACK: usize = 4 * 1024 * 1024;
/// Memory that an interpreter may keep from one message to the next.
const MAX_KEPT: i64 = 8 * 1024 * 1024;
/// Name of the code in error positions.
const FILE: &str = "code";
/// Runs before the code: takes away what makes code from text.
const PRELUDE: &str = include_str!("transform/prelude.js");

/// Why there is no message to go on with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// The code can't be used at all.
    #[error("{0}")]
    Code(String),
    /// The code threw something.
    #[error("{0}")]
    Thrown(String),
    #[error("the function took longer than {} ms", MAX_TIME.as_millis())]
    Time,
    #[error("the function used more than {} MiB of memory", MAX_MEMORY / 1024 / 1024)]
    Memory,
    /// What came in, or what came back, is no message.
    #[error("{0}")]
    Shape(String),
}

/// What a function may know of a message beside its content.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    /// None before the message has one.
    pub message_id: Option<String>,
    /// Milliseconds since the epoch.
    pub publish_time_ms: u64,
}

/// An interpreter that has loaded one function.
pub struct Instance {
    // Dropped in this order.
    function: Persistent<Function<'static>>,
    context: Context,
    runtime: Runtime,
    limit: Rc<Limit>,
    fresh: bool,
}

/// When the running code must end.
#[derive(Default)]
struct Limit {
    /// Processor time of the thread.
    end: Cell<Duration>,
    passed: Cell<bool>,
}

impl Limit {
    fn start(&self) {
        self.passed.set(false);
        self.end.set(thread_time() + MAX_TIME);
    }

    /// Nothing runs.
    fn forget(&self) {
        self.passed.set(false);
        self.end.set(Duration::MAX);
    }

    fn check(&self) -> bool {
        if !self.passed.get() && thread_time() >= self.end.get() {
            self.passed.set(true);
        }
        self.passed.get()
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec.clamp(0, 999_999_999) as u32)
}

/// Whether a text can name a function.
pub fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    let first = chars.next().is_some_and(|c| c.is_alphabetic() || c == '_' || c == '$');
    first && chars.all(|c| c.is_alphanumeric() || c == '_' || c == '$')
}

impl Instance {
    /// Loads a function. `alive` is called again and again while its code runs.
    ///
    /// # Errors
    /// [`TransformError::Code`] with the position where the code is not legal or throws, or when it has no such function.
    pub fn new(transform: &MessageTransform, alive: impl Fn() + 'static) -> Result<Self, TransformError> {
        let name = transform.function_name.as_str();
        if !is_identifier(name) {
            return Err(TransformError::Code(format!("'{}' can't name a function", clipped(name))));
        }
        let setup = |e: rquickjs::Error| TransformError::Code(format!("the interpreter does not start: {e}"));
        let runtime = Runtime::new().map_err(setup)?;
        runtime.set_memory_limit(MAX_MEMORY);
        runtime.set_max_stack_size(MAX_STACK);
        let limit = Rc::new(Limit::default());
        let watched = limit.clone();
        runtime.set_interrupt_handler(Some(Box::new(move || {
            alive();
            watched.check()
        })));
        let context = builtins(&runtime).map_err(setup)?;
        limit.start();
        let function = context.with(|ctx| load(&ctx, transform, &limit))?;
        Ok(Self { function, context, runtime, limit, fresh: true })
    }

    /// Whether no message has been here before.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Whether the interpreter keeps so little that another message may follow.
    pub fn is_lean(&self) -> bool {
        let small = || self.runtime.memory_usage().malloc_size <= MAX_KEPT;
        small() || {
            self.runtime.run_gc();
            small()
        }
    }

    /// What the function makes of a message; none when it drops it. After an error the interpreter is not to be used again.
    ///
    /// # Errors
    /// [`TransformError`].
    pub fn call(&mut self, message: &EncodedMessage, metadata: &Metadata) -> Result<Option<EncodedMessage>, TransformError> {
        self.fresh = false;
        self.limit.forget();
        let data = std::str::from_utf8(message.data());
        let data = data.map_err(|_| TransformError::Shape("the message's data is not UTF-8 text".into()))?;
        self.context.with(|ctx| {
            let outcome = run(&ctx, &self.function, &self.limit, message, data, metadata);
            match outcome.catch(&ctx) {
                Ok(result) => result,
                Err(error) => Err(explain(error, &self.limit)),
            }
        })
    }
}

/// The built-ins of the language, without clocks of the host beyond `Date`.
fn builtins(runtime: &Runtime) -> rquickjs::Result<Context> {
    use intrinsic::{Date, Eval, Json, MapSet, Promise, Proxy, RegExp, RegExpCompiler, TypedArrays, WeakRef};
    Context::builder()
        .with::<(Date, Eval, RegExpCompiler, RegExp, Json, Proxy, MapSet, TypedArrays, Promise, WeakRef)>()
        .build(runtime)
}

fn load(ctx: &Ctx<'_>, transform: &MessageTransform, limit: &Limit) -> Result<Persistent<Function<'static>>, TransformError> {
    let illegal = |error: CaughtError<'_>| match explain(error, limit) {
        TransformError::Thrown(text) => TransformError::Code(text),
        other => TransformError::Code(format!("while the code was loaded: {other}")),
    };
    if transform.code.contains('\0') {
        return Err(TransformError::Code("the code holds a NUL character".into()));
    }
    // Taken from the prelude: later code has no eval.
    let options = |strict| {
        let mut options = EvalOptions::default();
        (options.strict, options.filename) = (strict, Some(FILE.into()));
        options
    };
    ctx.eval_with_options::<(), _>(PRELUDE, options(true)).catch(ctx).map_err(illegal)?;
    ctx.eval_with_options::<Value<'_>, _>(transform.code.as_str(), options(false)).catch(ctx).map_err(illegal)?;
    let name = &transform.function_name;
    let missing = || TransformError::Code(format!("the code has no function '{}'", clipped(name)));
    let found = ctx.eval_with_options::<Value<'_>, _>(format!("typeof {name} === 'function' ? {name} : null"), options(false));
    let function = found.catch(ctx).map_err(illegal)?.into_function().ok_or_else(missing)?;
    Ok(Persistent::save(ctx, function))
}

/// Calls the function. The outer error is JavaScript's, the inner one ours.
fn run<'js>(
    ctx: &Ctx<'js>,
    function: &Persistent<Function<'static>>,
    limit: &Limit,
    message: &EncodedMessage,
    data: &str,
    metadata: &Metadata,
) -> rquickjs::Result<Result<Option<EncodedMessage>, TransformError>> {
    let attributes = Object::new(ctx.clone())?;
    for (key, value) in message.attributes() {
        define(&attributes, key, value)?;
    }
    let given = Object::new(ctx.clone())?;
    define(&given, "data", data)?;
    given.prop("attributes", Property::from(attributes).writable().enumerable().configurable())?;
    let about = Object::new(ctx.clone())?;
    if let Some(id) = &metadata.message_id {
        about.prop("message_id", Property::from(id.as_str()).enumerable())?;
    }
    about.prop("publish_time", Property::from(whole_seconds(metadata.publish_time_ms)).enumerable())?;
    about.prop("ordering_key", Property::from(message.ordering_key()).enumerable())?;
    // The size of a message is not the function's fault.
    limit.start();
    let returned: Value<'js> = function.clone().restore(ctx)?.call((given, about))?;
    read(returned, message.ordering_key())
}

/// Sets a property of the object itself, whatever its name means to its prototype.
fn define(object: &Object<'_>, key: &str, value: &str) -> rquickjs::Result<()> {
    object.prop(key, Property::from(value).writable().enumerable().configurable())
}

/// Reads what a function returned.
fn read(returned: Value<'_>, ordering_key: &str) -> rquickjs::Result<Result<Option<EncodedMessage>, TransformError>> {
    let shape = |text: String| Ok(Err(TransformError::Shape(text)));
    if returned.is_null() || returned.is_undefined() {
        return Ok(Ok(None));
    }
    let Some(object) = returned.as_object().filter(|_| !returned.is_function()) else {
        return shape(format!("the function returned {}, not a message or null", returned.type_name()));
    };
    if returned.is_promise() {
        return shape("the function returned a promise, not a message or null".into());
    }
    let data: Value<'_> = object.get("data")?;
    let Some(data) = data.as_string() else {
        return shape(format!("the data of the returned message is of the type {}, not a string", data.type_name()));
    };
    let data = match data.to_string() {
        Ok(data) => data,
        Err(rquickjs::Error::Utf8(_)) => return shape("the data of the returned message is not legal Unicode".into()),
        Err(error) => return Err(error),
    };
    let attributes: Value<'_> = object.get("attributes")?;
    let mut pairs = Vec::new();
    if let Some(attributes) = attributes.as_object() {
        for pair in attributes.props::<String, Value<'_>>() {
            let (key, value) = pair?;
            let Some(value) = value.as_string() else {
                let kind = value.type_name();
                return shape(format!(
                    "the attribute '{}' of the returned message is of the type {kind}, not a string",
                    clipped(&key)
                ));
            };
            match value.to_string() {
                Ok(value) => pairs.push((key, value)),
                Err(rquickjs::Error::Utf8(_)) => return shape(format!("the attribute '{}' is not legal Unicode", clipped(&key))),
                Err(error) => return Err(error),
            }
        }
    } else if !attributes.is_null() && !attributes.is_undefined() {
        return shape(format!("the attributes of the returned message are of the type {}", attributes.type_name()));
    }
    if data.is_empty() && pairs.is_empty() {
        return shape("the returned message has neither data nor attributes".into());
    }
    let pairs = pairs.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    Ok(Ok(Some(EncodedMessage::encode(data.as_bytes(), pairs, ordering_key))))
}

/// What went wrong, without running code that has had its time.
fn explain(error: CaughtError<'_>, limit: &Limit) -> TransformError {
    if limit.passed.get() {
        return TransformError::Time;
    }
    let text = match error {
        CaughtError::Exception(exception) => describe(&exception),
        CaughtError::Value(value) => match value.get::<Coerced<String>>() {
            Ok(text) => text.0,
            Err(_) => format!("threw a value of the type {}", value.type_name()),
        },
        CaughtError::Error(error) => error.to_string(),
    };
    if limit.passed.get() {
        return TransformError::Time;
    }
    if text.contains("out of memory") || text.is_empty() {
        return TransformError::Memory;
    }
    TransformError::Thrown(clipped(&text).into_owned())
}

/// `TypeError: x is not a function (line 3, column 14)`.
fn describe(exception: &Exception<'_>) -> String {
    let name = exception.as_object().get::<_, Coerced<String>>("name").map(|name| name.0).unwrap_or_default();
    let message = exception.message().unwrap_or_default();
    let mut text = if name.is_empty() || message.is_empty() { format!("{name}{message}") } else { format!("{name}: {message}") };
    if let Some((line, column)) = exception.stack().as_deref().and_then(position) {
        text += &format!(" (line {line}, column {column})");
    }
    text
}

/// The first place in a stack trace that lies in the user's code, `code:3:14`.
fn position(stack: &str) -> Option<(u32, u32)> {
    let places = stack.lines().filter_map(|line| line.split_once("code:").map(|(_, place)| place));
    places
        .filter_map(|place| {
            let mut numbers = place.trim_end_matches(')').splitn(2, ':').map(|number| number.parse::<u32>().ok());
            Some((numbers.next()??, numbers.next()??))
        })
        .next()
}

/// `2026-01-31T12:00:00Z`.
fn whole_seconds(ms: u64) -> String {
    prost_types::Timestamp { seconds: (ms / 1000) as i64, nanos: 0 }.to_string()
}
