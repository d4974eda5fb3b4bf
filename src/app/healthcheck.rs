//! `landline healthcheck`: asks a running server over gRPC, for container probes.

use std::{net::IpAddr, time::Duration};

use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::{Error, cli::Healthcheck};
use crate::{
    settings::Settings,
    tls::{Client, Trust},
};

/// Prints the status.
///
/// # Errors
/// [`Error::Unhealthy`] when the server can't be reached in time or does not serve.
pub fn run(check: &Healthcheck, settings: &Settings) -> Result<(), Error> {
    let address = check.address.clone().unwrap_or_else(|| local_address(settings));
    let client = client(check, settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    let limit = Duration::from_secs(check.timeout_seconds);
    let status = runtime.block_on(async { tokio::time::timeout(limit, ask(&address, client)).await });
    match status {
        Ok(Ok(ServingStatus::Serving)) => {
            println!("{address}: SERVING");
            Ok(())
        }
        Ok(Ok(other)) => Err(Error::Unhealthy(address, other.as_str_name().into())),
        Ok(Err(error)) => Err(Error::Unhealthy(address, error)),
        Err(_) => Err(Error::Unhealthy(address, format!("no answer within {} s", check.timeout_seconds))),
    }
}

/// The client's end of TLS, if it is spoken.
fn client(check: &Healthcheck, settings: &Settings) -> Result<Option<Client>, Error> {
    if !(check.tls || check.ca_file.is_some() || settings.tls.is_set()) {
        return Ok(None);
    }
    let trust = match &check.ca_file {
        Some(path) => Trust::Roots(path.clone()),
        None if settings.tls.is_set() => Trust::Exactly(settings.tls.certificate.clone()),
        None => Trust::System,
    };
    let identity = check.cert_file.as_deref().zip(check.key_file.as_deref());
    Ok(Some(Client::new(&trust, identity)?))
}

async fn connect(address: &str, client: Option<Client>) -> Result<Channel, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|e| format!("not an address: {e}"))?;
    let connected = match client {
        None => endpoint.connect().await,
        Some(client) => {
            let connector = tower::service_fn(move |address| {
                let client = client.clone();
                async move { client.connect(address).await }
            });
            endpoint.connect_with_connector(connector).await
        }
    };
    connected.map_err(|e| causes(&e))
}

async fn ask(address: &str, client: Option<Client>) -> Result<ServingStatus, String> {
    let channel = connect(address, client).await?;
    let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
    answer.map(|answer| answer.into_inner().status()).map_err(|status| status.message().to_owned())
}

/// An error with what caused it, where the last one says most.
fn causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Where a server with these settings is reached from the same machine.
fn local_address(settings: &Settings) -> String {
    let ip = match settings.bind.addresses.first() {
        Some(IpAddr::V4(ip)) if !ip.is_unspecified() => ip.to_string(),
        Some(IpAddr::V6(ip)) if !ip.is_unspecified() => format!("[{ip}]"),
        Some(IpAddr::V6(_)) => "[::1]".into(),
        _ => "127.0.0.1".into(),
    };
    format!("{ip}:{}", settings.port)
}
