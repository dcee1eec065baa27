//! Version, completions, manual pages, systemd units and the packaged configuration file.

use std::fs;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::harness::{
    PATIENCE, Server, directory, open, plantstore, postgres, run, run_ok, wait_for_exit, wait_until,
};

/// Every setting of `serve`, as in the file, with its variable and its default.
fn settings() -> Vec<(String, String, String)> {
    let directory = directory();
    let help = run_ok(directory.path(), &["serve", "--help"]);
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut settings = Vec::new();
    for part in words.split(" --").skip(1) {
        let after = |mark| Some(part.split_once(mark)?.1.split_once(']')?.0.to_owned());
        if let (Some(variable), Some(default)) = (after("[env: "), after("[default: ")) {
            let flag = part.split(' ').next().expect("a flag");
            settings.push((flag.replace('-', "_"), variable, default));
        }
    }
    assert!(settings.len() >= 12, "{help}");
    settings
}

fn bash(directory: &Path, script: &str) -> String {
    let mut bash = Command::new("bash");
    let output = bash.args(["-euc", script]).current_dir(directory).output();
    let output = output.expect("bash runs");
    assert!(output.status.success(), "{script}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// A one-line crate with our build script for the commit, in its own directory.
struct Asking(tempfile::TempDir);

impl Asking {
    fn new() -> Self {
        let directory = directory();
        let ours = concat!(env!("CARGO_MANIFEST_DIR"), "/build");
        let script =
            "#[path = \"build/version.rs\"] mod version; fn main() { version::set_variables() }";
        let main =
            "fn main() { println!(\"{}|{}\", env!(\"BUILT_VERSION\"), env!(\"BUILT_COMMIT\")) }";
        let manifest =
            "[package]\nname = \"asking\"\nversion = \"1.2.3\"\nedition = \"2024\"\n[workspace]\n";
        bash(
            directory.path(),
            &format!("mkdir -p crate/src && cp -r '{ours}' crate"),
        );
        let place = directory.path().join("crate");
        fs::write(place.join("build.rs"), script).expect("a file");
        fs::write(place.join("src/main.rs"), main).expect("a file");
        fs::write(place.join("Cargo.toml"), manifest).expect("a file");
        Self(directory)
    }

    /// Runs git in the directory of the crate, with an identity for commits and without the user's configuration.
    fn shell(&self, script: &str) -> String {
        let git = "export GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b \
                   GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b GIT_COMMITTER_DATE=2026-01-02T03:04:05Z";
        let script = format!("unset PLANTSTORE_COMMIT CARGO_TARGET_DIR; {git}\n{script}");
        bash(&self.0.path().join("crate"), &script)
    }

    /// The commit that the crate prints after a build, and whether it had to be compiled.
    fn ask(&self, before: &str) -> (String, bool) {
        let build = "cargo build --offline --target-dir ../target 2>&1 | tee ../log; ../target/debug/asking";
        let said = self.shell(&format!("{before}\n{build}"));
        let version = said.lines().last().expect("a line").to_owned();
        (version, said.contains("Compiling"))
    }
}

#[test]
fn the_commit_is_part_of_the_version_and_causes_no_second_build() {
    let asking = Asking::new();
    let version = |before| asking.ask(before).0;
    assert_eq!(version(""), "1.2.3|");
    assert_eq!(
        version("export PLANTSTORE_COMMIT='abc 2026-01-01'"),
        "1.2.3 (abc 2026-01-01)|abc"
    );
    // Like an archive that was unpacked within another repository.
    asking.shell(
        "cd .. && echo target > .gitignore && git init -q && git add . && git commit -qm outer",
    );
    assert_eq!(version("touch build.rs"), "1.2.3|");

    asking.shell("git init -q && git add . && git commit -qm first");
    let hash = || {
        asking
            .shell("git rev-parse --short=12 HEAD")
            .trim()
            .to_owned()
    };
    let clean = |hash: &str| format!("1.2.3 ({hash} 2026-01-02)|{hash}");
    let first = hash();
    assert_eq!(version("touch build.rs"), clean(&first));
    assert_eq!(asking.ask(""), (clean(&first), false));
    assert_eq!(asking.ask("echo notes > notes.txt"), (clean(&first), false));

    let dirty = format!("1.2.3 ({first}-dirty 2026-01-02)|{first}-dirty");
    assert_eq!(
        asking.ask("echo '// changed' >> src/main.rs"),
        (dirty.clone(), true)
    );
    assert_eq!(asking.ask(""), (dirty, false));
    asking.shell("git commit -qam second");
    let second = hash();
    assert_ne!(first, second);
    assert_eq!(asking.ask(""), (clean(&second), true));
    assert_eq!(asking.ask(""), (clean(&second), false));
    assert_eq!(version("git checkout -q --detach HEAD~1"), clean(&first));
}

#[test]
fn the_version_is_that_of_the_package_with_its_commit() {
    let directory = directory();
    let version = run_ok(directory.path(), &["--version"]);
    let expected = concat!("plantstore ", env!("CARGO_PKG_VERSION"));
    let rest = version
        .trim_end()
        .strip_prefix(expected)
        .expect("the version");
    if !rest.is_empty() {
        let parts = rest
            .strip_prefix(" (")
            .and_then(|rest| rest.strip_suffix(')'));
        let (commit, date) = parts
            .and_then(|parts| parts.split_once(' '))
            .expect("a commit and a date");
        let hash = commit.trim_end_matches("-dirty");
        assert!(
            hash.len() >= 12 && hash.chars().all(|c| c.is_ascii_hexdigit()),
            "{version}"
        );
        assert!(date.len() == 10 && date.starts_with("20"), "{version}");
    }
    let server = Server::start_in(directory.path(), &[]);
    assert!(
        server
            .everything_logged()
            .contains(version.trim_start_matches("plantstore ").trim())
    );
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let directory = directory();
    let completions = run_ok(directory.path(), &["completions", "bash"]);
    fs::write(directory.path().join("plantstore.bash"), completions).expect("a file");
    let complete = |words: &str| {
        let script = format!(
            "source plantstore.bash; set +u; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
             _plantstore plantstore \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        bash(directory.path(), &script).trim().to_owned()
    };
    assert_eq!(complete("plantstore tok"), "token");
    assert_eq!(complete("plantstore token rev"), "revoke");
    assert_eq!(complete("plantstore serve --lis"), "--listen");
    assert_eq!(complete("plantstore serve --log-level d"), "debug");
    for shell in ["zsh", "fish", "elvish", "powershell"] {
        let completions = run_ok(directory.path(), &["completions", shell]);
        assert!(completions.contains("revoke"), "{shell}");
    }
    let output = run(directory.path(), &["completions", "sh"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_manual_has_a_page_for_every_command_and_a_variable_for_every_setting() {
    let directory = directory();
    let main = run_ok(directory.path(), &["man"]);
    assert!(main.contains(".TH PLANTSTORE 1"), "{main}");
    assert_eq!(run_ok(directory.path(), &["man", "--to", "share/man1"]), "");
    let page = |name: &str| {
        let path = directory
            .path()
            .join("share/man1")
            .join(format!("{name}.1"));
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    assert_eq!(page("plantstore"), main);
    let help = run_ok(directory.path(), &["--help"]);
    let commands = help.split_once("Commands:\n").expect("commands").1;
    let commands = commands.split_once("\n\n").expect("an end").0;
    // A long description continues on lines that are indented further.
    let command = |line: &'_ str| Some(line.strip_prefix("  ")?.split(' ').next()?.to_owned());
    let commands = commands.lines().filter_map(command);
    let commands: Vec<_> = commands.filter(|command| !command.is_empty()).collect();
    assert!(commands.iter().any(|command| command == "serve"));
    for command in commands.into_iter().filter(|command| command != "help") {
        let page = page(&format!("plantstore-{command}"));
        let unquoted = page.replace('"', "");
        for section in ["EXAMPLES", "EXIT STATUS", "SEE ALSO"] {
            assert!(
                unquoted.contains(&format!(".SH {section}\n")),
                "{section}: {page}"
            );
        }
        assert!(
            main.contains(&format!("plantstore\\-{command}(1)")),
            "{command}"
        );
    }
    assert!(page("plantstore-token-create").contains("PLANTSTORE_STORE"));
    let serve = page("plantstore-serve");
    for (_, variable, default) in settings() {
        assert!(serve.contains(&variable), "{variable}");
        assert!(serve.contains(&default.replace('-', "\\-")), "{default}");
    }
}

#[test]
fn the_packaged_settings_are_all_there_are_with_their_defaults() {
    let file = include_str!("../../deploy/plantstore.toml");
    let known = settings();
    let line = |key: &str| {
        let own = |line: &&str| {
            line.trim_start_matches('#')
                .starts_with(&format!("{key} = "))
        };
        let lines: Vec<_> = file.lines().filter(own).collect();
        assert_eq!(lines.len(), 1, "{key}");
        lines[0]
    };
    for (key, _, default) in &known {
        let value = if default.parse::<u64>().is_ok() {
            default.clone()
        } else {
            format!("{default:?}")
        };
        match key.as_str() {
            // An absolute path, so that the service and the operator's commands use the same file.
            "store" => assert_eq!(
                line(key),
                r#"store = "sqlite:/var/lib/plantstore/plantstore.db""#
            ),
            _ => assert_eq!(line(key), format!("#{key} = {value}")),
        }
    }
    let keys = file.lines().filter(|line| line.contains(" = ")).count();
    assert_eq!(keys, known.len());

    // With all settings enabled, on free ports and in an existing directory.
    let directory = directory();
    let place = directory.path().to_str().expect("UTF-8");
    let mut all = String::new();
    for line in file.lines() {
        all += line
            .strip_prefix('#')
            .filter(|line| !line.starts_with(' '))
            .unwrap_or(line);
        all.push('\n');
    }
    let all = all
        .replace("/var/lib/plantstore", place)
        .replace(":8080\"", ":0\"")
        .replace(":9090\"", ":0\"");
    fs::write(directory.path().join("all.toml"), all).expect("a file");
    let mut command = plantstore(directory.path());
    command.args(["serve", "--config", "all.toml"]);
    command.env_remove("PLANTSTORE_OPS_LISTEN");
    let server = Server::start_command(command, directory.path());
    server.add_ok(r#"{"id":1,"name":"x"}"#);
}

#[test]
fn the_unit_runs_the_packaged_settings_and_lets_the_service_drain() {
    let unit = include_str!("../../deploy/plantstore.service");
    let value = |key: &str| {
        let found = unit
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("{key}"))
    };
    assert_eq!(
        value("ExecStart"),
        "/usr/bin/plantstore serve --config /etc/plantstore/plantstore.toml"
    );
    assert_eq!(value("Type"), "notify");
    let known = settings();
    let (_, _, drain) = known
        .iter()
        .find(|(key, ..)| key == "drain_timeout")
        .expect("a setting");
    let seconds = |text: &str| text.trim_end_matches('s').parse::<u64>().expect("seconds");
    assert!(seconds(value("TimeoutStopSec")) >= seconds(drain) + 5);
}

#[test]
fn the_backup_unit_makes_a_backup_per_day_and_deletes_old_ones() {
    let unit = include_str!("../../deploy/plantstore-backup.service");
    let timer = include_str!("../../deploy/plantstore-backup.timer");
    assert!(timer.contains("\nOnCalendar=") && timer.contains("\nWantedBy=timers.target"));
    assert!(unit.contains("\nStateDirectory=plantstore plantstore-backup\n"));

    let directory = directory();
    let place = directory.path().to_str().expect("UTF-8");
    run_ok(directory.path(), &["token", "create", "x"]);
    let old = directory
        .path()
        .join("plantstore-backup/plants-2026-01-01.backup");
    bash(
        directory.path(),
        &format!(
            "mkdir plantstore-backup; touch -d '20 days ago' '{}'",
            old.display()
        ),
    );
    let command = |key: &str| {
        let found = unit.lines().find_map(|line| line.strip_prefix(key));
        let found = found.unwrap_or_else(|| panic!("{key}"));
        found
            .replace("%S", place)
            .replace("%%", "%")
            .replace("$$", "$")
            .replace("/usr/bin/plantstore", env!("CARGO_BIN_EXE_plantstore"))
            .replace(
                "--config /etc/plantstore/plantstore.toml",
                "--store sqlite:plantstore.db",
            )
            .replace("plants-*.backup*", "'plants-*.backup*'")
    };
    for _ in 0..2 {
        bash(directory.path(), &command("ExecStart="));
        let rotate = command("ExecStartPost=");
        bash(directory.path(), &format!("KEEP_DAYS=14; {rotate}"));
    }
    assert!(!old.exists());
    let backup = bash(directory.path(), "ls plantstore-backup/plants-*.backup");
    assert_eq!(
        run_ok(directory.path(), &["check", backup.trim()]),
        "no damage: plants 0, tokens 1\n"
    );
}

/// The notification socket of systemd.
fn service_manager(directory: &Path) -> UnixDatagram {
    let socket = UnixDatagram::bind(directory.join("notify")).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    socket
}

/// A process that is killed when the test ends.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn message(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 1024];
    let length = socket.recv(&mut bytes).expect("a message");
    String::from_utf8(bytes[..length].to_vec()).expect("UTF-8")
}

#[test]
fn systemd_is_notified_once_connections_are_accepted_and_when_the_drain_begins() {
    let directory = directory();
    let systemd = service_manager(directory.path());
    run_ok(directory.path(), &["token", "create", "x"]);
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = free.local_addr().expect("an address");
    drop(free);
    let mut command = plantstore(directory.path());
    command.args([
        "serve",
        "--listen",
        &address.to_string(),
        "--drain-timeout",
        "90s",
    ]);
    command.env("NOTIFY_SOCKET", directory.path().join("notify"));

    // While another connection holds a write lock, the server does not listen.
    let holder = (!postgres::is_under_test()).then(|| open(directory.path()));
    if let Some(holder) = &holder {
        holder.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    }
    let mut child = Started(command.stderr(Stdio::null()).spawn().expect("it starts"));
    if let Some(holder) = &holder {
        let lock = directory.path().join("plantstore.db-lock");
        let holds =
            |text: String| text.lines().next().map(str::trim) == Some(&child.0.id().to_string());
        wait_until("it is opening the store", || {
            fs::read_to_string(&lock).is_ok_and(holds)
        });
        systemd.set_nonblocking(true).expect("a socket");
        let early = systemd.recv(&mut [0]).expect_err("not ready yet");
        assert_eq!(early.kind(), ErrorKind::WouldBlock);
        systemd.set_nonblocking(false).expect("a socket");
        assert!(TcpStream::connect(address).is_err());
        holder.execute_batch("ROLLBACK").expect("a lock");
    }
    assert_eq!(
        message(&systemd),
        format!("READY=1\nSTATUS=Listening on {address}")
    );
    TcpStream::connect(address).expect("it takes connections");

    let signal = Command::new("kill")
        .args(["-TERM", &child.0.id().to_string()])
        .status();
    assert!(signal.expect("kill runs").success());
    let stopping = message(&systemd);
    let time = stopping.strip_prefix("STOPPING=1\nSTATUS=Draining\nEXTEND_TIMEOUT_USEC=");
    let time: u64 = time.expect(&stopping).parse().expect("a number");
    assert!(time > 90_000_000, "{time}");
    assert!(wait_for_exit(&mut child.0).success());
}

#[test]
fn an_abstract_socket_is_notified_and_a_missing_one_is_ignored() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;

    let directory = directory();
    let start = |socket: &str| {
        let mut command = plantstore(directory.path());
        command
            .args(["serve", "--listen", "127.0.0.1:0"])
            .env("NOTIFY_SOCKET", socket);
        Server::start_command(command, directory.path())
    };
    let name = format!("plantstore-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a name");
    let systemd = UnixDatagram::bind_addr(&address).expect("a socket");
    systemd.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut server = start(&format!("@{name}"));
    assert!(message(&systemd).starts_with("READY=1\n"));
    assert!(server.terminate().success());

    drop(systemd);
    for dead in [&format!("@{name}"), "/nowhere/notify", "", "vsock:2:1234"] {
        let mut server = start(dead);
        server.add_ok(r#"{"id":1,"name":"x"}"#);
        assert!(server.terminate().success(), "{dead}");
    }
}
