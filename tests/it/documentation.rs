//! README.md and docs/: their commands are run, their links lead somewhere, their examples for other programs are valid.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::harness::proxy::tool;
use crate::harness::{Server, directory, free_port, postgres, run_ok, wait_for_exit, wait_until};
use crate::markdown::{self, Block, block, blocks};
use crate::postgres::{address, sql, url};

const README: &str = include_str!("../../README.md");

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn page(name: &str) -> String {
    let path = Path::new(ROOT).join("docs").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Runs the `sh` blocks of a page in the directory of a running service. Its addresses replace those of the page.
fn run_page(name: &str) {
    let server = Server::start();
    server.token();
    let store = postgres::store(server.directory());
    let store = store.as_deref().map(|store| ("PLANTSTORE_STORE", store));
    let page = page(name)
        .replace("127.0.0.1:8080", &server.address().to_string())
        .replace("127.0.0.1:9090", &server.ops_address().to_string());
    markdown::run(&blocks(&page), server.directory(), store.as_slice());
}

macro_rules! pages {
    ($($test:ident $name:literal,)+) => {
        $(#[test]
        fn $test() {
            run_page($name);
        })+

        /// The pages whose commands are run.
        const PAGES: &[&str] = &[$($name,)+ "high-availability.md", "patroni.md", "copy.md"];
    };
}

pages! {
    page_installation "installation.md",
    page_configuration "configuration.md",
    page_authentication "authentication.md",
    page_querying "querying.md",
    page_import_export "import-export.md",
    page_backup "backup.md",
    page_monitoring "monitoring.md",
    page_security "security.md",
    page_upgrading "upgrading.md",
    page_troubleshooting "troubleshooting.md",
}

#[test]
#[ignore = "scripts/with-postgres runs it"]
fn page_high_availability_and_page_copy() {
    let directory = directory();
    let server = url(directory.path());
    let host = address(&server).ip().to_string();
    let port = address(&server).port().to_string();
    let variables = [("PGHOST", &*host), ("PGPORT", &*port)];

    let ports = ["8081", "8082", "8083", "9091", "9092", "9093"];
    let ports = ports.map(|port| (port, free_port().to_string()));
    let text = with_ports(&page("high-availability.md"), &ports);
    assert_eq!(
        markdown::run(&blocks(&text), directory.path(), &variables),
        1
    );

    sql(&server, "DROP DATABASE plants WITH (FORCE)");
    sql(&server, "CREATE DATABASE plants OWNER plantstore_owner");
    let source = ["--store", "sqlite:plantstore.db"];
    run_ok(
        directory.path(),
        &[&["token", "create", "a"], &source[..]].concat(),
    );
    markdown::run(&blocks(&page("copy.md")), directory.path(), &variables);
}

/// Replaces numbers in one pass, so that a new one is not replaced again.
fn with_ports(text: &str, ports: &[(&str, String)]) -> String {
    let mut replaced = String::new();
    for part in text.split_inclusive(|c: char| !c.is_ascii_digit()) {
        let number = part.trim_end_matches(|c: char| !c.is_ascii_digit());
        match ports.iter().find(|(from, _)| *from == number) {
            Some((_, to)) => replaced += &part.replacen(number, to, 1),
            None => replaced += part,
        }
    }
    replaced
}

/// A listener that reserves the seven ports after its own, for servers that are stopped and started again. They are below the
/// ephemeral range, so that no client connection takes one meanwhile.
fn reserve_ports() -> (TcpListener, [u16; 7]) {
    // Free on all addresses of this machine.
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
    let reserve = |first: u16| {
        let reservation = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()?;
        let ports = [1, 2, 3, 4, 5, 6, 7].map(|number| first + number);
        ports.iter().all(is_free).then_some((reservation, ports))
    };
    let found = (12_000..20_000).step_by(10).find_map(reserve);
    found.expect("free ports")
}

/// The ports of the page and of `deploy/ha` are replaced by free ones. Its addresses stay: 127.0.0.2 is an address of this machine
/// too.
#[test]
#[ignore = "takes four minutes; scripts/with-postgres runs it"]
fn page_patroni() {
    let (_reservation, free) = reserve_ports();
    let ports = ["2379", "2380", "8008", "5432", "6432", "8080", "9090"];
    let ports: Vec<_> = ports
        .into_iter()
        .zip(free.map(|port| port.to_string()))
        .collect();
    let (files, directory) = (directory(), directory());
    for entry in fs::read_dir(Path::new(ROOT).join("deploy/ha")).expect("deploy/ha") {
        let entry = entry.expect("an entry");
        let text = fs::read_to_string(entry.path()).expect("a file");
        let copy = files.path().join(entry.file_name());
        fs::write(copy, with_ports(&text, &ports)).expect("a file");
    }
    fs::set_permissions(files.path(), Permissions::from_mode(0o755)).expect("a mode");
    let page = blocks(&with_ports(&page("patroni.md"), &ports));
    let path = files.path().display().to_string();
    let variables = [("HA", &*path)];
    assert_eq!(
        markdown::run_unprivileged(&page, directory.path(), &variables),
        10
    );
    // A copy that is not synced does not count as a standby.
    for number in 1..=3 {
        let log = directory.path().join(format!("pg{number}/patroni.log"));
        let log = fs::read_to_string(log).expect("the log of Patroni");
        assert!(!log.contains("\"pg_basebackup\" is now a synchronous standby"));
    }
}

#[test]
fn ports_are_replaced_in_one_pass() {
    let ports = [("2379", "18080".to_owned()), ("8080", "2379".to_owned())];
    assert_eq!(
        with_ports("a:2379,b:8080 12379 8080", &ports),
        "a:18080,b:2379 12379 2379"
    );
}

#[test]
fn the_commands_of_every_page_are_run() {
    let docs = Path::new(ROOT).join("docs");
    for (path, text) in markdown_files() {
        if path.parent() == Some(&docs) && blocks(&text).iter().any(Block::is_shell) {
            let name = path.file_name().and_then(OsStr::to_str).expect("a name");
            assert!(PAGES.contains(&name), "{name} is not run");
        }
    }
    for name in PAGES {
        assert!(page("README.md").contains(&format!("]({name})")), "{name}");
    }
}

/// `cargo run` and the server that it has started, which is known by the process id in its lock file.
struct CargoRun {
    cargo: Child,
    lock: PathBuf,
}

impl CargoRun {
    fn terminate(&self) {
        if let Ok(lock) = fs::read_to_string(&self.lock) {
            let pid = lock.lines().next().unwrap_or_default().trim();
            let _ = Command::new("kill").arg(pid).status();
        }
    }
}

impl Drop for CargoRun {
    fn drop(&mut self) {
        if self.cargo.try_wait().is_ok_and(|ended| ended.is_none()) {
            self.terminate();
            let _ = self.cargo.kill();
            let _ = self.cargo.wait();
        }
    }
}

#[test]
fn readme_commands_print_what_it_says() {
    // Below the project, so that cargo finds it.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    let link = directory.path().join("target");
    std::os::unix::fs::symlink(target.expect("target"), link).expect("a link");
    let address = format!("127.0.0.1:{}", free_port());
    let mut blocks = blocks(&README.replace("127.0.0.1:8080", &address));
    let start = blocks.remove(0);
    assert_eq!(start.text, "cargo run --release -- serve\n");
    blocks.retain(|block| block.text != "make test\n");

    let log = directory.path().join("log");
    let mut cargo = Command::new("bash");
    // What cargo sets for a test, and a user's shell does not have. The build script of a dependency reads it, so that dependency and the
    // binary would be built again, here and by the next command that is not a test.
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let prefixes = ["CARGO_MANIFEST_", "CARGO_PKG_", "OUT_DIR"];
    for name in names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))) {
        cargo.env_remove(name);
    }
    let mut server = CargoRun {
        cargo: cargo
            .args(["-euc", &format!("exec {}", start.text)])
            .env("PLANTSTORE_LISTEN", &address)
            .env("PLANTSTORE_OPS_LISTEN", "127.0.0.1:0")
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log).expect("a file"))
            .spawn()
            .expect("cargo runs"),
        lock: directory.path().join("plantstore.db-lock"),
    };
    let logged = || fs::read_to_string(&log).expect("a file");
    let mut ended = false;
    // It may have to be built first, which takes longer than one wait.
    for _ in 0..40 {
        let wait =
            std::panic::catch_unwind(|| wait_until("it listens", || logged().contains("curl ")));
        ended = server.cargo.try_wait().expect("a child").is_some();
        if wait.is_ok() || ended {
            break;
        }
    }
    assert!(!ended, "{}", logged());

    assert_eq!(markdown::run(&blocks, directory.path(), &[]), 4);
    server.terminate();
    assert!(wait_for_exit(&mut server.cargo).success());
}

