//! Counts the API's calls by method and answer, over gRPC and REST alike.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use crate::model::meter::{Histogram, add};

/// Names of the gRPC status codes, by number.
pub const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];
const CANCELLED: usize = 1;
const UNKNOWN: usize = 2;

/// Counters of one method.
#[derive(Debug, Default)]
pub struct Method {
    streaming: bool,
    answers: [AtomicU64; CODES.len()],
    pub latency: Histogram,
}

impl Method {
    /// Answers with this code so far.
    pub fn answered(&self, code: usize) -> u64 {
        self.answers[code].load(Ordering::Relaxed)
    }
}

/// Counters of every method of the API. Unknown methods are not counted: their names are the callers'.
#[derive(Debug, Default)]
pub struct Requests {
    /// By path, `/package.Service/Method`.
    methods: BTreeMap<String, Arc<Method>>,
}

impl Requests {
    /// Counts the methods of these paths; of those that are streams only the opening.
    pub fn new(methods: impl IntoIterator<Item = (String, bool)>) -> Arc<Self> {
        let method = |(path, streaming)| (path, Arc::new(Method { streaming, ..Method::default() }));
        Arc::new(Self { methods: methods.into_iter().map(method).collect() })
    }

    /// Service, method and counters of each method that was called.
    pub fn called(&self) -> impl Iterator<Item = (&str, &str, &Method)> {
        let called = self.methods.iter().filter(|(_, method)| (0..CODES.len()).any(|code| method.answered(code) > 0));
        called.filter_map(|(path, method)| {
            let (service, name) = path.trim_start_matches('/').split_once('/')?;
            Some((service, name, &**method))
        })
    }

    /// A call begins. Dropping the answer unanswered counts it as cancelled.
    pub fn begin(&self, path: &str) -> Call {
        Call { method: self.methods.get(path).cloned(), began: Instant::now(), answered: false }
    }
}

/// A call under way.
pub struct Call {
    method: Option<Arc<Method>>,
    began: Instant,
    answered: bool,
}

impl Call {
    /// The answer begins with this `grpc-status`; none stands for success.
    pub fn answer(mut self, status: Option<&[u8]>) {
        let code = match status {
            None => 0,
            Some(text) => std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).unwrap_or(UNKNOWN),
        };
        self.count(code);
    }

    fn count(&mut self, code: usize) {
        self.answered = true;
        let Some(method) = &self.method else { return };
        add(&method.answers[if code < CODES.len() { code } else { UNKNOWN }], 1);
        if !method.streaming {
            method.latency.observe(self.began.elapsed());
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.answered {
            self.count(CANCELLED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_and_answer() {
        let requests = Requests::new([("/p.S/Unary".to_owned(), false), ("/p.S/Stream".to_owned(), true)]);
        requests.begin("/p.S/Unary").answer(None);
        requests.begin("/p.S/Unary").answer(Some(b"5"));
        requests.begin("/p.S/Unary").answer(Some(b"99"));
        drop(requests.begin("/p.S/Unary"));
        requests.begin("/p.S/Stream").answer(None);
        requests.begin("/p.S/Unknown").answer(None);
        let called: Vec<_> = requests.called().collect();
        assert_eq!(called.iter().map(|(s, m, _)| (*s, *m)).collect::<Vec<_>>(), [("p.S", "Stream"), ("p.S", "Unary")]);
        assert_eq!([0, 1, 2, 5].map(|code| called[1].2.answered(code)), [1; 4]);
        assert_eq!(called[1].2.latency.view().buckets.iter().sum::<u64>(), 4);
        assert_eq!(called[0].2.latency.view().buckets.iter().sum::<u64>(), 0);
    }
}
