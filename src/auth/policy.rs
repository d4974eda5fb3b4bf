//! Who may do what: compiled policies, and those of projects, which are part of the configuration.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use config::{File, FileFormat};
use serde::Deserialize;

use super::Caller;
use crate::model::{
    access::{Binding, PermissionSet},
    names::is_project_id,
};

/// Stands for every project.
const EVERY_PROJECT: &str = "*";

/// Why project policies can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {1}", path = .0.display())]
pub struct PolicyError(PathBuf, String);

/// The members of a policy and what each may do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grants(HashMap<String, PermissionSet>);

impl Grants {
    /// Compiles bindings. Roles that are not predefined give nothing.
    pub fn compile<'b>(bindings: impl IntoIterator<Item = &'b Binding>) -> Self {
        let mut grants = HashMap::new();
        for binding in bindings {
            let Some(permissions) = PermissionSet::of_role(&binding.role) else { continue };
            for member in &binding.members {
                let held: &mut PermissionSet = grants.entry(member.clone()).or_default();
                *held = held.union(permissions);
            }
        }
        Self(grants)
    }

    /// What a caller may do.
    pub fn of(&self, caller: &Caller) -> PermissionSet {
        if self.0.is_empty() {
            return PermissionSet::default();
        }
        let held = caller.members().iter().filter_map(|member| self.0.get(member));
        held.fold(PermissionSet::default(), |all, held| all.union(*held))
    }
}

/// The policies of projects.
#[derive(Debug, Default)]
pub struct ProjectPolicies {
    every: Grants,
    projects: HashMap<String, Grants>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    projects: HashMap<String, Vec<WrittenBinding>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenBinding {
    role: String,
    members: Vec<String>,
}

impl ProjectPolicies {
    /// Reads the file of policies, if there is one. `admins` are members that may do everything in every project.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn load(file: Option<&Path>, admins: &[String]) -> Result<Self, PolicyError> {
        let admin = Binding { role: "roles/pubsub.admin".into(), members: admins.to_vec() };
        let mut every = vec![admin];
        let mut projects = HashMap::new();
        for (project, bindings) in file.map(read).transpose()?.into_iter().flatten() {
            if project == EVERY_PROJECT {
                every.extend(bindings);
            } else {
                projects.insert(project, Grants::compile(&bindings));
            }
        }
        Ok(Self { every: Grants::compile(&every), projects })
    }

    /// What a caller may do in a project, and with everything in it.
    pub fn of(&self, project: &str, caller: &Caller) -> PermissionSet {
        let own = self.projects.get(project).map(|grants| grants.of(caller));
        self.every.of(caller).union(own.unwrap_or_default())
    }
}

fn read(path: &Path) -> Result<HashMap<String, Vec<Binding>>, PolicyError> {
    let wrong = |text: String| PolicyError(path.to_owned(), text);
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let written: Written = match extension {
        "json" => serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?,
        "yaml" | "yml" | "toml" => {
            let format = if extension == "toml" { FileFormat::Toml } else { FileFormat::Yaml };
            let values = config::Config::builder().add_source(File::from_str(&text, format)).build();
            values.and_then(config::Config::try_deserialize).map_err(|e| wrong(e.to_string()))?
        }
        _ => return Err(wrong("the name must end in .yaml, .yml, .toml or .json".into())),
    };
    let mut projects = HashMap::new();
    for (project, bindings) in written.projects {
        if project != EVERY_PROJECT && !is_project_id(&project) {
            return Err(wrong(format!("projects: {project:?} is neither a project id nor \"*\"")));
        }
        for binding in &bindings {
            // A misspelt name here would lock people out, or in.
            if PermissionSet::of_role(&binding.role).is_none() {
                let roles = "roles/pubsub.admin, .editor, .viewer, .publisher or .subscriber";
                return Err(wrong(format!("projects: {project}: role {:?}: must be {roles}", binding.role)));
            }
            if let Some(member) = binding.members.iter().find(|member| !is_member(member)) {
                return Err(wrong(format!("projects: {project}: {member:?}: must be {MEMBERS}")));
            }
        }
        let bindings = bindings.into_iter().map(|b| Binding { role: b.role, members: b.members }).collect();
        projects.insert(project, bindings);
    }
    Ok(projects)
}

/// The members a caller can be, as a text that follows "must be".
pub const MEMBERS: &str =
    "serviceAccount:EMAIL, user:EMAIL, group:NAME, domain:NAME, principal://..., allAuthenticatedUsers or allUsers";

/// True for a member that a caller can be.
pub fn is_member(text: &str) -> bool {
    matches!(text, "allUsers" | "allAuthenticatedUsers")
        || ["serviceAccount:", "user:", "group:", "domain:", "principal://"]
            .iter()
            .any(|prefix| text.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::model::access::Permission;

    fn load(name: &str, text: &str, admins: &[&str]) -> Result<ProjectPolicies, PolicyError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        ProjectPolicies::load(Some(&path), &admins.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    const YAML: &str = r#"
projects:
  Shop:
    - role: roles/pubsub.publisher
      members: ["serviceAccount:orders@shop.example"]
    - role: roles/pubsub.viewer
      members: ["serviceAccount:orders@shop.example", "group:dev"]
  "*":
    - role: roles/pubsub.subscriber
      members: [allAuthenticatedUsers]
"#;

    #[test]
    fn a_caller_holds_the_roles_of_its_members_in_that_project_and_in_every_one() {
        let json = r#"{"projects":{"Shop":[{"role":"roles/pubsub.publisher","members":["serviceAccount:orders@shop.example"]},
            {"role":"roles/pubsub.viewer","members":["serviceAccount:orders@shop.example"]}],
            "*":[{"role":"roles/pubsub.subscriber","members":["allAuthenticatedUsers"]}]}}"#;
        for policies in [load("p.yaml", YAML, &["user:root@example.com"]), load("p.json", json, &["user:root@example.com"])] {
            let policies = policies.unwrap();
            let orders = Caller::service_account("orders@shop.example", "k", 0);
            let held = policies.of("Shop", &orders);
            for permission in [Permission::TopicsPublish, Permission::TopicsGet, Permission::SubscriptionsConsume] {
                assert!(held.contains(permission));
            }
            assert!(!held.contains(Permission::TopicsCreate));
            assert!(!policies.of("shop", &orders).contains(Permission::TopicsPublish), "project ids are case-sensitive");
            assert!(policies.of("other", &orders).contains(Permission::SubscriptionsConsume));
            let root = Caller::subject("https://idp", "1", Some("root@example.com"), &[], 0);
            assert_eq!(policies.of("any", &root), PermissionSet::all());
            assert_eq!(policies.of("Shop", &Caller::anonymous()), PermissionSet::default());
        }
    }

    #[test]
    fn what_would_have_no_effect_is_refused_by_name() {
        for (text, named) in [
            ("projects: {shop: [{role: roles/pubsub.publihser, members: []}]}", "publihser"),
            ("projects: {shop: [{role: roles/pubsub.viewer, members: [orders@shop]}]}", "orders@shop"),
            ("projects: {a b: []}", "a b"),
            ("projects: {shop: [{role: roles/pubsub.viewer, members: [], condition: x}]}", "condition"),
            ("project: {}", "project"),
        ] {
            let error = load("p.yaml", text, &[]).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("p.yaml"), "{error}");
        }
        assert!(load("p.txt", "", &[]).is_err());
    }
}