#[test]
fn readme_is_short_and_names_what_ci_runs() {
    assert!(README.lines().count() <= 130);
    let ci = include_str!("../../.ci/run");
    assert!(
        ci.lines().any(|line| line.trim() == "exec make test"),
        "{ci}"
    );
    assert!(README.contains("```sh\nmake test\n```"));
}

/// Runs a `console` block that stops and starts the service, as its user would, on the store of this directory.
fn run_as_operator(server: Server, script: &str) -> Server {
    let directory = server.directory().to_owned();
    let mut server = Some(server);
    for line in script.lines() {
        let command = line.strip_prefix("# ").expect("a command");
        match command {
            "systemctl stop plantstore" => {
                assert!(server.as_mut().expect("it runs").terminate().success());
            }
            "systemctl start plantstore" => server = Some(Server::start_in(&directory, &[])),
            _ if command.starts_with("cd ") => {}
            _ => {
                let text = command
                    .replace("sudo -u plantstore ", "")
                    .replace(" --config /etc/plantstore/plantstore.toml", "");
                let language = "sh".to_owned();
                markdown::run(&[Block { language, text }], &directory, &[]);
            }
        }
    }
    server.expect("it was started")
}

#[test]
fn the_documented_restore_replaces_the_store() {
    let directory = directory();
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    run_ok(directory.path(), &["backup", "plants.backup"]);
    server.add_ok(r#"{"id":2,"name":"y"}"#);
    let server = run_as_operator(server, &block(&page("backup.md"), "Restore", "console"));
    assert_eq!(server.plants(), [(1, "x".to_owned(), None)]);
}

#[test]
fn the_documented_deletion_frees_the_id() {
    let directory = directory();
    let server = Server::start_in(directory.path(), &[]);
    server.add_ok(r#"{"id":2,"name":"y"}"#);
    server.add_ok(r#"{"id":1,"name":"x"}"#);
    let script = block(&page("querying.md"), "Change or delete a plant", "console");
    let server = run_as_operator(server, &script);
    assert_eq!(server.plants(), [(2, "y".to_owned(), None)]);
    server.add_ok(r#"{"id":1,"name":"z"}"#);
    assert_eq!(
        run_ok(directory.path(), &["check"]),
        "no damage found: 2 plants, 1 token\n"
    );
}

#[test]
fn the_caddy_example_is_valid() {
    let directory = directory();
    let config = block(&page("security.md"), "Caddy", "caddyfile");
    fs::write(directory.path().join("Caddyfile"), config).expect("a file");
    let mut caddy = tool("caddy");
    caddy
        .args([
            "validate",
            "--config",
            "Caddyfile",
            "--adapter",
            "caddyfile",
        ])
        .env("HOME", directory.path())
        .current_dir(directory.path());
    let output = caddy.output().expect("caddy runs; `make setup` gets it");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn the_haproxy_load_balancer_example_is_valid() {
    let directory = directory();
    let example = block(&page("high-availability.md"), "Load balancer", "haproxy");
    let config = directory.path().join("haproxy.cfg");
    fs::write(&config, example).expect("a file");
    let output = tool("haproxy").arg("-c").arg("-f").arg(&config).output();
    let output = output.expect("haproxy runs; `make setup` installs it");
    assert!(output.status.success(), "{output:?}");
    // It warns about missing timeouts.
    let warnings = String::from_utf8_lossy(&output.stderr);
    assert!(!warnings.contains("timeout"), "{warnings}");
}

/// Every Markdown file for readers: path → text.
fn markdown_files() -> BTreeMap<PathBuf, String> {
    let mut paths = Vec::new();
    for directory in ["", "docs", "docs/decisions"] {
        for entry in fs::read_dir(Path::new(ROOT).join(directory)).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                paths.push(path);
            }
        }
    }
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).expect("a file"));
    paths.into_iter().map(read).collect()
}

/// The anchors of a page, as GitHub makes them from headings.
fn anchors(page: &str) -> Vec<String> {
    let mut in_block = false;
    let mut anchors = Vec::new();
    for line in page.lines() {
        in_block ^= line.trim_start().starts_with("```");
        if let (false, true, Some((_, heading))) =
            (in_block, line.starts_with('#'), line.split_once(' '))
        {
            let kept = heading
                .to_lowercase()
                .replace(|c: char| !(c.is_alphanumeric() || " -_".contains(c)), "");
            anchors.push(kept.replace(' ', "-"));
        }
    }
    anchors
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let files = markdown_files();
    for (path, text) in &files {
        for target in text.split("](").skip(1) {
            let target = target.split(')').next().expect("a target");
            if target.starts_with("http") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let at = || format!("{} links to {target}", path.display());
            let linked = match file {
                "" => path.clone(),
                _ => path.parent().expect("a directory").join(file),
            };
            let linked = linked.canonicalize().unwrap_or_else(|_| panic!("{}", at()));
            if !anchor.is_empty() {
                let found = anchors(&files[&linked]).iter().any(|found| found == anchor);
                assert!(found, "{}", at());
            }
        }
    }
}

#[test]
fn files_of_the_repository_that_the_docs_name_exist() {
    let directories = [
        "src/",
        "tests/",
        "bench/",
        "build/",
        "deploy/",
        "scripts/",
        "migrations/",
    ];
    for (path, text) in markdown_files() {
        for span in text.split('`').skip(1).step_by(2) {
            let is_path = directories
                .iter()
                .any(|directory| span.starts_with(directory))
                && !span.contains(|c: char| c.is_whitespace() || "{*…".contains(c));
            let exists = !is_path || Path::new(ROOT).join(span).exists();
            assert!(exists, "{} names {span}", path.display());
        }
    }
}

/// The code of a page: blocks without line continuations, and spans.
fn code(page: &str) -> Vec<String> {
    let mut code: Vec<_> = blocks(page)
        .iter()
        .flat_map(|block| {
            let joined = block.text.replace("\\\n", " ");
            joined.lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .collect();
    let prose = page.split("```").step_by(2);
    code.extend(prose.flat_map(|prose| {
        let spans = prose.split('`').skip(1).step_by(2);
        spans
            .map(|span| span.replace('\n', " "))
            .collect::<Vec<_>>()
    }));
    code
}

#[test]
fn commands_and_flags_that_the_docs_name_exist() {
    let directory = directory();
    let mut helps = BTreeMap::new();
    let mut help = |command: &str| {
        let arguments: Vec<_> = command.split(' ').chain(["--help"]).collect();
        let text = || run_ok(directory.path(), &arguments);
        helps.entry(command.to_owned()).or_insert_with(text).clone()
    };
    let mut named = 0;
    let mut files = markdown_files();
    files.retain(|path, _| !path.ends_with("ARCHITECTURE.md"));
    for (path, text) in files {
        for line in code(&text) {
            for invocation in line.split("plantstore ").skip(1) {
                let mut words = invocation
                    .split([' ', '|', ';', '>', '\'', '"', ')'])
                    .peekable();
                let Some(mut command) = words.next().map(str::to_owned) else {
                    continue;
                };
                if command.is_empty() || !command.chars().all(|c| c.is_ascii_lowercase()) {
                    continue;
                }
                if command == "token"
                    && let Some(&action) = words.peek()
                    && ["create", "list", "revoke"].contains(&action)
                {
                    command = format!("token {action}");
                }
                let help = help(&command);
                for flag in words.filter(|word| word.starts_with("--")) {
                    let flag = flag.split('=').next().expect("a flag");
                    assert!(help.contains(flag), "{}: {line}", path.display());
                    named += 1;
                }
            }
        }
    }
    assert!(named >= 30, "{named}");
}
