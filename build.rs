//! Generates the JSON of `/openapi.json` and the page of `/docs` from the contract, `openapi.yaml`, and gets the commit of the
//! build from git.

#[path = "build/contract.rs"]
mod contract;
#[path = "src/html.rs"]
mod html;
#[path = "build/page.rs"]
mod page;
#[path = "build/version.rs"]
mod version;

use std::{env, error::Error, fs, path::Path};

const TEMPLATE: &str = "src/http/docs/page.html";

fn main() -> Result<(), Box<dyn Error>> {
    version::set_variables();
    for source in ["openapi.yaml", TEMPLATE, "build.rs", "build", "src/html.rs"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let out = env::var("OUT_DIR")?;
    let contract: serde_json::Value = serde_saphyr::from_str(&fs::read_to_string("openapi.yaml")?)?;
    let json = serde_json::to_string_pretty(&contract)? + "\n";
    fs::write(Path::new(&out).join("openapi.json"), json)?;
    let page = page::render(
        &serde_json::from_value(contract)?,
        &fs::read_to_string(TEMPLATE)?,
    )?;
    fs::write(Path::new(&out).join("page.html"), page)?;
    Ok(())
}
