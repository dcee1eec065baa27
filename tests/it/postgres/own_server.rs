//! A PostgreSQL server of one test, which may be reconfigured.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::harness::postgres::with_client;
use crate::harness::{wait_for_exit, wait_until};
use crate::postgres::sql;

/// A server of one test, whose settings can be changed.
pub struct OwnServer {
    child: Child,
    pub url: String,
}

impl OwnServer {
    pub fn start() -> Self {
        let mut child = Command::new("scripts/with-postgres")
            .args(["bash", "-c", "echo \"$TEST_POSTGRES\"; read -r || true"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("scripts/with-postgres runs");
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let url = lines
            .map_while(Result::ok)
            .find(|line| line.starts_with("postgres://"));
        let url = format!("{}/postgres", url.expect("the server starts"));
        Self { child, url }
    }

    /// Changes a setting for all open connections, and waits until it is effective.
    pub fn set(&self, setting: &str, value: &str) {
        let change = format!("ALTER SYSTEM SET {setting} = '{value}'");
        // `ALTER SYSTEM` cannot run in a transaction with the reload.
        sql(&self.url, &change);
        sql(&self.url, "SELECT pg_reload_conf()");
        wait_until("the setting is changed", || {
            with_client(&self.url, async |client| {
                let row = client
                    .query_one("SELECT current_setting($1)", &[&setting])
                    .await;
                row.expect("a setting").get::<_, &str>(0) == value
            })
        });
    }

    /// Writes a file of the server, as the server.
    pub fn write(&self, path: &str, text: &str) {
        let lines = text.trim_end();
        let copy = format!("COPY (SELECT string_to_table($${lines}$$, E'\\n')) TO '{path}'");
        sql(&self.url, &copy);
    }

    pub fn setting(&self, name: &str) -> String {
        with_client(&self.url, async |client| {
            let sql = format!("SELECT current_setting('{name}')");
            client.query_one(&sql, &[]).await.expect("a setting").get(0)
        })
    }

    /// Sets how roles log in, with lines of pg_hba.conf; the role `postgres` may always.
    pub fn allow(&self, lines: &str) {
        let path = self.setting("hba_file");
        self.write(&path, &format!("host all postgres all trust\n{lines}"));
        self.reload();
    }

    /// Gives the server another certificate.
    pub fn use_certificate(&self, certificate: &Path, key: &Path) {
        for (setting, path) in [("ssl_cert_file", certificate), ("ssl_key_file", key)] {
            let text = fs::read_to_string(path).expect("a PEM file");
            self.write(&self.setting(setting), &text);
        }
        self.reload();
    }

    /// Reads the configuration files again, and waits until that has been done.
    fn reload(&self) {
        let loaded_at = || {
            with_client(&self.url, async |client| {
                let sql = "SELECT pg_conf_load_time()::text";
                let row = client.query_one(sql, &[]).await.expect("a time");
                row.get::<_, String>(0)
            })
        };
        let before = loaded_at();
        sql(&self.url, "SELECT pg_reload_conf()");
        wait_until("the configuration is read again", || loaded_at() != before);
    }

    /// The URL for a role.
    pub fn url_of(&self, role: &str) -> String {
        self.url.replace("postgres@", &format!("{role}@"))
    }
}

impl Drop for OwnServer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        wait_for_exit(&mut self.child);
    }
}
