//! Creates many tokens for the benchmark, in the way of `plantstore token create`, and prints them.

use plantstore::{Mode, Store, Token, TokenRecord};

/// `create_tokens STORE COUNT`, with an existing store.
fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, store, count] = &arguments[..] else {
        anyhow::bail!("usage: create_tokens STORE COUNT");
    };
    let location = store.parse().map_err(anyhow::Error::msg)?;
    let mut store = Store::open(&location, Mode::Write)?;
    for number in 0..count.parse()? {
        let token = Token::generate()?;
        let name = format!("bench-{number}");
        store.create_token(&TokenRecord::new(&name, token.digest()), "bench")?;
        println!("{}", token.reveal());
    }
    Ok(())
}
