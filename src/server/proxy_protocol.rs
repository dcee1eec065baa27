//! The PROXY protocol, version 2: a proxy says at the start of a connection who its client is. Parsed here because the crates that
//! do so also parse version 1 and all extensions, of which nothing is needed.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt};

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";

/// Version 2 and a command in one byte.
const LOCAL: u8 = 0x20;
const PROXY: u8 = 0x21;

/// Addresses and protocol in one byte.
const TCP_OVER_IPV4: u8 = 0x11;
const TCP_OVER_IPV6: u8 = 0x21;

/// More than any proxy sends.
const LEN_MAX: usize = 1024;

/// Reads the header, and nothing beyond it. None if the proxy itself is the client, such as for a health check.
pub(super) async fn read_client(
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<IpAddr>> {
    let invalid = |problem: &str| Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    let (mut signature, mut head) = ([0; 12], [0; 4]);
    stream.read_exact(&mut signature).await?;
    if signature != SIGNATURE {
        return invalid("the connection does not start with the PROXY protocol, version 2");
    }
    stream.read_exact(&mut head).await?;
    let [command, family, high, low] = head;
    let len = usize::from(u16::from_be_bytes([high, low]));
    if len > LEN_MAX {
        return invalid("the header is too long");
    }
    let mut addresses = vec![0; len];
    stream.read_exact(&mut addresses).await?;
    match (command, family) {
        (LOCAL, _) => Ok(None),
        (PROXY, TCP_OVER_IPV4) => match addresses.first_chunk::<4>() {
            Some(source) if len >= 12 => Ok(Some(Ipv4Addr::from(*source).into())),
            _ => invalid("the addresses are incomplete"),
        },
        (PROXY, TCP_OVER_IPV6) => match addresses.first_chunk::<16>() {
            Some(source) if len >= 36 => Ok(Some(Ipv6Addr::from(*source).into())),
            _ => invalid("the addresses are incomplete"),
        },
        _ => invalid("the command or the address family is not supported"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(command: u8, family: u8, addresses: &[u8]) -> Vec<u8> {
        let len = u16::try_from(addresses.len()).expect("short").to_be_bytes();
        [&SIGNATURE[..], &[command, family], &len, addresses].concat()
    }

    async fn read(bytes: &[u8]) -> Result<Option<IpAddr>, io::ErrorKind> {
        let mut rest = [bytes, b"rest"].concat();
        let mut stream = &rest[..];
        let client = read_client(&mut stream)
            .await
            .map_err(|error| error.kind())?;
        let left = stream.len();
        rest.drain(..rest.len() - left);
        assert_eq!(rest, b"rest");
        Ok(client)
    }

    #[tokio::test]
    async fn the_source_is_the_client() {
        let v4 = [192, 0, 2, 9, 10, 0, 0, 1, 0, 80, 0, 81];
        let client = read(&header(PROXY, TCP_OVER_IPV4, &v4)).await;
        assert_eq!(client, Ok(Some([192, 0, 2, 9].into())));
        let mut v6 = [0; 40]; // with an extension
        v6[15] = 1;
        let client = read(&header(PROXY, TCP_OVER_IPV6, &v6)).await;
        assert_eq!(client, Ok(Some(Ipv6Addr::LOCALHOST.into())));
        assert_eq!(read(&header(LOCAL, 0, &[])).await, Ok(None));
    }

    #[tokio::test]
    async fn anything_else_is_an_error() {
        let invalid = Err(io::ErrorKind::InvalidData);
        for bad in [
            b"POST /plants HTTP/1.1\r\n\r\n".to_vec(),
            b"PROXY TCP4 192.0.2.9 10.0.0.1 80 81\r\n".to_vec(),
            header(0x11, TCP_OVER_IPV4, &[0; 12]),
            header(PROXY, 0x31, &[0; 216]),
            header(PROXY, TCP_OVER_IPV4, &[0; 11]),
            header(PROXY, TCP_OVER_IPV6, &[0; 35]),
            header(PROXY, TCP_OVER_IPV4, &[0; LEN_MAX + 1]),
        ] {
            assert_eq!(read(&bad).await, invalid, "{bad:?}");
        }
        assert!(read_client(&mut &SIGNATURE[..]).await.is_err());
    }
}
