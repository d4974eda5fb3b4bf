//! Pure decisions: no clock, no I/O.

pub mod dead_letter;
pub mod filter;
pub mod flow_control;
pub mod lease;
#[cfg(feature = "schemas")]
pub mod schema;
#[cfg(feature = "transforms")]
pub mod transform;
