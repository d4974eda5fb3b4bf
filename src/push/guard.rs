//! Keeps pushes away from addresses that they have no business with.
//!
//! Whoever may create a subscription may let this server send requests anywhere it can reach. Names are resolved here, the
//! addresses are checked, and the connection goes to a checked address, so that a name can't change its meaning in between.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// The metadata services of clouds that are not at a link-local address.
const METADATA: [IpAddr; 2] =
    [IpAddr::V6(Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x0254)), IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200))];

/// Which addresses pushes may go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    /// Loopback and private networks as well as public ones.
    pub private_networks: bool,
}

/// Why an endpoint is not asked.
#[derive(Debug, thiserror::Error)]
#[error("{0} has no address that pushes may go to")]
pub struct Refused(String);

/// Whom an address belongs to.
#[derive(Debug, PartialEq, Eq)]
enum Reach {
    Public,
    /// This machine, or a network of its owner.
    Private,
    /// No endpoint at all: link-local addresses, which cloud metadata services have, multicast, and what is set aside.
    Never,
}

fn reach(address: IpAddr) -> Reach {
    if METADATA.contains(&address) {
        return Reach::Never;
    }
    match address {
        IpAddr::V4(v4) => reach_v4(v4),
        IpAddr::V6(v6) => reach_v6(v6),
    }
}

fn reach_v4(address: Ipv4Addr) -> Reach {
    let [a, b, c, _] = address.octets();
    let set_aside = a == 0 || a >= 240 || (a, b, c) == (192, 0, 0);
    if set_aside || address.is_link_local() || address.is_multicast() {
        return Reach::Never;
    }
    // Between carrier and customer, and for measurements.
    let shared = a == 100 && (64..128).contains(&b) || a == 198 && (18..20).contains(&b);
    if address.is_loopback() || address.is_private() || shared { Reach::Private } else { Reach::Public }
}

fn reach_v6(address: Ipv6Addr) -> Reach {
    let [a, b, c, d, e, f, g, h] = address.segments();
    let v4 = |high: u16, low: u16| reach_v4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)));
    match (a, b) {
        _ if address.is_loopback() => Reach::Private,
        _ if address.is_unspecified() || address.is_multicast() => Reach::Never,
        // fe80::/10
        (0xfe80..=0xfebf, _) => Reach::Never,
        // fc00::/7, and fec0::/10, which once was the same.
        (0xfc00..=0xfdff | 0xfec0..=0xfeff, _) => Reach::Private,
        // An IPv4 address within: as it is, or for translation.
        (0, 0) if (c, d, e) == (0, 0, 0) && (f == 0xffff || f == 0) => v4(g, h),
        (0x64, 0xff9b) => v4(g, h),
        (0x2002, high) => v4(high, c),
        // Teredo ends at machines behind other gateways.
        (0x2001, 0) => Reach::Never,
        _ => Reach::Public,
    }
}

impl Guard {
    /// Whether pushes may go to an address.
    pub fn allows(self, address: IpAddr) -> bool {
        match reach(address) {
            Reach::Public => true,
            Reach::Private => self.private_networks,
            Reach::Never => false,
        }
    }

    /// Checks an endpoint that names an address. One that names a host is checked when the host is resolved.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn check(self, url: &reqwest::Url) -> Result<(), Refused> {
        let host = url.host_str().unwrap_or_default();
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        match address {
            Ok(address) if !self.allows(address) => Err(Refused(host.to_owned())),
            _ => Ok(()),
        }
    }
}

impl Resolve for Guard {
    fn resolve(&self, name: Name) -> Resolving {
        let guard = *self;
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let allowed: Vec<SocketAddr> = found.filter(|address| guard.allows(address.ip())).collect();
            if allowed.is_empty() {
                return Err(Refused(name.as_str().to_owned()).into());
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Reach {
        reach(text.parse().unwrap())
    }

    #[test]
    fn addresses_are_told_apart() {
        for public in ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::808:808"] {
            assert_eq!(of(public), Reach::Public, "{public}");
        }
        for private in [
            "127.0.0.1",
            "127.9.9.9",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.0.1",
            "100.64.0.1",
            "198.18.0.1",
            "::1",
            "fd00::1",
            "fec0::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2002:7f00:1::1",
        ] {
            assert_eq!(of(private), Reach::Private, "{private}");
        }
        for never in [
            "169.254.169.254",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "255.255.255.255",
            "240.0.0.1",
            "::",
            "fe80::1",
            "ff02::1",
            "fd00:ec2::254",
            "100.100.100.200",
            "::ffff:169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::",
            "2001::1",
        ] {
            assert_eq!(of(never), Reach::Never, "{never}");
        }
    }

    #[test]
    fn addresses_in_endpoints_are_checked_however_they_are_written() {
        let (open, closed) = (Guard { private_networks: true }, Guard { private_networks: false });
        for local in
            ["http://127.0.0.1:1/", "http://2130706433/", "http://0x7f.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/"]
        {
            let url = reqwest::Url::parse(local).unwrap();
            assert!(open.check(&url).is_ok() && closed.check(&url).is_err(), "{local}");
        }
        for metadata in ["http://169.254.169.254/latest", "http://[fe80::1]/", "http://2852039166/"] {
            let url = reqwest::Url::parse(metadata).unwrap();
            assert!(open.check(&url).is_err(), "{metadata}");
        }
        assert!(closed.check(&reqwest::Url::parse("https://example.com/").unwrap()).is_ok());
    }

    #[tokio::test]
    async fn a_name_that_means_this_machine_is_resolved_only_where_that_is_allowed() {
        let resolve = async |private_networks| Guard { private_networks }.resolve("localhost".parse().unwrap()).await.is_ok();
        assert!(resolve(true).await);
        assert!(!resolve(false).await);
    }
}
