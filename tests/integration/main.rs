//! Every test that needs a running server, in one binary.
