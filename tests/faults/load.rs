//! Clients that add plants and write down what they sent and what they were told.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crate::checker::{Ledger, Sent, Told};
use crate::harness::{Client, Response, Server};
use crate::random::Random;

/// The body of a plant.
pub fn body((id, name, tag): &Sent) -> String {
    match tag {
        Some(tag) => format!(r#"{{"id":{id},"name":"{name}","tag":"{tag}"}}"#),
        None => format!(r#"{{"id":{id},"name":"{name}"}}"#),
    }
}

pub fn told(response: Option<&Response>) -> Told {
    match response {
        None => Told::Nothing,
        Some(response) if response.status == 200 => Told::Stored,
        Some(response) => match response.error() {
            40009 => Told::Taken,
            50300 | 50303 => Told::Busy,
            50302 => Told::Full,
            50301 => Told::Nothing,
            other => panic!("a response that no client should get: {other}"),
        },
    }
}

/// What a load does.
#[derive(Clone, Copy, Default)]
pub struct Load {
    pub clients: u64,
    /// Each client ends after so many plants, or when the service is gone.
    pub plants: u64,
    /// Ids start here, so that runs on one store do not meet.
    pub first_id: i64,
    /// Clients are counted from here, so that those of several nodes race for ids with different plants.
    pub first_client: u64,
    /// If there is a number, all clients want one of so few ids.
    pub ids: Option<u64>,
    /// Names are made so long, if they are not anyway.
    pub name_len: usize,
    /// There is a load balancer in between: it has errors of its own, and who is hung up on comes again.
    pub balanced: bool,
    pub seed: u64,
}

/// A load that is under way.
pub struct Running {
    clients: Vec<JoinHandle<Ledger>>,
    progress: Arc<Progress>,
}

/// What can be seen of it from outside.
#[derive(Default)]
struct Progress {
    has_ended: AtomicBool,
    /// When clients were told that something is stored.
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

    /// One client: mostly plants of its own, some that others want the id of, some that it sent before.
    fn client(self, number: u64, address: SocketAddr, token: &str, progress: &Progress) -> Ledger {
        let mut random = Random::new(self.seed ^ (number + 1).wrapping_mul(0x1234_5678_9abc_def1));
        let mut ledger = Ledger::default();
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
                break; // the service is gone
            };
            let (response, connection) = exchange(connection, token, &sent);
            let told = match &response {
                None if kept => Told::Cut,
                Some(response) if self.balanced && is_of_a_balancer(response) => Told::Nothing,
                response => told(response.as_ref()),
            };
            if told == Told::Stored {
                progress
                    .stored
                    .lock()
                    .expect("no panic")
                    .push(Instant::now());
            }
            ledger.note(sent, told);
            if response.is_none() && !self.balanced {
                break;
            }
            client = connection;
        }
        ledger
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

/// No node was there to ask: nothing was stored, but nobody says so.
fn is_of_a_balancer(response: &Response) -> bool {
    response.status == 503 && response.header("content-type") == Some("text/html")
}

fn exchange(mut client: Client, token: &str, sent: &Sent) -> (Option<Response>, Option<Client>) {
    client.send_as_far_as_it_goes(crate::harness::add_request(token, body(sent).as_bytes()));
    let response = client.try_response();
    let closes = response
        .as_ref()
        .is_none_or(|response| response.header("connection") == Some("close"));
    (response, (!closes).then_some(client))
}

impl Running {
    /// When clients were told that something is stored, so far.
    pub fn stored(&self) -> Vec<Instant> {
        self.progress.stored.lock().expect("no panic").clone()
    }

    /// Has every client end after the response that it waits for.
    pub fn stop(self) -> Ledger {
        self.progress.has_ended.store(true, Ordering::Relaxed);
        self.finish()
    }

    /// Waits for every client to end by itself.
    pub fn finish(self) -> Ledger {
        let mut all = Ledger::default();
        for client in self.clients {
            let ledger = client.join();
            all.append(ledger.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        all
    }
}

/// Everything acknowledged is there, nothing else is, and what was not answered can be sent again.
pub fn after_restart(server: &Server, ledger: &mut Ledger) -> Vec<String> {
    let mut wrong = ledger.violations_in(&server.directory().join("plantstore.db"));
    let unanswered = ledger.unanswered().cloned().collect();
    wrong.extend(send_again(server, unanswered, ledger));
    wrong
}

/// Sends plants again, each of which must be taken, or told to be another's.
pub fn send_again(server: &Server, plants: Vec<Sent>, ledger: &mut Ledger) -> Vec<String> {
    let token = server.token();
    let mut client = server.connect();
    let mut wrong = Vec::new();
    for sent in plants {
        let response = client.add(&token, body(&sent).as_bytes());
        let told = told(Some(&response));
        if !matches!(told, Told::Stored | Told::Taken) {
            wrong.push(format!("wrong: takes no adds: {sent:?}: {response:?}"));
        }
        ledger.note(sent, told);
    }
    wrong
}
