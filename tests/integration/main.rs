//! Tests against real server processes. Each case number (`C001` and so on) stands for one report from the public
//! about a Pub/Sub server or client; the doc comment says what is right.
#![allow(clippy::unwrap_used)]

mod fixture;

mod access;
mod aging;
mod applying;
mod console;
mod crash;
mod defaults;
mod deletion;
mod deployment;
mod descriptors;
mod exactly_once;
mod filters;
mod fuzzing;
mod hostile;
mod inspecting;
mod layers;
mod licences;
mod long_texts;
mod masks;
mod metrics;
mod migration;
mod mirroring;
mod moving;
mod naming;
mod nodes;
mod ordering;
mod outages;
mod paging;
mod publishing;
mod pushing;
mod reclaiming;
mod redelivery;
mod resources;
mod rest_wire;
mod scaling;
mod schemas;
mod security;
mod seeking;
mod server;
mod sessions;
mod settling;
mod startup;
mod streaming;
mod telemetry;
mod tls;
mod transforms;
