//! The README's commands, run as they stand there: every `sh` block, and what it says they answer.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::harness::{wait_for_exit, wait_until};

const README: &str = include_str!("../../README.md");

/// A fenced block: its language and its text.
fn blocks() -> Vec<(&'static str, &'static str)> {
    let fenced = README.split("```").skip(1).step_by(2);
    fenced
        .map(|block| block.split_once('\n').expect("a language"))
        .collect()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// What `cargo run` started: a child of cargo's, known by the number in its lock.
struct Started {
    cargo: Child,
    lock: PathBuf,
}

impl Started {
    fn terminate(&self) {
        if let Ok(pid) = fs::read_to_string(&self.lock) {
            let pid = pid.lines().next().unwrap_or_default();
            let _ = Command::new("kill").arg(pid.trim()).status();
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.cargo.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.terminate();
            let _ = self.cargo.kill();
            let _ = self.cargo.wait();
        }
    }
}

#[test]
fn the_commands_of_the_readme_do_what_it_says() {
    // Below the project, so that cargo finds it; the README's port may be in use, so it is
    // changed.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .parent()
        .expect("target");
    std::os::unix::fs::symlink(target, directory.path().join("target")).expect("a link");
    let address = format!("127.0.0.1:{}", free_port());
    let shell = |text: &str| {
        let mut command = Command::new("bash");
        command
            .args(["-euc", &text.replace("127.0.0.1:8080", &address)])
            .env("PLANTSTORE_LISTEN", &address)
            .env("PLANTSTORE_OPS_LISTEN", "127.0.0.1:0")
            .current_dir(directory.path())
            .stdin(Stdio::null());
        command
    };

    let blocks = blocks();
    assert_eq!(blocks[0], ("sh", "cargo run --release -- serve\n"));
    let log = directory.path().join("log");
    let mut server = Started {
        cargo: shell(&format!("exec {}", blocks[0].1))
            .stderr(fs::File::create(&log).expect("a file"))
            .spawn()
            .expect("it starts"),
        lock: directory.path().join("plantstore.db-lock"),
    };
    let logged = || fs::read_to_string(&log).expect("a file");
    let mut ended = false;
    // It may have to be built first.
    for _ in 0..40 {
        let wait =
            std::panic::catch_unwind(|| wait_until("it listens", || logged().contains("curl ")));
        ended = server.cargo.try_wait().expect("a child").is_some();
        if wait.is_ok() || ended {
            break;
        }
    }
    assert!(!ended, "{}", logged());

    let mut compared = 0;
    for (at, (language, text)) in blocks.iter().enumerate().skip(1) {
        if *language != "sh" || *text == "make test\n" {
            continue;
        }
        let output = shell(text).output().expect("bash runs");
        assert!(output.status.success(), "{text}: {output:?}");
        if let Some((language, expected)) = blocks.get(at + 1)
            && *language != "sh"
        {
            let printed = String::from_utf8(output.stdout).expect("UTF-8");
            assert_eq!(printed.trim_end(), expected.trim_end(), "{text}");
            compared += 1;
        }
    }
    assert_eq!(compared, 5);

    server.terminate();
    assert!(wait_for_exit(&mut server.cargo).success());
}

#[test]
fn ci_runs_what_the_readme_says_it_runs() {
    let ci = include_str!("../../.ci/run");
    assert!(
        ci.lines().any(|line| line.trim() == "exec make test"),
        "{ci}"
    );
    assert!(README.contains("```sh\nmake test\n```"));
}
