//! The name in a client's certificate.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// DER tags of a certificate's subject.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_IDENTIFIER: u8 = 0x06;
/// Kinds of text in ASCII or UTF-8: UTF8String, PrintableString and IA5String.
const TEXTS: [u8; 3] = [0x0c, 0x13, 0x16];
/// 2.5.4.3, the common name.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// What a verified client certificate calls its holder: its first URI (as in SPIFFE), otherwise the common name of its
/// subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerName(pub String);

impl PeerName {
    /// Reads the name of a certificate; none when it has none that is text.
    pub fn of(certificate: &CertificateDer<'_>) -> Option<Self> {
        let certificate = EndEntityCert::try_from(certificate).ok()?;
        let uri = certificate.valid_uri_names().next().map(str::to_owned);
        let name = uri.or_else(|| common_name(certificate.subject()))?;
        (!name.is_empty() && !name.contains(char::is_control)).then_some(Self(name))
    }
}

/// The last common name of a subject, without the subject's own frame.
fn common_name(mut subject: &[u8]) -> Option<String> {
    let mut found = None;
    while !subject.is_empty() {
        let (mut set, rest) = value(subject, SET)?;
        subject = rest;
        while !set.is_empty() {
            let (pair, rest) = value(set, SEQUENCE)?;
            set = rest;
            let (kind, text) = value(pair, OBJECT_IDENTIFIER)?;
            if kind == COMMON_NAME {
                let tag = *text.first()?;
                let (text, _) = value(text, tag).filter(|_| TEXTS.contains(&tag))?;
                found = Some(String::from_utf8(text.to_vec()).ok()?);
            }
        }
    }
    found
}

/// Splits off one DER value of a kind: its content and what follows.
fn value(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // A subject is far smaller than lengths of more than two bytes can say.
        0x81 | 0x82 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (bytes.iter().fold(0, |length, &byte| length << 8 | usize::from(byte)), rest)
        }
        _ => return None,
    };
    if found == tag { rest.split_at_checked(length) } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn name(common_name: Option<&str>, uri: Option<&str>) -> Option<String> {
        let mut params = CertificateParams::new(vec!["host.example".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "Shop");
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        if let Some(uri) = uri {
            params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
        }
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        PeerName::of(certificate.der()).map(|name| name.0)
    }

    #[test]
    fn a_uri_names_the_holder_and_otherwise_the_common_name() {
        assert_eq!(name(Some("orders"), None).as_deref(), Some("orders"));
        assert_eq!(name(Some("Bücher"), None).as_deref(), Some("Bücher"));
        assert_eq!(name(Some(&"x".repeat(200)), None).unwrap().len(), 200);
        let uri = "spiffe://shop/ns/a/sa/orders";
        assert_eq!(name(Some("orders"), Some(uri)).as_deref(), Some(uri));
        assert_eq!(name(None, None), None);
    }

    #[test]
    fn a_damaged_subject_has_no_name() {
        for subject in [&[SET][..], &[SET, 5, 0], &[SET, 0x84, 1, 1, 1, 1], &[SEQUENCE, 0], &[SET, 2, SEQUENCE, 9]] {
            assert_eq!(common_name(subject), None, "{subject:?}");
        }
    }
}
