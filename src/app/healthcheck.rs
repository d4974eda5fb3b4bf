//! `landline healthcheck`: asks a running server over gRPC, for container probes.

use std::{net::IpAddr, time::Duration};

use tonic::transport::Endpoint;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use super::{Error, cli::Healthcheck};
use crate::settings::Settings;

/// Prints the status.
///
/// # Errors
/// [`Error::Unhealthy`] when the server can't be reached in time or does not serve.
pub fn run(check: &Healthcheck, settings: &Settings) -> Result<(), Error> {
    let address = check.address.clone().unwrap_or_else(|| local_address(settings));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::System)?;
    let limit = Duration::from_secs(check.timeout_seconds);
    let status = runtime.block_on(async { tokio::time::timeout(limit, ask(&address)).await });
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

async fn ask(address: &str) -> Result<ServingStatus, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|e| format!("not an address: {e}"))?;
    let channel = endpoint.connect().await.map_err(|e| causes(&e))?;
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
