//! Which client sends a request: the peer of the connection, or whom a trusted proxy names.

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

use hyper::HeaderMap;
use hyper::header::{FORWARDED, HeaderName, HeaderValue};
use ipnet::IpNet;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The other end of a connection: a client or a proxy.
pub struct Peer {
    address: Address,
    /// Whom the proxy has named at the start of the connection.
    proxied: OnceLock<Address>,
    pub(crate) is_trusted_proxy: bool,
}

struct Address {
    address: IpAddr,
    /// As it is logged.
    text: String,
}

impl Address {
    fn new(address: IpAddr) -> Self {
        let address = address.to_canonical();
        let text = address.to_string();
        Self { address, text }
    }
}

impl Peer {
    pub fn new(address: IpAddr, trusted_proxies: &[IpNet]) -> Self {
        let address = Address::new(address);
        Self {
            is_trusted_proxy: is_in(trusted_proxies, address.address),
            address,
            proxied: OnceLock::new(),
        }
    }

    /// Sets the client according to the PROXY protocol.
    pub(crate) fn set_proxied(&self, address: IpAddr) {
        let _ = self.proxied.set(Address::new(address));
    }

    pub(super) fn text(&self) -> &str {
        let address = self.proxied.get().unwrap_or(&self.address);
        &address.text
    }

    /// The address of the client that sent a request, also as text. Only a trusted proxy is asked.
    pub(crate) fn client(
        &self,
        headers: &HeaderMap,
        trusted_proxies: &[IpNet],
    ) -> (IpAddr, Cow<'_, str>) {
        let peer = self.proxied.get().unwrap_or(&self.address);
        if self.is_trusted_proxy
            && self.proxied.get().is_none()
            && let Some(address) = forwarded_for(headers, trusted_proxies)
        {
            return (address, address.to_string().into());
        }
        (peer.address, peer.text.as_str().into())
    }
}

