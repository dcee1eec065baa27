//! The house: imports point one way, in the order of reading; files stay small; the map is short.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every module, a line a floor: one may import from the floors below its own, never from above.
/// Within `http`, `store` and the like, the order is that of the list.
const FLOORS: &[&[&str]] = &[
    &["main"],
    &["lib"],
    &["cli"],
    &[
        "cli::serve",
        "cli::token",
        "cli::list",
        "cli::get",
        "cli::stats",
        "cli::backup",
        "cli::restore",
        "cli::check",
        "cli::export",
        "cli::import",
        "cli::copy",
        "cli::migrate",
        "cli::openapi",
        "cli::completions",
        "cli::man",
    ],
    &["cli::export::target", "cli::import::tally"],
    &["cli::import::batches"],
    &["cli::transfer", "cli::verify", "cli::newest", "cli::listed"],
    &["cli::output", "cli::progress"],
    &["cli::text"],
    &["server"],
    &["server::connections"],
    &["server::first_run", "server::systemd", "server::workers"],
    &["config"],
    &["exchange"],
    &["exchange::ndjson", "exchange::csv"],
    &["exchange::source"],
    &["http", "ops"],
    &["ops::page"],
    &["ops::process", "ops::readiness"],
    &["http::connection"],
    &["http::create_plant", "http::docs"],
    &["http::auth"],
    &["http::state"],
    &["http::tokens"],
    &["http::stream"],
    &["http::request_log"],
    &["http::error", "http::trace_context"],
    &["writer"],
    &["writer::pulse"],
    &["writer::desk"],
    &["writer::batch"],
    &["writer::post", "writer::call", "writer::health"],
    &["writer::error"],
    &["writer::in_hand"],
    &["store"],
    &["store::sqlite", "store::postgres", "store::rehearsal"],
    &["store::sqlite::statistics"],
    &[
        "store::sqlite::backup",
        "store::sqlite::restore",
        "store::sqlite::check",
        "store::sqlite::checkpoints",
        "store::sqlite::cut",
        "store::sqlite::search",
        "store::sqlite::tally",
        "store::sqlite::tokens",
        "store::postgres::batch",
        "store::postgres::export",
        "store::postgres::keep",
        "store::postgres::search",
        "store::postgres::statistics",
        "store::postgres::tokens",
    ],
    &[
        "store::sqlite::partial",
        "store::sqlite::pace",
        "store::sqlite::scan",
    ],
    &[
        "store::sqlite::open",
        "store::postgres::link",
        "store::postgres::rows",
    ],
    &[
        "store::sqlite::files",
        "store::sqlite::log",
        "store::sqlite::rows",
        "store::postgres::session",
    ],
    &["store::postgres::tls", "store::postgres::text"],
    &["store::error"],
    &["store::contract"],
    &["store::search"],
    &["store::url"],
    &["plant", "token"],
    &["metrics", "telemetry"],
    &["telemetry::json_lines"],
    &["version"],
];

fn floor(module: &str) -> usize {
    let found = FLOORS.iter().position(|floor| floor.contains(&module));
    found.unwrap_or_else(|| panic!("{module} has no place in the house"))
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn modules() -> Vec<(String, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let name = |path: &Path| {
        let path = path
            .strip_prefix(&src)
            .expect("below src")
            .with_extension("");
        let parts: Vec<_> = path
            .iter()
            .map(|part| part.to_str().expect("UTF-8"))
            .collect();
        parts.join("::").trim_end_matches("::mod").to_owned()
    };
    let modules = files
        .iter()
        .map(|path| (name(path), fs::read_to_string(path).expect("a file")));
    modules
        .filter(|(name, _)| !name.split("::").any(|part| part == "tests"))
        .collect()
}

/// The modules that a file names with `crate::…`, as deep as they go.
fn imports(source: &str) -> BTreeSet<String> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let known: Vec<&str> = FLOORS
        .iter()
        .flat_map(|floor| floor.iter().copied())
        .collect();
    let mut found = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        let statement = path.split(';').next().unwrap_or_default();
        let (base, group) = statement.split_once('{').unwrap_or((statement, ""));
        let items = group
            .split([',', '}', '\n'])
            .map(str::trim)
            .filter(|item| !item.is_empty());
        let paths: Vec<String> = if group.is_empty() {
            vec![base.to_owned()]
        } else {
            items.map(|item| format!("{base}{item}")).collect()
        };
        for path in paths {
            let end = path.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
            let path = &path[..end.unwrap_or(path.len())];
            let deepest = known
                .iter()
                .filter(|module| path == **module || path.starts_with(&format!("{module}::")))
                .max_by_key(|module| module.len());
            found.insert(
                deepest
                    .unwrap_or_else(|| panic!("crate::{path}?"))
                    .to_string(),
            );
        }
    }
    found
}

#[test]
fn imports_point_one_way() {
    let modules = modules();
    assert!(modules.len() > 20);
    for (module, source) in &modules {
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        assert!(
            !code.contains("super::"),
            "{module} imports from its parent"
        );
        for imported in imports(source) {
            assert!(
                floor(&imported) > floor(module),
                "{module} imports {imported}, which stands above it"
            );
        }
    }
}

#[test]
fn every_file_says_what_it_is_for_and_stays_small() {
    for (module, source) in modules() {
        assert!(
            source.starts_with("//! "),
            "{module} does not say what it is for"
        );
        let lines = source.lines().count();
        assert!(
            lines <= 400,
            "{module} has {lines} lines and is probably two things"
        );
        for (number, line) in source.lines().enumerate() {
            assert!(!line.contains(".unwrap()"), "{module}:{}", number + 1);
        }
    }
}

/// The files that the map names: a line begins with one, or with several as in `src/cli/{copy,token}.rs`.
fn mapped(map: &str) -> BTreeSet<String> {
    let paths = map.lines().filter(|line| line.starts_with("src/"));
    let paths = paths.filter_map(|line| line.split(' ').next());
    let expand = |path: &str| match path.split_once('{') {
        Some((folder, rest)) => {
            let (names, ending) = rest.split_once('}').expect("a closing brace");
            let path = |name: &str| format!("{folder}{name}{ending}");
            names.split(',').map(path).collect()
        }
        None => vec![path.to_owned()],
    };
    paths.flat_map(expand).collect()
}

#[test]
fn the_map_of_the_house_is_short_and_names_every_file_and_no_other() {
    let map = include_str!("../../ARCHITECTURE.md");
    assert!(map.lines().count() < 150);
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&project.join("src"), &mut files);
    let path = |file: &PathBuf| {
        file.strip_prefix(project)
            .expect("ours")
            .display()
            .to_string()
    };
    let files = files.iter().map(path);
    let files: BTreeSet<_> = files.filter(|path| !path.contains("/tests")).collect();
    assert_eq!(mapped(map), files);
}
