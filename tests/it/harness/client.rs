//! A raw HTTP client: sends exact bytes and reads one response at a time.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;
use socket2::{Domain, Socket, Type};

use super::transport::{Received, Transport, received, requests_sent, transport};
use super::{HANG, PATIENCE};

/// One connection.
pub struct Client {
    stream: BufReader<TcpStream>,
}

/// A complete response.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Client {
    /// The body of a response of any server, without TRANSPORT; none if there is no complete response in time.
    pub fn get(address: SocketAddr, path: &str, timeout: Duration) -> Option<String> {
        let mut stream = TcpStream::connect_timeout(&address, timeout).ok()?;
        stream.set_read_timeout(Some(timeout)).ok()?;
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut response = String::new();
        stream.read_to_string(&mut response).ok()?;
        let (_, body) = response.split_once("\r\n\r\n")?;
        Some(body.to_owned())
    }

    pub fn connect(address: SocketAddr) -> Self {
        Self::try_connect(address).expect("a connection")
    }

    /// Connects from an address of this machine, such as 127.0.0.2.
    pub fn connect_from(source: [u8; 4], address: SocketAddr) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let source = SocketAddr::from((source, 0)).into();
        socket.bind(&source).expect("an address of this machine");
        let connected = socket.connect_timeout(&address.into(), PATIENCE);
        connected.expect("a connection");
        Self::new(socket.into()).expect("a connection")
    }

    pub fn try_connect(address: SocketAddr) -> std::io::Result<Self> {
        Self::new(TcpStream::connect_timeout(&address, PATIENCE)?)
    }

    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::new(stream),
        })
    }

    /// Sends these bytes and nothing else.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream
            .get_mut()
            .write_all(bytes.as_ref())
            .expect("the server listens");
    }

    /// Sends as many of these bytes as possible to a server that may close the connection.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.get_mut().write_all(bytes.as_ref());
    }

    /// Closes the sending side of the connection.
    pub fn finish(&mut self) {
        // The server may have closed it.
        let _ = self.stream.get_mut().shutdown(Shutdown::Write);
    }

    /// Sends a request to add a plant.
    pub fn send_add(&mut self, token: &str, body: &[u8]) {
        self.send(add_request(token, body));
    }

    /// Adds a plant.
    pub fn add(&mut self, token: &str, body: &[u8]) -> Response {
        self.send_add(token, body);
        self.response()
    }

    /// Sends a request with these header lines and without a body.
    pub fn request(&mut self, method_and_path: &str, headers: &str) -> Response {
        self.send(format!(
            "{method_and_path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
        ));
        self.response()
    }

    pub fn response(&mut self) -> Response {
        self.try_response().expect("a response")
    }

    /// The next response; none if the server closes the connection.
    pub fn try_response(&mut self) -> Option<Response> {
        let line = self.line()?;
        let status = line.split(' ').nth(1)?.parse().expect("a status");
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                assert_eq!(line, "\r\n", "headers are truncated");
                break;
            };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        let mut response = Response {
            status,
            headers,
            body: String::new(),
        };
        let length: u64 = response
            .header("content-length")
            .map_or(0, |n| n.parse().expect("a length"));
        let read = self
            .stream
            .by_ref()
            .take(length)
            .read_to_string(&mut response.body);
        // A server that is killed may have sent a part of it.
        (read.ok() == usize::try_from(length).ok()).then_some(response)
    }

    /// How much a bridge has received for this client; none without a bridge.
    pub fn received(&self) -> Option<Received> {
        received(self.stream.get_ref().local_addr().ok()?)
    }

    /// How many of its requests a bridge has sent to the server; none without HTTP/2.
    pub fn requests_sent(&self) -> Option<u64> {
        requests_sent(self.stream.get_ref().local_addr().ok()?)
    }

    /// The next line; none if the server closes the connection. Panics on a timeout.
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.stream.read_line(&mut line) {
            Ok(_) => Some(line),
            Err(error) => {
                let silent = [ErrorKind::WouldBlock, ErrorKind::TimedOut];
                assert!(!silent.contains(&error.kind()), "{HANG}: a response");
                None
            }
        }
    }

    /// Everything until the server closes the connection, or resets it because it has not read everything.
    pub fn everything(&mut self) -> String {
        let mut bytes = Vec::new();
        if let Err(error) = self.stream.read_to_end(&mut bytes) {
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{HANG}");
        }
        String::from_utf8(bytes).expect("text")
    }

    /// The same for what may not be text.
    pub fn everything_as_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let _ = self.stream.read_to_end(&mut bytes);
        bytes
    }

    /// Whether for this long nothing arrives and the connection stays open.
    pub fn is_silent_for(&mut self, time: Duration) -> bool {
        let stream = self.stream.get_ref();
        stream.set_read_timeout(Some(time)).expect("a socket");
        let silent = stream.peek(&mut [0]).is_err();
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        silent
    }

    /// Whether the server closes the connection without sending anything.
    pub fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(bytes) => bytes == 0,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

/// The bytes of a request to add a plant.
pub fn add_request(token: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /plants HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(header, _)| header == name);
        found.next().map(|(_, value)| value.as_str())
    }

    /// Whether it closes the connection. HTTP/2 has no header for that.
    pub fn is_last(&self) -> bool {
        transport() == Transport::Http2 || self.header("connection") == Some("close")
    }

    pub fn json(&self) -> Value {
        assert_eq!(
            self.header("content-type"),
            Some("application/json"),
            "{self:?}"
        );
        serde_json::from_str(&self.body).expect("JSON")
    }

    /// The error code, after checking what all error responses have in common.
    pub fn error(&self) -> u64 {
        let body = self.json();
        let number = body["error"].as_u64().unwrap_or_else(|| panic!("{self:?}"));
        let message = body["message"].as_str().expect("a message");
        assert!(message.ends_with('.') && message.len() > 10, "{message}");
        assert_eq!(body.as_object().map(serde_json::Map::len), Some(2));
        assert_eq!(u64::from(self.status), number / 100);
        assert!(self.header("x-request-id").is_some(), "{self:?}");
        let date = self.header("date").unwrap_or_default();
        assert!(date.len() == 29 && date.ends_with(" GMT"), "{self:?}");
        number
    }

    pub fn message(&self) -> String {
        self.json()["message"]
            .as_str()
            .expect("a message")
            .to_owned()
    }
}
