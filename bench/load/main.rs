//! The load generator: one thread, non-blocking, HTTP/1.1 with keep-alive and one request at a time on a connection, or HTTP/2 with
//! several (`--streams`). A *slot* is what has one request at a time: a connection, or one of the streams of an HTTP/2 connection.
//!
//! In the closed loop a slot sends its next request as soon as it has the response. In the open loop (`--rate`) requests have a
//! time at which they should be sent, and latency counts from then, however late a slot came free.
//! Before the measurement starts every slot has had one response. Prints one line of JSON.

mod connection;
mod http2;
mod requests;
mod transport;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use hdrhistogram::Histogram;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};
use serde_json::json;

use crate::connection::{Connection, Response};
use crate::requests::Requests;
use crate::transport::Tls;

const TIMER: Token = Token(usize::MAX);

/// The run ends if no response arrives for this long.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Parser)]
#[command(about = "Sends plants over HTTP and measures response times")]
struct Settings {
    #[arg(long)]
    address: SocketAddr,
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Use TLS 1.3; a PEM file with the certificate of the server, for `localhost`
    #[arg(long, value_name = "CERTIFICATE")]
    tls: Option<PathBuf>,
    /// Use HTTP/2 with this many requests at a time on each connection
    #[arg(long, requires = "tls")]
    streams: Option<usize>,
    /// Send for this long
    #[arg(long, required_unless_present = "requests")]
    seconds: Option<f64>,
    /// Send this many
    #[arg(long)]
    requests: Option<u64>,
    /// Open loop: this many a second, whatever the server does
    #[arg(long)]
    rate: Option<f64>,
    /// The first id; with --random, where to begin in the sequence of random ids
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Ids in no order, and none of them twice
    #[arg(long)]
    random: bool,
    #[arg(long, default_value = "POST")]
    method: String,
    #[arg(long, default_value = "/plants")]
    path: String,
    /// "Name: value", any number of times
    #[arg(long)]
    header: Vec<String>,
    /// A file with a bearer token on each line; they are used in turn
    #[arg(long)]
    tokens: Option<PathBuf>,
    /// Open loop: latency counts from the time when a request was sent, not when it should have been
    #[arg(long)]
    from_send: bool,
    /// A body with @id and @name in it; several are used in turn
    #[arg(long, required = true)]
    body: Vec<String>,
    /// The status of a successful response
    #[arg(long, default_value_t = 200)]
    expect: u16,
}

fn main() -> anyhow::Result<()> {
    let settings = Settings::parse();
    let mut load = Load::connect(&settings)?;
    load.run()?;
    let warm_requests = load.sent;
    let warm_good = load.good();

    load.start_the_clock(&settings)?;
    let cpu_before = cpu_time();
    load.run()?;
    let cpu = cpu_time().saturating_sub(cpu_before);
    let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
    let result = json!({
        "warm_requests": warm_requests,
        "warm_good": warm_good,
        "requests": load.sent - warm_requests,
        "good": load.good(),
        "statuses": load.statuses,
        "closed": load.closed,
        "without_response": load.in_flight(),
        "seconds": (load.last_response - load.start).as_secs_f64(),
        "p50_us": us(load.latencies.value_at_quantile(0.5)),
        "p99_us": us(load.latencies.value_at_quantile(0.99)),
        "p999_us": us(load.latencies.value_at_quantile(0.999)),
        "max_us": us(load.latencies.max()),
        "cpu_seconds": cpu.as_secs_f64(),
    });
    println!("{result}");
    Ok(())
}

struct Load {
    poll: Poll,
    connections: Vec<Connection>,
    slots_per_connection: usize,
    idle: Vec<usize>,
    /// By slot: when its request should have been sent.
    due: Vec<Instant>,
    /// Connections with requests that have to be flushed.
    unflushed: Vec<usize>,
    responses: Vec<Response>,
    requests: Requests,
    expect: u16,
    from_send: bool,

    start: Instant,
    end: Option<Instant>,
    /// Requests sent before the measurement, and to be sent by its end.
    sent_before: u64,
    sent_max: u64,
    /// Open loop.
    pace: Option<Pace>,

    sent: u64,
    last_response: Instant,
    latencies: Histogram<u64>,
    statuses: BTreeMap<u16, u64>,
    closed: usize,
}

struct Pace {
    /// Between requests.
    interval_ns: u64,
    /// Fires again only after it was read.
    timer: File,
    has_fired: bool,
}

impl Load {
    fn connect(settings: &Settings) -> anyhow::Result<Self> {
        let poll = Poll::new()?;
        let protocol = settings.streams.map_or("http/1.1", |_| "h2");
        let tls = settings.tls.as_deref();
        let tls = tls.map(|path| Tls::new(path, protocol)).transpose()?;
        let mut connections = Vec::with_capacity(settings.connections);
        for index in 0..settings.connections {
            let connection = Connection::open(settings, tls.as_ref(), &poll, Token(index))?;
            connections.push(connection);
        }
        let slots_per_connection = settings.streams.unwrap_or(1);
        let slots = connections.len() * slots_per_connection;
        let start = Instant::now();
        Ok(Self {
            poll,
            slots_per_connection,
            idle: (0..slots).rev().collect(),
            due: vec![start; slots],
            unflushed: Vec::new(),
            responses: Vec::new(),
            requests: Requests::new(settings)?,
            expect: settings.expect,
            from_send: settings.from_send,
            start,
            end: None,
            sent_before: 0,
            sent_max: slots as u64,
            pace: None,
            sent: 0,
            last_response: start,
            latencies: Histogram::new_with_bounds(1, 120_000_000_000, 3)?,
            statuses: BTreeMap::new(),
            closed: 0,
            connections,
        })
    }

