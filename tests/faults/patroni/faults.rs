//! The faults: what each one does, what must be true while it lasts, and how it ends.

use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use crate::harness::wait_until;
use crate::patroni::machine::TTL;
use crate::patroni::topology::{NODE_OF_PGBOUNCER, Roles, Topology};
use crate::postgres::Node;
use crate::process::is_stopped;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    LeaderPostgresKilled,
    LeaderPatroniKilled,
    LeaderMachineKilled,
    LeaderPaused,
    LeaderCutOff,
    StandbyLost,
    StandbyCutOff,
    EtcdMemberLost,
    EtcdMajorityLost,
    PgBouncerKilled,
    Switchover,
    RollingRestart,
}

/// The failures of the leader that `--leader-failures` counts together.
pub const LEADER_FAILURES: [Fault; 3] = [
    Fault::LeaderPostgresKilled,
    Fault::LeaderPatroniKilled,
    Fault::LeaderMachineKilled,
];

pub const OTHERS: [Fault; 9] = [
    Fault::LeaderPaused,
    Fault::LeaderCutOff,
    Fault::StandbyLost,
    Fault::StandbyCutOff,
    Fault::EtcdMemberLost,
    Fault::EtcdMajorityLost,
    Fault::PgBouncerKilled,
    Fault::Switchover,
    Fault::RollingRestart,
];

impl Fault {
    /// The name for `--only`, the name in the table, and the method.
    pub fn names(self) -> [&'static str; 3] {
        match self {
            Self::LeaderPostgresKilled => [
                "leader's PostgreSQL killed",
                "Patroni: PostgreSQL of the leader killed",
                "kill -9 of the server and its backends; Patroni starts it again or fails over",
            ],
            Self::LeaderPatroniKilled => [
                "leader's Patroni killed",
                "Patroni: Patroni of the leader killed",
                "kill -9; its PostgreSQL goes on as a second primary while another machine becomes the leader",
            ],
            Self::LeaderMachineKilled => [
                "leader killed",
                "Patroni: machine of the leader lost",
                "kill -9 of PostgreSQL, Patroni, PgBouncer and etcd at once",
            ],
            Self::LeaderPaused => [
                "leader paused",
                "Patroni: leader paused",
                "SIGSTOP to PostgreSQL, Patroni and PgBouncer until another machine is the leader, then SIGCONT",
            ],
            Self::LeaderCutOff => [
                "leader cut off",
                "Patroni: network of the leader cut",
                "proxies that forward nothing from and to its machine until another machine is the leader; one node still reaches the old one",
            ],
            Self::StandbyLost => [
                "replica lost",
                "Patroni: standby lost",
                "kill -9 of everything on the machine of the synchronous and of the other standby in turn",
            ],
            Self::StandbyCutOff => [
                "replica cut off",
                "Patroni: network of a standby cut",
                "proxies that forward nothing from and to the machine of the synchronous and of the other standby in turn",
            ],
            Self::EtcdMemberLost => [
                "etcd member lost",
                "Patroni: etcd member lost",
                "kill -9 of one of three",
            ],
            Self::EtcdMajorityLost => [
                "etcd majority lost",
                "Patroni: etcd majority lost",
                "kill -9 of two of three, for longer than Patroni's ttl",
            ],
            Self::PgBouncerKilled => [
                "PgBouncer killed",
                "Patroni: PgBouncer killed",
                "kill -9 of that of the leader and of all three in turn, until its node is not ready; the other node goes on",
            ],
            Self::Switchover => ["switchover", "Patroni: switchover", "patronictl switchover"],
            Self::RollingRestart => [
                "rolling restart of everything",
                "Patroni: rolling restart of everything",
                "SIGTERM to etcd, PgBouncer and Patroni on each machine, then to each node; reload of HAProxy",
            ],
        }
    }

    /// Whether the old leader still accepts connections while another one has taken over.
    pub fn leaves_two_primaries(self) -> bool {
        matches!(
            self,
            Self::LeaderPatroniKilled | Self::LeaderPaused | Self::LeaderCutOff
        )
    }

