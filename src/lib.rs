//! Landline: a server for the Google Cloud Pub/Sub API that keeps messages on the operator's own ground.
//!
//! The layers, from the edge inwards: `app`, `api` (transports), `connector` (use cases), `rules` (pure decisions),
//! `broker` (the port and its engines) and `model` (the vocabulary); beside them `telemetry` and `tls`. Imports run inwards only.

pub mod admin;
pub mod api;
pub mod app;
pub mod auth;
pub mod bench;
pub mod broker;
pub mod client;
pub mod connector;
pub mod mirror;
pub mod model;
#[cfg(feature = "push")]
pub mod push;
pub mod resources;
pub mod rules;
pub mod settings;
pub mod telemetry;
pub mod tls;
