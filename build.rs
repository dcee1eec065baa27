//! Turns the contract, `openapi.yaml`, into the JSON that `/openapi.json` serves: one source, two
//! spellings.

use std::{env, error::Error, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=openapi.yaml");
    let contract: serde_json::Value = serde_saphyr::from_str(&fs::read_to_string("openapi.yaml")?)?;
    let json = serde_json::to_string_pretty(&contract)? + "\n";
    fs::write(Path::new(&env::var("OUT_DIR")?).join("openapi.json"), json)?;
    Ok(())
}
