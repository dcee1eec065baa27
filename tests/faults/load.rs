//! Load: clients that add plants and record what they sent and which response they got.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::checker::{History, Outcome, Sent};
use crate::harness::transport::Received;
use crate::harness::{Client, Response, Server};
use crate::random::Random;

/// The JSON body of a plant.
pub fn body((id, name, tag): &Sent) -> String {
    match tag {
        Some(tag) => format!(r#"{{"id":{id},"name":"{name}","tag":"{tag}"}}"#),
        None => format!(r#"{{"id":{id},"name":"{name}"}}"#),
    }
}

pub fn outcome_of(response: Option<&Response>) -> Outcome {
    match response {
        None => Outcome::Unknown,
        Some(response) if response.status == 200 => Outcome::Acknowledged,
        Some(response) => match response.error() {
            40009 => Outcome::Conflict,
            50300 | 50303 => Outcome::Busy,
            50302 => Outcome::Full,
            50301 => Outcome::Unknown,
            other => panic!("unexpected error {other}"),
        },
    }
}

/// Before a client tries a load balancer again that has no node, or is not there.
const RECONNECT_PAUSE: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Default)]
pub struct Load {
    pub clients: u64,
    /// Plants per client; a client stops earlier if the server is gone.
    pub plants: u64,
    /// The first id, so that runs on one store use different ids.
    pub first_id: i64,
    /// The number of the first client, so that clients of several nodes race for the same ids with different plants.
    pub first_client: u64,
    /// If set, all clients race for this many ids.
    pub ids: Option<u64>,
    /// The minimum length of names.
    pub name_len: usize,
    /// Through a load balancer, which has its own error responses; clients reconnect.
    pub balanced: bool,
    /// The load balancer sends a request to another node after an error, so an error response is only that of the last attempt.
    pub is_redispatched: bool,
    pub seed: u64,
}

/// A running load. Its clients end when it is dropped.
pub struct Running {
    clients: Vec<JoinHandle<History>>,
    progress: Arc<Progress>,
}

#[derive(Default)]
struct Progress {
    has_ended: AtomicBool,
    /// The times at which clients received a 200.
    stored: Mutex<Vec<Instant>>,
}

impl Load {
    pub fn start(self, address: SocketAddr, token: &str) -> Running {
        let progress = Arc::new(Progress::default());
        let client = |number| {
            let (token, progress) = (token.to_owned(), Arc::clone(&progress));
            thread::spawn(move || self.client(number, address, &token, &progress))
        };
        let numbers = self.first_client..self.first_client + self.clients;
        Running {
            clients: numbers.map(client).collect(),
            progress,
        }
    }

    /// One client: mostly plants with its own ids, some with ids that other clients use too, some retries.
    fn client(self, number: u64, address: SocketAddr, token: &str, progress: &Progress) -> History {
        let mut random = Random::new(self.seed ^ (number + 1).wrapping_mul(0x1234_5678_9abc_def1));
        let mut history = History::default();
        let mut before: Vec<Sent> = Vec::new();
        let mut client = None;
        for count in 0..self.plants {
            if progress.has_ended.load(Ordering::Relaxed) {
                break;
            }
            let sent = match (random.below(10), self.ids) {
                (_, Some(ids)) => self.plant(random.below(ids), "raced for", number),
                (0, _) if !before.is_empty() => before[random.index(before.len())].clone(),
                (1 | 2, _) => self.plant(count, "raced for", number),
                _ => self.plant((number + 1) * 1_000_000 + count, "alone", number),
            };
            before.push(sent.clone());
            let kept = client.is_some();
            let connection = client
                .take()
                .map_or_else(|| Client::try_connect(address), Ok);
            let Ok(connection) = connection else {
                if self.balanced {
                    thread::sleep(RECONNECT_PAUSE);
                    continue;
                }
                break; // the server is gone
            };
            let Exchange {
                response,
                received,
                is_unsent,
                connection,
            } = exchange(connection, token, &sent);
            if kept && is_unsent {
                history.note(sent, Outcome::Unprocessed);
                continue; // on another connection
            }
            let outcome = match &response {
                None if kept => Outcome::ConnectionLost,
                Some(response) if self.is_unknown(response) => Outcome::Unknown,
                response => outcome_of(response.as_ref()),
            };
            if outcome == Outcome::Acknowledged {
                progress
                    .stored
                    .lock()
                    .expect("no panic")
                    .push(Instant::now());
                if let Some(received) = received {
                    history.note_received(sent.clone(), received);
                }
            }
            history.note(sent, outcome);
            if response.is_none() && !self.balanced {
                break;
            }
            if self.balanced && response.is_some_and(|response| response.status == 503) {
                // The load balancer responds at once if it has no node.
                thread::sleep(RECONNECT_PAUSE);
            }
            client = connection;
        }
        history
    }

