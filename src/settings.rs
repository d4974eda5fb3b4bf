//! Settings from environment, YAML or TOML.
