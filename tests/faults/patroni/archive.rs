//! A backup of the cluster: a base backup of the leader, and the WAL that all machines archive. Together they have to contain every
//! acknowledged plant, whichever machines have failed in between.

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use crate::harness::postgres::with_client;
use crate::harness::{directory, run_ok, wait_until};
use crate::patroni::machine::Machine;
use crate::patroni::topology::Topology;
use crate::postgres::cluster::{Postgres, free_port};

/// Timeline and position, in hexadecimal.
const SEGMENT_NAME_LEN: usize = 24;

/// A base backup, on which a server can be started.
pub struct Backup {
    server: Postgres,
}

impl Backup {
    pub fn new(topology: &Topology) -> Self {
        let leader = topology.wait_until_healthy();
        let port = topology.machines[leader].ports.postgres;
        let from = format!("host=127.0.0.1 port={port} user=replicator password=change-me-2");
        let earlier = segments(topology);
        let server = Postgres::base_backup(&from, free_port(), &[]);
        // It starts with a new segment. Without this, the archives of a long run would fill the disk.
        for segment in earlier {
            fs::remove_file(segment).expect("a file");
        }
        Self { server }
    }

    /// Waits until everything that is committed is archived, and restores it on a server of its own, which `plantstore check` verifies.
    pub fn restore(mut self, topology: &Topology) -> Postgres {
        let leader = topology.wait_until_healthy();
        let segment = end_segment(&topology.database(leader));
        for (at, machine) in topology.machines.iter().enumerate() {
            let file = machine.archive().join(&segment);
            wait_until(&format!("pg{} archives {segment}", at + 1), || {
                file.exists()
            });
        }

        let archives = topology.machines.iter().map(Machine::archive);
        let archives: Vec<_> = archives.map(|path| path.display().to_string()).collect();
        let archives = archives.join(" ");
        let data = self.server.data();
        fs::write(data.join("recovery.signal"), "").expect("a file");
        // The settings of Patroni name the file of the machine of which this is a copy.
        let hba_file = data.join("pg_hba.conf");
        fs::write(&hba_file, "host all all 127.0.0.1/32 trust\n").expect("a file");
        let settings = fs::OpenOptions::new()
            .append(true)
            .open(data.join("postgresql.auto.conf"));
        // It accepts connections when the recovery has ended, archives nothing, and has no standby.
        writeln!(
            settings.expect("a file"),
            "hba_file = '{}'
hot_standby = off
archive_mode = off
synchronous_standby_names = ''
recovery_target_timeline = latest
restore_command = 'for archive in {archives}; do cp $archive/%f %p 2>/dev/null && exit; done; exit 1'",
            hba_file.display(),
        )
        .expect("a file");
        self.server.start();
        run_ok(
            directory().path(),
            &["check", "--store", &self.server.url()],
        );
        self.server
    }
}

/// The archived WAL of all machines, without the files that describe timelines.
fn segments(topology: &Topology) -> Vec<PathBuf> {
    let archives = topology.machines.iter().map(Machine::archive);
    let files = archives.flat_map(|archive| fs::read_dir(archive).expect("a directory"));
    let files = files.map(|file| file.expect("an entry").path());
    let is_segment = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.len() == SEGMENT_NAME_LEN
    };
    files.filter(is_segment).collect()
}

/// Ends the current WAL segment, which would be archived when it is full; returns its name.
fn end_segment(database: &str) -> String {
    with_client(database, async |client| {
        let sql = "SELECT pg_walfile_name(pg_switch_wal())";
        let row = client.query_one(sql, &[]).await.expect("a segment");
        row.get(0)
    })
}