    /// Whether an error response of a load balancer leaves open what a node has done.
    fn is_unknown(self, response: &Response) -> bool {
        let is_of_balancer = response.header("content-type") == Some("text/html");
        self.balanced
            && (502..=504).contains(&response.status)
            && (is_of_balancer || self.is_redispatched)
    }

    fn plant(self, offset: u64, kind: &str, client: u64) -> Sent {
        let id = self.first_id + i64::try_from(offset).expect("small");
        let tag = offset.is_multiple_of(3).then(|| "tag".to_owned());
        let mut name = format!("{id} {kind} by {client}");
        let more = self.name_len.saturating_sub(name.len());
        name.extend(std::iter::repeat_n('.', more));
        (id, name, tag)
    }
}

struct Exchange {
    response: Option<Response>,
    /// Where the response ends in what the server has sent, if that is encrypted.
    received: Option<Received>,
    /// Whether the server had announced that it closes the connection before it read the request (HTTP/2).
    is_unsent: bool,
    /// None if the server closes it.
    connection: Option<Client>,
}

fn exchange(mut client: Client, token: &str, sent: &Sent) -> Exchange {
    let requests = client.requests_sent();
    client.try_send(crate::harness::add_request(token, body(sent).as_bytes()));
    let response = client.try_response();
    let received = client.received();
    let closes = response
        .as_ref()
        .is_none_or(|response| response.header("connection") == Some("close"));
    Exchange {
        is_unsent: response.is_none()
            && requests.is_some_and(|before| client.requests_sent() == Some(before)),
        response,
        received,
        connection: (!closes).then_some(client),
    }
}

impl Running {
    /// The times at which clients received a 200 so far.
    pub fn stored(&self) -> Vec<Instant> {
        self.progress.stored.lock().expect("no panic").clone()
    }

    /// Stops every client after the response that it is waiting for.
    pub fn stop(self) -> History {
        self.progress.has_ended.store(true, Ordering::Relaxed);
        self.finish()
    }

    /// Waits until every client has sent all its plants.
    pub fn finish(mut self) -> History {
        let mut all = History::default();
        for client in std::mem::take(&mut self.clients) {
            let history = client.join();
            all.append(history.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.progress.has_ended.store(true, Ordering::Relaxed);
    }
}

/// Checks the store after a restart, and sends every plant with an unknown outcome again.
pub fn after_restart(server: &Server, history: &mut History) -> Vec<String> {
    let mut wrong = history.violations_in(&server.directory().join("plantstore.db"));
    let unknown = history.unknown().cloned().collect();
    wrong.extend(send_again(server, unknown, history));
    wrong
}

/// How long a plant is sent again after a 503, which a busy machine may cause for a while after the fault.
const RETRY_TIMEOUT: Duration = Duration::from_secs(30);
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Sends plants again, as a client does; the last response to each has to be 200 or 40009.
pub fn send_again(server: &Server, plants: Vec<Sent>, history: &mut History) -> Vec<String> {
    let token = server.token();
    let mut client = server.connect();
    let mut wrong = Vec::new();
    for sent in plants {
        let deadline = Instant::now() + RETRY_TIMEOUT;
        let response = loop {
            let response = client.add(&token, body(&sent).as_bytes());
            if response.is_last() {
                client = server.connect();
            }
            if response.status != 503 || Instant::now() >= deadline {
                break response;
            }
            thread::sleep(RETRY_PAUSE);
        };
        let outcome = outcome_of(Some(&response));
        if !matches!(outcome, Outcome::Acknowledged | Outcome::Conflict) {
            wrong.push(format!("wrong: an add fails: {sent:?}: {response:?}"));
        }
        history.note(sent, outcome);
    }
    wrong
}
