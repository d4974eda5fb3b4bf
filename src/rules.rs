//! Pure decisions: no clock, no I/O.

pub mod filter;