    /// Causes the failure; returns the machines that it is about. The number of the run decides which ones, so that a run can be
    /// repeated.
    pub fn inject(self, topology: &mut Topology, number: usize, roles: Roles) -> Vec<usize> {
        let Roles {
            leader,
            synchronous,
            other,
        } = roles;
        let standby = [synchronous, other][number % 2];
        let machines = &mut topology.machines;
        match self {
            Self::LeaderPostgresKilled => {
                machines[leader].kill_postgres();
                vec![leader]
            }
            Self::LeaderPatroniKilled => {
                machines[leader].patroni.kill();
                vec![leader]
            }
            Self::LeaderMachineKilled => {
                machines[leader].kill();
                vec![leader]
            }
            Self::LeaderPaused => {
                machines[leader].pause();
                let postmaster = machines[leader].postmaster().expect("PostgreSQL runs");
                wait_until("PostgreSQL is stopped", || is_stopped(postmaster));
                vec![leader]
            }
            Self::LeaderCutOff => {
                topology.network.cut_off(Some(leader));
                vec![leader]
            }
            Self::StandbyLost => {
                machines[standby].kill();
                vec![standby]
            }
            Self::StandbyCutOff => {
                topology.network.cut_off(Some(standby));
                vec![standby]
            }
            Self::EtcdMemberLost => {
                let victim = (leader + number) % 3;
                machines[victim].etcd.kill();
                vec![victim]
            }
            Self::EtcdMajorityLost => {
                let remaining = (leader + number) % 3;
                let victims: Vec<_> = (0..3).filter(|at| *at != remaining).collect();
                for victim in &victims {
                    machines[*victim].etcd.kill();
                }
                victims
            }
            Self::PgBouncerKilled => {
                // Those of the standbys do not help: nothing can be added there.
                let victims = if number.is_multiple_of(2) {
                    vec![leader]
                } else {
                    vec![leader, synchronous, other]
                };
                for victim in &victims {
                    machines[*victim].pgbouncer.kill();
                }
                victims
            }
            Self::Switchover => {
                vec![topology.switch_over()]
            }
            Self::RollingRestart => {
                // The leader last, so that it is replaced once.
                for at in [other, synchronous, leader] {
                    restart_machine(topology, at);
                }
                for at in 0..topology.nodes.len() {
                    topology.restart_node(at);
                }
                topology.balancer.reload();
                Vec::new()
            }
        }
    }

    /// Fails unless the servers that the fault ends or restarts are other processes than before.
    pub fn verify(self, topology: &Topology, victims: &[usize], before: &[Pid]) {
        let restarted = match self {
            Self::LeaderPostgresKilled | Self::LeaderMachineKilled | Self::StandbyLost => victims,
            Self::RollingRestart => &[0, 1, 2],
            _ => &[],
        };
        let now = topology.postmasters();
        for at in restarted {
            assert_ne!(now[*at], before[*at], "PostgreSQL of pg{} went on", at + 1);
        }
    }

    /// The nodes that have to acknowledge adds while the fault lasts.
    pub fn nodes_in_service(self, topology: &Topology) -> &[Node] {
        match self {
            Self::PgBouncerKilled => &topology.nodes[..NODE_OF_PGBOUNCER],
            _ => &topology.nodes,
        }
    }

    /// Waits until the fault has its full effect.
    pub fn wait(self, topology: &Topology, victims: &[usize]) {
        // After this time a leader that cannot renew its lock would have been replaced.
        let ttl = TTL + Duration::from_secs(4);
        match self {
            Self::LeaderPatroniKilled
            | Self::LeaderMachineKilled
            | Self::LeaderPaused
            | Self::LeaderCutOff
            | Self::Switchover => topology.wait_for_other_leader(victims[0]),
            Self::StandbyLost | Self::EtcdMemberLost | Self::EtcdMajorityLost => {
                thread::sleep(ttl);
            }
            Self::StandbyCutOff => {
                thread::sleep(ttl);
                // Commits have waited for this one, perhaps, and must do so no longer.
                topology.wait_for_other_standby(victims[0]);
            }
            Self::PgBouncerKilled => wait_until("the node of PgBouncer is not ready", || {
                !topology.balancer.is_up(NODE_OF_PGBOUNCER)
            }),
            Self::LeaderPostgresKilled | Self::RollingRestart => {}
        }
        if self == Self::LeaderPatroniKilled {
            let postmaster = topology.machines[victims[0]].postmaster();
            assert!(postmaster.is_some(), "PostgreSQL ended with its Patroni");
        }
    }

    /// Ends the fault.
    pub fn heal(self, topology: &mut Topology, victims: &[usize]) {
        let machines = &mut topology.machines;
        for victim in victims {
            let machine = &mut machines[*victim];
            match self {
                Self::LeaderPostgresKilled | Self::Switchover | Self::RollingRestart => {}
                Self::LeaderPatroniKilled => machine.patroni.start(),
                Self::LeaderMachineKilled | Self::StandbyLost => machine.start(),
                Self::LeaderPaused => machine.resume(),
                Self::LeaderCutOff | Self::StandbyCutOff => topology.network.cut_off(None),
                Self::EtcdMemberLost | Self::EtcdMajorityLost => machine.etcd.start(),
                Self::PgBouncerKilled => machine.pgbouncer.start(),
            }
        }
    }
}

/// As an upgrade of the packages of a machine does it.
fn restart_machine(topology: &mut Topology, at: usize) {
    let machine = &mut topology.machines[at];
    machine.etcd.stop(Signal::TERM);
    machine.etcd.start();
    machine.patroni.stop(Signal::TERM);
    machine.pgbouncer.stop(Signal::TERM);
    machine.start_others();
    topology.wait_until_healthy();
}
