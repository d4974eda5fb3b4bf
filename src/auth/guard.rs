//! May this caller do that? Answered from the project's policy in the configuration and the resource's own in the broker.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::{
    Authenticator, Caller, Mode, Options, ProjectPolicies,
    limits::{Exceeded, Meter},
    policy::Grants,
};
use crate::{
    broker::Event,
    connector::{Connector, Error},
    model::{
        NameError,
        access::{Permission, PermissionSet},
        names::is_project_id,
    },
};

/// Resource policies remembered; beyond it all are forgotten and read again.
const MAX_REMEMBERED: usize = 100_000;
/// A remembered policy is read again after this long, in case an event of another node was lost.
const MAX_AGE: Duration = Duration::from_secs(60);
/// Different refusals that audit mode logs between two of these times; the others are counted.
const AUDIT_INTERVAL: Duration = Duration::from_secs(60);
const AUDIT_LINES: usize = 100;

/// Why a call is not carried out.
#[derive(Debug)]
pub enum Refusal {
    /// It has no credentials, or they are no longer good.
    Unauthenticated,
    /// The caller lacks a permission on a resource, which may not even exist.
    Denied(Permission, String),
    /// A resource whose project can't be told.
    Name(NameError),
    /// A limit of the project is reached.
    Exceeded(Exceeded),
    /// The resource's policy could not be read.
    Failed(Error),
}

/// A permission that a call needs on a resource, by its full name; `projects/{id}` for the project itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    pub permission: Permission,
    pub resource: String,
}

/// Decides; one per process, shared by all services.
pub struct Guard {
    mode: Mode,
    authenticator: Arc<Authenticator>,
    projects: RwLock<Arc<ProjectPolicies>>,
    connector: Arc<Connector>,
    remembered: RwLock<Remembered>,
    /// What audit mode logged lately, and since when.
    audited: Mutex<(Option<Instant>, HashSet<String>)>,
    meter: Meter,
}

/// Policies of resources by full name. The generation counts what was forgotten, so that a read that began before a change
/// leaves nothing behind after it.
#[derive(Default)]
struct Remembered {
    grants: HashMap<String, (Arc<Grants>, Instant)>,
    generation: u64,
}

impl Guard {
    /// Must be called on a tokio runtime, where it follows the broker's events.
    pub fn new(
        options: &Options,
        authenticator: Arc<Authenticator>,
        projects: ProjectPolicies,
        connector: Arc<Connector>,
    ) -> Arc<Self> {
        let events = connector.broker().events();
        let guard = Arc::new(Self {
            mode: options.mode(),
            authenticator,
            projects: RwLock::new(Arc::new(projects)),
            meter: Meter::new(options.limits.clone(), connector.clone()),
            connector,
            remembered: RwLock::default(),
            audited: Mutex::default(),
        });
        if guard.mode != Mode::Off {
            tokio::spawn(follow(Arc::downgrade(&guard), events));
        }
        guard
    }