fn is_in(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// The client according to `X-Forwarded-For` or `Forwarded`: the last address that is not a trusted proxy, because
/// everything before it may be invented by the client. A proxy sets one of the two headers and passes on the other as the
/// client has sent it: if both are present and disagree, neither is believed.
fn forwarded_for(headers: &HeaderMap, trusted_proxies: &[IpNet]) -> Option<IpAddr> {
    let last_untrusted = |hops: &mut dyn DoubleEndedIterator<Item = Option<IpAddr>>| {
        let mut nearest = None;
        while let Some(Some(hop)) = hops.next_back() {
            nearest = Some(hop);
            if !is_in(trusted_proxies, hop) {
                break;
            }
        }
        nearest
    };
    let lines = |name| headers.get_all(name).iter().map(HeaderValue::as_bytes);
    let listed: Vec<&[u8]> = lines(X_FORWARDED_FOR)
        .flat_map(|line| line.split(|byte| *byte == b','))
        .collect();
    let elements: Vec<&[u8]> = lines(FORWARDED)
        .flat_map(|line| split(line, b','))
        .collect();
    let by_list = last_untrusted(&mut listed.into_iter().map(node));
    let by_element = last_untrusted(&mut elements.into_iter().map(forwarded_element));
    match (by_list, by_element) {
        (Some(one), Some(other)) if one != other => None,
        (one, other) => one.or(other),
    }
}

/// The `for` parameter of an element of `Forwarded` (RFC 7239).
fn forwarded_element(element: &[u8]) -> Option<IpAddr> {
    let mut values = split(element, b';').into_iter().filter_map(|pair| {
        let (name, value) = pair.split_at(pair.iter().position(|byte| *byte == b'=')?);
        let is_for = name.trim_ascii().eq_ignore_ascii_case(b"for");
        is_for.then(|| &value[1..])
    });
    let value = values.next().filter(|_| values.next().is_none())?;
    node(value)
}

/// An address, with or without a port, brackets and quotes. None for a name such as `unknown`.
fn node(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?.trim();
    let text = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'))
        .unwrap_or(text);
    let bare = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'));
    let address = bare.unwrap_or(text).parse::<IpAddr>();
    let address = address.or_else(|_| text.parse::<SocketAddr>().map(|address| address.ip()));
    Some(address.ok()?.to_canonical())
}

/// Splits at a separator that is not within quotes.
fn split(text: &[u8], separator: u8) -> Vec<&[u8]> {
    let mut is_quoted = false;
    let mut is_escaped = false;
    text.split(|byte| {
        let was_escaped = std::mem::take(&mut is_escaped);
        match byte {
            b'\\' if is_quoted && !was_escaped => is_escaped = true,
            b'"' if !was_escaped => is_quoted = !is_quoted,
            _ => return *byte == separator && !is_quoted,
        }
        false
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(peer: &str, headers: &[(HeaderName, &str)]) -> String {
        let trusted = ["10.0.0.0/8", "fd00::/8"].map(|network| network.parse().expect("a network"));
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, value.parse().expect("a value"));
        }
        let peer = Peer::new(peer.parse().expect("an address"), &trusted);
        peer.client(&map, &trusted).1.into_owned()
    }

    #[test]
    fn the_headers_of_others_are_ignored() {
        for header in [X_FORWARDED_FOR, FORWARDED] {
            assert_eq!(
                client("192.0.2.1", &[(header, "for=192.0.2.9")]),
                "192.0.2.1"
            );
        }
        assert_eq!(client("::ffff:192.0.2.1", &[]), "192.0.2.1");
    }

    #[test]
    fn a_trusted_proxy_names_the_client() {
        for (list, expected) in [
            ("192.0.2.9", "192.0.2.9"),
            ("203.0.113.1, 192.0.2.9", "192.0.2.9"),
            ("203.0.113.1, 192.0.2.9, 10.0.0.2", "192.0.2.9"),
            ("192.0.2.9:4711", "192.0.2.9"),
            ("[2001:db8::1]:4711", "2001:db8::1"),
            ("2001:db8::1", "2001:db8::1"),
            ("::ffff:192.0.2.9", "192.0.2.9"),
            ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
            ("192.0.2.9, unknown", "10.0.0.1"),
            ("192.0.2.9, unknown, 10.0.0.2", "10.0.0.2"),
            ("", "10.0.0.1"),
        ] {
            assert_eq!(
                client("10.0.0.1", &[(X_FORWARDED_FOR, list)]),
                expected,
                "{list}"
            );
        }
        for (elements, expected) in [
            ("for=192.0.2.9", "192.0.2.9"),
            ("For=\"[2001:db8::1]:4711\";proto=https", "2001:db8::1"),
            ("for=203.0.113.1, for=192.0.2.9;by=10.0.0.1", "192.0.2.9"),
            ("for=192.0.2.9, for=\"10.0.0.2:80\"", "192.0.2.9"),
            ("for=\"a,for=203.0.113.1\", for=192.0.2.9", "192.0.2.9"),
            ("for=_hidden", "10.0.0.1"),
            ("for=192.0.2.9;for=192.0.2.8", "10.0.0.1"),
            ("by=192.0.2.9", "10.0.0.1"),
        ] {
            assert_eq!(
                client("10.0.0.1", &[(FORWARDED, elements)]),
                expected,
                "{elements}"
            );
        }
    }

    #[test]
    fn several_lines_are_one_list() {
        let lines = [
            (X_FORWARDED_FOR, "203.0.113.1"),
            (X_FORWARDED_FOR, "192.0.2.9"),
        ];
        assert_eq!(client("10.0.0.1", &lines), "192.0.2.9");
    }

    #[test]
    fn headers_that_disagree_are_not_believed() {
        let both = |other| [(X_FORWARDED_FOR, "192.0.2.9"), (FORWARDED, other)];
        assert_eq!(client("10.0.0.1", &both("for=192.0.2.9")), "192.0.2.9");
        assert_eq!(client("10.0.0.1", &both("for=192.0.2.8")), "10.0.0.1");
    }
}
