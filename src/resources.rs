//! Resources as a file describes them, compared with those of an endpoint and brought to the file's state.
//!
//! One file, one planner: `landline apply` runs it against any endpoint, and the server against itself at the start
//! (`PRELOAD_FILE`). Everything goes through the API's own JSON shape, so that every check of the API applies.

mod caller;
mod compare;
mod document;
mod plan;
mod text;
mod yaml;

pub use self::{
    caller::{Caller, Failure},
    compare::Change,
    document::{Document, Kind, Resource},
    plan::{Action, Plan, Step},
};
