//! Clients that add plants and write down what they sent and what they were told.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};

use crate::checker::{Ledger, Sent, Told};
use crate::harness::{Answer, Client, Server};
use crate::random::Random;

/// The body of a plant.
pub fn body((id, name, tag): &Sent) -> String {
    match tag {
        Some(tag) => format!(r#"{{"id":{id},"name":"{name}","tag":"{tag}"}}"#),
        None => format!(r#"{{"id":{id},"name":"{name}"}}"#),
    }
}

pub fn told(answer: Option<&Answer>) -> Told {
    match answer {
        None => Told::Nothing,
        Some(answer) if answer.status == 200 => Told::Stored,
        Some(answer) => match answer.error() {
            40009 => Told::Taken,
            50300 => Told::Busy,
            50302 => Told::Full,
            50301 => Told::Nothing,
            other => panic!("an answer that no client should get: {other}"),
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
    /// Names are made so long, if they are not anyway.
    pub name_len: usize,
    pub seed: u64,
}

/// A load that is under way.
pub struct Running(Vec<JoinHandle<Ledger>>);

impl Load {
    pub fn start(self, address: SocketAddr, token: &str) -> Running {
        let client = |number| {
            let token = token.to_owned();
            thread::spawn(move || self.client(number, address, &token))
        };
        Running((0..self.clients).map(client).collect())
    }

    /// One client: mostly plants of its own, some that others want the id of, some that it sent before.
    fn client(self, number: u64, address: SocketAddr, token: &str) -> Ledger {
        let mut random = Random::new(self.seed ^ (number + 1).wrapping_mul(0x1234_5678_9abc_def1));
        let mut ledger = Ledger::default();
        let mut before: Vec<Sent> = Vec::new();
        let mut client = None;
        for count in 0..self.plants {
            let sent = match random.below(10) {
                0 if !before.is_empty() => before[random.index(before.len())].clone(),
                1 | 2 => self.plant(count, "raced for", number),
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
            let (answer, connection) = exchange(connection, token, &sent);
            let cut = answer.is_none() && kept;
            ledger.note(
                sent,
                if cut {
                    Told::Cut
                } else {
                    told(answer.as_ref())
                },
            );
            if answer.is_none() {
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

fn exchange(mut client: Client, token: &str, sent: &Sent) -> (Option<Answer>, Option<Client>) {
    client.send_as_far_as_it_goes(crate::harness::add_request(token, body(sent).as_bytes()));
    let answer = client.try_answer();
    let closes = answer
        .as_ref()
        .is_none_or(|answer| answer.header("connection") == Some("close"));
    (answer, (!closes).then_some(client))
}

impl Running {
    /// Waits for every client to end by itself.
    pub fn finish(self) -> Ledger {
        let mut all = Ledger::default();
        for client in self.0 {
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
        let answer = client.add(&token, body(&sent).as_bytes());
        let told = told(Some(&answer));
        if !matches!(told, Told::Stored | Told::Taken) {
            wrong.push(format!("wrong: takes no adds: {sent:?}: {answer:?}"));
        }
        ledger.note(sent, told);
    }
    wrong
}
