//! Redis Cluster and Sentinel.