    /// A guard that lets everything pass. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// When the machine's trusted certificates can't be read.
    pub fn off(connector: Arc<Connector>) -> Result<Arc<Self>, String> {
        let options = Options::default();
        let authenticator = Arc::new(Authenticator::open(&options, "")?);
        Ok(Self::new(&options, authenticator, ProjectPolicies::default(), connector))
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Takes over changed policies of projects.
    pub fn replace_projects(&self, projects: ProjectPolicies) {
        *self.projects.write() = Arc::new(projects);
    }

    /// The part of what a call needs that its project's policy does not give. `ask` is called with what the call needs.
    ///
    /// # Errors
    /// [`Refusal::Name`].
    pub fn missing(&self, caller: &Caller, ask: impl FnOnce(&mut dyn FnMut(Permission, &str))) -> Result<Vec<Need>, Refusal> {
        let projects = self.projects.read().clone();
        let mut missing = Vec::new();
        let mut wrong = None;
        ask(&mut |permission, resource| match project(resource) {
            Some(project) if projects.of(project, caller).contains(permission) => {}
            Some(_) => missing.push(Need { permission, resource: resource.to_owned() }),
            None => wrong = Some(NameError::new(resource)),
        });
        match wrong {
            Some(error) => Err(Refusal::Name(error)),
            None => Ok(missing),
        }
    }

    /// Looks for what is missing in the policies of the resources themselves.
    ///
    /// # Errors
    /// [`Refusal::Denied`], in audit mode only logged and counted; [`Refusal::Unauthenticated`]; [`Refusal::Failed`].
    pub async fn settle(&self, caller: &Caller, missing: Vec<Need>) -> Result<(), Refusal> {
        if caller.is_anonymous() && self.mode == Mode::Enforce {
            return Err(Refusal::Unauthenticated);
        }
        for need in missing {
            let held = self.grants(&need.resource).await.map_err(Refusal::Failed)?.of(caller);
            if held.contains(need.permission) {
                continue;
            }
            self.authenticator.count_denied();
            if self.mode == Mode::Enforce {
                return Err(Refusal::Denied(need.permission, need.resource));
            }
            self.audit(caller, &need);
        }
        Ok(())
    }

    /// True while the credentials that a long call began with have not been taken back.
    pub fn is_good(&self, caller: &Caller) -> bool {
        self.authenticator.is_good(caller)
    }

    /// Everything a caller may do with a resource.
    ///
    /// # Errors
    /// When its policy can't be read.
    pub async fn held(&self, caller: &Caller, resource: &str) -> Result<PermissionSet, Error> {
        let projects = self.projects.read().clone();
        let inherited = project(resource).map(|project| projects.of(project, caller)).unwrap_or_default();
        Ok(inherited.union(self.grants(resource).await?.of(caller)))
    }

    /// The resource's policy has been changed.
    pub fn forget(&self, resource: &str) {
        let mut remembered = self.remembered.write();
        remembered.generation += 1;
        remembered.grants.remove(resource);
    }

    fn forget_all(&self) {
        let mut remembered = self.remembered.write();
        remembered.generation += 1;
        remembered.grants.clear();
    }

    /// The policy of a resource; an empty one for a project, and for what does not exist.
    async fn grants(&self, resource: &str) -> Result<Arc<Grants>, Error> {
        if resource.split('/').count() != 4 {
            return Ok(Arc::default());
        }
        let generation = {
            let remembered = self.remembered.read();
            match remembered.grants.get(resource) {
                Some((grants, at)) if at.elapsed() < MAX_AGE => return Ok(grants.clone()),
                _ => remembered.generation,
            }
        };
        let grants = match self.connector.get_policy(resource).await {
            Ok((policy, _)) => Arc::new(Grants::compile(&policy.bindings)),
            Err(Error::NotFound(_) | Error::Name(_)) => Arc::default(),
            Err(error) => return Err(error),
        };
        let mut remembered = self.remembered.write();
        if remembered.generation == generation {
            if remembered.grants.len() >= MAX_REMEMBERED {
                remembered.grants.clear();
            }
            remembered.grants.insert(resource.to_owned(), (grants.clone(), Instant::now()));
        }
        Ok(grants)
    }

    fn audit(&self, caller: &Caller, need: &Need) {
        let text = format!("{caller} {} {}", need.permission.name(), need.resource);
        let mut audited = self.audited.lock();
        if audited.0.is_none_or(|since| since.elapsed() > AUDIT_INTERVAL) {
            *audited = (Some(Instant::now()), HashSet::new());
        }
        if audited.1.len() < AUDIT_LINES && audited.1.insert(text) {
            let (permission, resource) = (need.permission.name(), &need.resource);
            tracing::warn!(%caller, permission, resource, "audit: enforce would deny this");
        }
    }
}

/// The project of a resource's full name.
pub(super) fn project(resource: &str) -> Option<&str> {
    let project = resource.strip_prefix("projects/")?.split('/').next()?;
    is_project_id(project).then_some(project)
}

/// Forgets the policies of what changed, until the broker or the guard is gone.
async fn follow(guard: Weak<Guard>, mut events: Receiver<Event>) {
    loop {
        let event = match events.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(_)) => Event::Reset,
            Err(RecvError::Closed) => return,
        };
        let Some(guard) = guard.upgrade() else { return };
        match event {
            // A policy has the name of its resource, and goes with it.
            Event::RecordChanged { name, .. } => guard.forget(&name),
            Event::DeadLetters(_) => {}
            Event::Reset => guard.forget_all(),
        }
    }
}
