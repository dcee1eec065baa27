//! Runs the commands of a Markdown page as a reader would type them, and compares what they print with the page.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::geteuid;

/// A fenced block, without the indentation that it has in a list.
pub struct Block {
    pub language: String,
    pub text: String,
}

impl Block {
    pub fn is_shell(&self) -> bool {
        self.language == "sh"
    }
}

pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else {
            continue;
        };
        let indentation = line.len() - line.trim_start().len();
        let mut text = String::new();
        for line in lines.by_ref().take_while(|line| line.trim() != "```") {
            text += line.get(indentation..).unwrap_or_default();
            text.push('\n');
        }
        let language = language.to_owned();
        blocks.push(Block { language, text });
    }
    blocks
}

/// The first block in this language below this heading.
pub fn block(page: &str, heading: &str, language: &str) -> String {
    let (_, section) = page
        .split_once(&format!("# {heading}\n"))
        .unwrap_or_else(|| panic!("there is no heading {heading:?}"));
    let found = blocks(section)
        .into_iter()
        .find(|block| block.language == language);
    let found = found.unwrap_or_else(|| panic!("no {language} block below {heading:?}"));
    found.text
}

/// Runs `sh` blocks in one shell, one after the other, with `plantstore` in its path. The block after one is what it prints,
/// where `…` stands for any text, unless that is `sh` or `console` again. Returns how many outputs were compared.
pub fn run(blocks: &[Block], directory: &Path, variables: &[(&str, &str)]) -> usize {
    let binary = Path::new(env!("CARGO_BIN_EXE_plantstore"));
    let mut bash = Command::new("timeout");
    bash.args(["600", "bash"]);
    run_in(bash, binary, blocks, directory, variables)
}

/// The same for programs that do not run as root, and with more time.
pub fn run_unprivileged(blocks: &[Block], directory: &Path, variables: &[(&str, &str)]) -> usize {
    // The user may have no access to the directory of the binary.
    let binary = directory.join("bin/plantstore");
    fs::create_dir(directory.join("bin")).expect("a directory");
    fs::copy(env!("CARGO_BIN_EXE_plantstore"), &binary).expect("a copy");
    let mut bash = Command::new("timeout");
    // Far longer than the longest page takes.
    bash.arg("3600");
    if geteuid().is_root() {
        let owner = Command::new("chown")
            .args(["-R", "nobody:nogroup"])
            .arg(directory)
            .status();
        assert!(owner.expect("chown runs").success());
        bash.args(["setpriv", "--reuid=nobody", "--regid=nogroup"]);
        bash.arg("--clear-groups");
    }
    bash.arg("bash");
    run_in(bash, &binary, blocks, directory, variables)
}

fn run_in(
    bash: Command,
    binary: &Path,
    blocks: &[Block],
    directory: &Path,
    variables: &[(&str, &str)],
) -> usize {
    const MARK: &str = "--- end of block ---";
    let mut script = "trap 'jobs -p | xargs --no-run-if-empty kill; wait' EXIT\n".to_owned();
    let variables = [variables, &[("MARK", MARK)]].concat();
    for block in blocks.iter().filter(|block| block.is_shell()) {
        script += &block.text;
        script += "\nprintf '\\n%s\\n' \"$MARK\"\n";
    }
    let (printed, complaints, succeeded) = shell(bash, binary, &script, directory, &variables);
    let mut printed: Vec<_> = printed.split(&format!("\n{MARK}\n")).collect();
    let rest = printed.pop().unwrap_or_default();
    let scripts: Vec<_> = blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.is_shell())
        .collect();
    if let Some((_, failed)) = scripts.get(printed.len()) {
        panic!("{}\nfailed:\n{rest}\n{complaints}", failed.text);
    }
    assert!(succeeded, "{complaints}");

    let mut compared = 0;
    for ((at, block), printed) in scripts.into_iter().zip(printed) {
        let Some(expected) = blocks.get(at + 1) else {
            continue;
        };
        if !["sh", "console"].contains(&expected.language.as_str()) {
            let (script, expected) = (&block.text, &expected.text);
            assert!(
                matches(printed, expected),
                "{script}\nprinted\n{printed}\ninstead of\n{expected}"
            );
            compared += 1;
        }
    }
    compared
}

/// Standard output, standard error, and whether every command succeeded.
fn shell(
    mut bash: Command,
    binary: &Path,
    script: &str,
    directory: &Path,
    variables: &[(&str, &str)],
) -> (String, String, bool) {
    let binaries = binary.parent().expect("a directory").display();
    let path = std::env::var("PATH").expect("a path");
    bash.args(["-euo", "pipefail", "-c", script])
        .current_dir(directory)
        .stdin(Stdio::null())
        .env("PATH", format!("{binaries}:{path}"))
        .env_remove("PLANTSTORE_STORE")
        .envs(variables.iter().copied());
    let output = bash.output().expect("bash runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    let succeeded = output.status.success();
    (text(output.stdout), text(output.stderr), succeeded)
}

/// True if a text is as expected, where `…` stands for any text.
fn matches(text: &str, expected: &str) -> bool {
    let mut parts = expected.trim_end().split('…').peekable();
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.trim_end().strip_prefix(first) else {
        return false;
    };
    while let Some(part) = parts.next() {
        let is_last = parts.peek().is_none();
        let at = if is_last {
            rest.ends_with(part).then(|| rest.len() - part.len())
        } else {
            rest.find(part)
        };
        let Some(at) = at else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

#[test]
fn an_ellipsis_in_the_expected_output_stands_for_any_text() {
    assert!(matches("a b\n", "a b"));
    assert!(matches("a 17 b 18\n", "a … b …"));
    assert!(!matches("a 17 b 18 c\n", "a … b 18"));
    assert!(!matches("a 17\n", "b …"));
}

#[test]
fn a_block_in_a_list_loses_its_indentation() {
    let page = "1. First:\n\n   ```sh\n   for x in 1; do\n     echo $x\n   done\n   ```\n";
    let found = blocks(page);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].text, "for x in 1; do\n  echo $x\ndone\n");
}

#[test]
#[should_panic(expected = "instead of")]
fn output_that_differs_from_the_page_is_reported() {
    let page = "```sh\necho 1\n```\n\n```text\n2\n```\n";
    run(&blocks(page), Path::new("/"), &[]);
}

#[test]
#[should_panic(expected = "failed")]
fn a_command_that_fails_is_reported() {
    run(
        &blocks("```sh\ntrue\n```\n\n```sh\nfalse\n```\n"),
        Path::new("/"),
        &[],
    );
}