    /// Resets the statistics after the warm-up and starts the measurement.
    fn start_the_clock(&mut self, settings: &Settings) -> anyhow::Result<()> {
        self.latencies.reset();
        self.statuses.clear();
        self.sent_before = self.sent;
        let requests = settings.requests.unwrap_or(u64::MAX);
        self.sent_max = self.sent.saturating_add(requests);
        if let Some(rate) = settings.rate {
            self.pace = Some(wake_up_at(rate, &self.poll)?);
        }
        self.start = Instant::now();
        self.last_response = self.start;
        let seconds = settings.seconds.map(Duration::from_secs_f64);
        self.end = seconds.map(|seconds| self.start + seconds);
        Ok(())
    }

    fn good(&self) -> u64 {
        self.statuses.get(&self.expect).copied().unwrap_or(0)
    }

    fn run(&mut self) -> anyhow::Result<()> {
        let mut events = Events::with_capacity(1024);
        loop {
            let now = Instant::now();
            self.send_what_is_due(now);
            let nothing_to_send = self.next_due(now).is_none() || self.is_lost();
            if nothing_to_send && self.in_flight() == 0 {
                return Ok(());
            }
            if now > self.last_response + PATIENCE {
                return Ok(());
            }
            // While no slot is idle the timer would only take processor time from the server.
            if let Some(pace) = &mut self.pace
                && pace.has_fired
                && !self.idle.is_empty()
            {
                pace.has_fired = false;
                let _ = pace.timer.read(&mut [0; 8]);
            }
            match self.poll.poll(&mut events, Some(Duration::from_secs(1))) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result.context("wait for responses")?,
            }
            for event in &events {
                match (event.token(), &mut self.pace) {
                    (TIMER, Some(pace)) => pace.has_fired = true,
                    (Token(index), _) => self.receive(index)?,
                }
            }
        }
    }

    fn in_flight(&self) -> usize {
        (self.connections.len() - self.closed) * self.slots_per_connection - self.idle.len()
    }

    fn is_lost(&self) -> bool {
        self.closed == self.connections.len()
    }

    /// When the next request should be sent. None when all have been.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        let due = match &self.pace {
            Some(pace) => {
                let number = self.sent - self.sent_before;
                self.start + Duration::from_nanos(pace.interval_ns * number)
            }
            None => now,
        };
        let more = self.sent < self.sent_max && self.end.is_none_or(|end| due < end);
        more.then_some(due)
    }

    fn send_what_is_due(&mut self, now: Instant) {
        while let Some(due) = self.next_due(now).filter(|due| *due <= now)
            && let Some(slot) = self.idle.pop()
        {
            self.due[slot] = if self.from_send { now } else { due };
            let mut request = self.requests.make(self.sent);
            self.sent += 1;
            let index = slot / self.slots_per_connection;
            let slot = slot % self.slots_per_connection;
            match self.connections[index].send(slot, &mut request) {
                Ok(()) if self.unflushed.last() != Some(&index) => self.unflushed.push(index),
                Ok(()) => {}
                Err(_) => self.retire(index),
            }
        }
        while let Some(index) = self.unflushed.pop() {
            if self.connections[index].flush().is_err() {
                self.retire(index);
            }
        }
    }

    fn receive(&mut self, index: usize) -> anyhow::Result<()> {
        if !self.connections[index].open {
            return Ok(());
        }
        let mut responses = std::mem::take(&mut self.responses);
        let received = self.connections[index].receive(self.expect, &mut responses);
        if !responses.is_empty() {
            let now = Instant::now();
            for response in responses.drain(..) {
                self.count(index, &response, now)?;
            }
            self.last_response = now;
            self.responses = responses;
            self.send_what_is_due(now);
        }
        if let Err(error) = received {
            eprintln!("connection {index}: {error}");
            self.retire(index);
        }
        Ok(())
    }

    fn count(&mut self, index: usize, response: &Response, now: Instant) -> anyhow::Result<()> {
        let slot = index * self.slots_per_connection + response.slot;
        let seen = self.statuses.entry(response.status).or_default();
        *seen += 1;
        match &response.unexpected {
            None => {
                let latency = u64::try_from((now - self.due[slot]).as_nanos())?;
                self.latencies.saturating_record(latency);
            }
            Some(text) if *seen == 1 => eprintln!("{text}"),
            Some(_) => {}
        }
        self.idle.push(slot);
        Ok(())
    }

    /// A connection that the server closed is not reopened: it counts in the result.
    fn retire(&mut self, index: usize) {
        let connection = &mut self.connections[index];
        if connection.open {
            connection.open = false;
            self.closed += 1;
            let slots = self.slots_per_connection;
            self.idle.retain(|slot| slot / slots != index);
        }
    }
}

/// A timer that fires at this rate. The timeout of a poll has only millisecond resolution.
fn wake_up_at(rate: f64, poll: &Poll) -> anyhow::Result<Pace> {
    let interval = Duration::from_secs_f64(1.0 / rate);
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK)?;
    let tick = Timespec::try_from(interval)?;
    let ticks = Itimerspec {
        it_interval: tick,
        it_value: tick,
    };
    timerfd_settime(&timer, TimerfdTimerFlags::empty(), &ticks)?;
    poll.registry()
        .register(&mut SourceFd(&timer.as_raw_fd()), TIMER, Interest::READABLE)?;
    Ok(Pace {
        interval_ns: u64::try_from(interval.as_nanos())?,
        timer: File::from(timer),
        has_fired: false,
    })
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).expect("CPU time is not negative")
}
