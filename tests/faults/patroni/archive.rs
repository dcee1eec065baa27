//! A backup of the cluster with the scripts of `deploy/ha`: a base backup, and the WAL that all machines archive. Together they have to
//! contain every acknowledged plant, whichever machines have failed in between.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::postgres::with_client;
use crate::harness::{directory, run_ok, wait_until};
use crate::patroni::topology::Topology;
use crate::postgres::cluster::{Postgres, programs};
use crate::process::{finish, unprivileged};

const BASE_BACKUP: &str = include_str!("../../../deploy/ha/base-backup.sh");
const RESTORE: &str = include_str!("../../../deploy/ha/restore.sh");

/// The machine with the backups.
pub struct Backup {
    directory: PathBuf,
}

impl Backup {
    /// Makes a base backup in this directory. WAL that was archived before is deleted.
    pub fn new(topology: &Topology, place: &Path) -> Self {
        topology.wait_until_healthy();
        let directory = place.join("backup");
        let wal = directory.join("backups/wal");
        finish(unprivileged(Path::new("mkdir"), place).arg("-p").arg(wal));
        let run = |program: &str, arguments: &[&str]| {
            finish(unprivileged(Path::new(program), &directory).args(arguments));
        };
        for (number, machine) in (1..).zip(&topology.machines) {
            // In place of moving the files to this machine.
            let archive = machine.archive().display().to_string();
            run("ln", &["-s", &archive, &format!("backups/wal/pg{number}")]);
        }
        for (name, script) in [("base-backup.sh", BASE_BACKUP), ("restore.sh", RESTORE)] {
            fs::write(directory.join(name), script).expect("a file");
        }
        let machines = topology.machines.iter();
        let ports: Vec<_> = machines
            .map(|machine| machine.ports.postgres.to_string())
            .collect();
        let mut backup = unprivileged(Path::new("sh"), &directory);
        backup
            .args(["base-backup.sh", "backups"])
            .env("PG_BIN_DIR", programs())
            .env("PGHOST", ["127.0.0.1"; 3].join(","))
            .env("PGPORT", ports.join(","))
            .env("PGUSER", "replicator")
            .env("PGPASSWORD", "change-me-2");
        finish(&mut backup);
        Self { directory }
    }

    /// Restores the cluster as it was at a time, or at the end, on a server of its own, which `plantstore check` verifies.
    pub fn restore(&self, time: Option<&str>) -> Postgres {
        let place = self
            .directory
            .join(time.map_or("at-the-end", |_| "at-a-time"));
        finish(unprivileged(Path::new("mkdir"), &self.directory).arg(&place));
        let data = place.join("data");
        let mut restore = unprivileged(Path::new("sh"), &self.directory);
        restore.args(["restore.sh", "backups"]).arg(&data);
        finish(restore.args(time));
        let hba = data.join("pg_hba.conf");
        fs::write(hba, "host all all 127.0.0.1/32 trust\n").expect("a file");
        let server = Postgres::start_in(&place);
        run_ok(directory().path(), &["check", "--store", &server.url()]);
        server
    }

    pub fn delete(self) {
        fs::remove_dir_all(self.directory).expect("a directory");
    }
}

/// Waits until all machines have archived everything that is committed.
pub fn wait_until_archived(topology: &Topology) {
    let segment = topology.at_leader(end_segment);
    for (number, machine) in (1..).zip(&topology.machines) {
        let file = machine.archive().join(&segment);
        wait_until(&format!("pg{number} archives {segment}"), || file.exists());
    }
}

/// The time of the server, to which a backup can be restored.
pub fn time_at(database: &str) -> String {
    with_client(database, async |client| {
        let sql =
            "SELECT to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US+00')";
        let row = client.query_one(sql, &[]).await.expect("a time");
        row.get(0)
    })
}

/// Ends the current WAL segment, which would be archived when it is full; returns its name.
fn end_segment(database: &str) -> String {
    with_client(database, async |client| {
        let sql = "SELECT pg_walfile_name(pg_switch_wal())";
        let row = client.query_one(sql, &[]).await.expect("a segment");
        row.get(0)
    })
}
