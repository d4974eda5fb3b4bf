//! Puts the parts together: the process from start to drain.
