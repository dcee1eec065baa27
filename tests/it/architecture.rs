//! Imports between top-level modules point one way, and ARCHITECTURE.md lists every source file.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Top-level modules, one layer per line. A module imports only from layers below its own.
const LAYERS: &[&[&str]] = &[
    &["main"],
    &["lib"],
    &["fuzzing"],
    &["cli"],
    &["server"],
    &["formats"],
    &["http", "ops"],
    &["auth"],
    &["writer"],
    &["config"],
    &["store"],
    &["plant", "token", "metrics", "logging", "shutdown"],
    &["fs", "user", "http_client", "html", "web_page"],
    &["version"],
    &["sqlite_format"],
];

fn layer(module: &str) -> usize {
    let found = LAYERS.iter().position(|layer| layer.contains(&module));
    found.unwrap_or_else(|| panic!("the module {module} is missing in LAYERS"))
}

fn source_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            source_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Every source file below `src`, relative to the project, with its text; unit tests are left out.
fn sources() -> Vec<(String, String)> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    source_files(&project.join("src"), &mut files);
    let relative = |path: &PathBuf| {
        let path = path.strip_prefix(project).expect("below the project");
        path.to_str().expect("UTF-8").to_owned()
    };
    files
        .iter()
        .map(|path| {
            (
                relative(path),
                fs::read_to_string(path).expect("a text file"),
            )
        })
        .filter(|(path, _)| !path.contains("/tests"))
        .collect()
}

/// `src/http/auth.rs` belongs to `http`.
fn top_level_module(path: &str) -> &str {
    let path = path.trim_start_matches("src/").trim_end_matches(".rs");
    path.split('/')
        .next()
        .expect("split yields at least one part")
}

/// The top-level modules that a file names with `crate::…`.
fn imports(code: &str) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    for path in code.split("crate::").skip(1) {
        let names: Vec<&str> = match path.strip_prefix('{') {
            Some(group) => group
                .split('}')
                .next()
                .unwrap_or_default()
                .split(',')
                .collect(),
            None => vec![path],
        };
        for name in names {
            let name = name.trim_start();
            let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_'));
            modules.insert(name[..end.unwrap_or(name.len())].to_owned());
        }
    }
    modules.remove("");
    modules
}

#[test]
fn imports_point_one_way() {
    let sources = sources();
    assert!(sources.len() > 20);
    for (path, source) in &sources {
        let code = source.split("#[cfg(test)]").next().unwrap_or_default();
        let module = top_level_module(path);
        for imported in imports(code) {
            assert!(
                imported == module || layer(&imported) > layer(module),
                "{path} imports from {imported}, which is not below {module}"
            );
        }
    }
}

#[test]
fn every_source_file_starts_with_its_purpose_and_does_not_unwrap() {
    for (path, source) in sources() {
        assert!(
            source.starts_with("//! "),
            "{path} does not start with its purpose"
        );
        for (number, line) in source.lines().enumerate() {
            assert!(!line.contains(".unwrap()"), "{path}:{}", number + 1);
        }
    }
}

/// The files that ARCHITECTURE.md lists: a line begins with one, or with several as in `src/cli/{copy,token}.rs`.
fn listed(text: &str) -> BTreeSet<String> {
    let paths = text.lines().filter(|line| line.starts_with("src/"));
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
fn the_architecture_page_is_short_and_lists_every_source_file_and_no_other() {
    let page = include_str!("../../ARCHITECTURE.md");
    assert!(page.lines().count() < 150);
    let files: BTreeSet<_> = sources().into_iter().map(|(path, _)| path).collect();
    assert_eq!(listed(page), files);
}

#[test]
fn every_direct_dependency_is_justified() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).expect("a manifest");
    let manifest: toml::Table = manifest.parse().expect("TOML");
    let page = include_str!("../../ARCHITECTURE.md");
    let (_, section) = page.split_once("## Dependencies").expect("a section");
    let first_cells = section.lines().filter_map(|line| line.split('|').nth(1));
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let justified: BTreeSet<&str> = first_cells
        .flat_map(|cell| cell.split(|c| !is_name(c)))
        .collect();
    for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
        for name in manifest[kind].as_table().expect("a table").keys() {
            assert!(
                justified.contains(&**name),
                "{name} is not in ARCHITECTURE.md"
            );
        }
    }
}

#[test]
fn every_dependency_comes_from_crates_io() {
    let lock = include_str!("../../Cargo.lock");
    let lock: toml::Table = lock.parse().expect("TOML");
    let packages = lock["package"].as_array().expect("a list");
    assert!(packages.len() > 100);
    for package in packages {
        let text = |key: &str| package.get(key).and_then(toml::Value::as_str);
        let is_ours = text("name") == Some("plantstore");
        let source = "registry+https://github.com/rust-lang/crates.io-index";
        assert!(is_ours || text("source") == Some(source), "{package:?}");
        assert!(is_ours || text("checksum").is_some(), "{package:?}");
    }
}

#[test]
fn every_test_that_the_threat_table_or_the_check_of_engines_names_exists() {
    let table = include_str!("../../SECURITY.md");
    let rows = table.lines().filter(|line| line.starts_with("| "));
    let cells = rows.skip(1).filter_map(|row| row.split('|').nth(3));
    let mut names: Vec<&str> = cells
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    assert!(names.len() > 20, "{names:?}");
    let script = include_str!("../../scripts/check-engine").lines();
    let items = script.filter_map(|line| line.trim().strip_prefix('"')?.strip_suffix("\","));
    let before = names.len();
    names.extend(items.filter(|item| item.contains("::") && !item.contains('"')));
    assert!(names.len() > before + 20, "{names:?}");
    for name in names {
        let mut file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
        let mut text = String::new();
        for part in name.split("::").filter(|part| !part.is_empty()) {
            let [module, function] = [format!("mod {part} {{"), format!("fn {part}()")];
            file.push(part);
            let below = fs::read_to_string(file.with_extension("rs"));
            let is_known = below.is_ok() || text.contains(&module) || text.contains(&function);
            assert!(is_known, "{name}");
            text = below.unwrap_or(text);
        }
    }
}
