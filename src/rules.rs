//! Pure decisions: no clock, no I/O.

pub mod filter;
pub mod flow_control;
pub mod lease;
