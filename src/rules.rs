//! Pure decisions: no clock, no I/O.
