//! Every test that needs a running server, in one binary.

#![allow(clippy::unwrap_used)]

mod descriptors;
mod layers;
mod licences;
