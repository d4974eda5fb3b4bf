//! Puts authentication and authorization together, and follows their files.

use std::{path::PathBuf, sync::Arc};

use super::Error;
use crate::{
    admin::{Console, ConsoleOptions},
    api::grpc::Gate,
    auth::{self, Authenticator, Guard, Mode, Options, ProjectPolicies},
    connector::Connector,
    settings::Settings,
    tls::Watched,
};

/// What there is before the broker is ready.
pub struct Security {
    pub authenticator: Arc<Authenticator>,
    options: Options,
}

impl Security {
    /// Reads the files. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub fn open(settings: &Settings) -> Result<Self, Error> {
        let options = Options { keys_file: settings.keys_file(), ..settings.auth.clone() };
        let authenticator = Authenticator::open(&options, &settings.advertised_endpoint).map_err(Error::Auth)?;
        let authenticator = Arc::new(authenticator);
        projects(&options)?;
        let public = settings.bind.addresses.iter().any(|address| !address.to_canonical().is_loopback());
        if public && options.mode() != Mode::Off && !settings.tls.is_set() {
            tracing::warn!("the port does not speak TLS: tokens can be read on the way unless something in front of it does");
        }
        if options.mode() != Mode::Off && !options.keys_file.as_os_str().is_empty() {
            let mut watched = Watched::new([options.keys_file.clone()]);
            let changed = async move || watched.changed().await;
            tokio::spawn(auth::follow_keys(authenticator.clone(), options.keys_file.clone(), changed));
        }
        Ok(Self { authenticator, options })
    }

    /// The gate in front of the use cases.
    ///
    /// # Errors
    /// When the policies can't be read any more.
    pub fn start(&self, connector: &Arc<Connector>) -> Result<Gate, Error> {
        self.authenticator.use_secret(connector.secret().as_bytes());
        let guard = Guard::new(&self.options, self.authenticator.clone(), projects(&self.options)?, connector.clone());
        if self.options.mode() != Mode::Off && !self.options.policy_file.as_os_str().is_empty() {
            tokio::spawn(follow_policies(self.options.clone(), guard.clone()));
        }
        Ok(Gate::new(guard))
    }
}

/// Opens the console, and follows the file of its password. Must be called on a tokio runtime.
///
/// # Errors
/// What is wrong with the file.
pub fn console(settings: &Settings) -> Result<Arc<Console>, Error> {
    let options = ConsoleOptions { password_file: settings.admin_password_file.clone(), hosts: settings.admin_hosts.clone() };
    let console = Arc::new(Console::open(&options).map_err(Error::Console)?);
    if !options.password_file.as_os_str().is_empty() {
        if let Some(address) = settings.admin.filter(|address| !address.ip().to_canonical().is_loopback()) {
            tracing::warn!(%address, "the admin address does not speak TLS: the console's password can be read on the way unless something in front of it does");
        }
        tokio::spawn(follow_password(options.password_file, console.clone()));
    }
    Ok(console)
}

/// Reads the console's password again whenever its file changes, for ever.
async fn follow_password(file: PathBuf, console: Arc<Console>) {
    let mut watched = Watched::new([file]);
    loop {
        watched.changed().await;
        match console.reread() {
            Ok(()) => tracing::info!("the console's password changed"),
            Err(error) => tracing::warn!(error, "the console's password can't be used; the former one stays in use"),
        }
    }
}

fn projects(options: &Options) -> Result<ProjectPolicies, Error> {
    let file = (!options.policy_file.as_os_str().is_empty()).then_some(options.policy_file.as_path());
    ProjectPolicies::load(file, &options.admins).map_err(|error| Error::Auth(error.to_string()))
}

/// Reads the policies of projects again whenever their file changes, for ever.
async fn follow_policies(options: Options, guard: Arc<Guard>) {
    let mut watched = Watched::new([PathBuf::from(&options.policy_file)]);
    loop {
        watched.changed().await;
        match projects(&options) {
            Ok(policies) => {
                guard.replace_projects(policies);
                tracing::info!("the policy file changed and is in use");
            }
            Err(error) => tracing::warn!(%error, "the policy file changed but can't be used; the former one stays in use"),
        }
    }
}
