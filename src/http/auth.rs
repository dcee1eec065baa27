//! Bearer token → `Caller`. What a header says is checked here; what a token is worth, by
//! `Tokens`.

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

use crate::http::error::{ApiError, Kind};
use crate::http::request_log::Notes;
use crate::http::state::State;
use crate::store::TokenId;
use crate::token::Token;

/// Who is asking.
#[derive(Debug)]
pub struct Caller {
    /// The token that was shown.
    pub token: TokenId,
}

impl FromRequestParts<State> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, ApiError> {
        let token = bearer_token(&parts.headers)?;
        let known = state.tokens.look_up(&token, &state.answers).await?;
        if let Some(notes) = parts.extensions.get::<Notes>() {
            notes.set_caller(known.name());
        }
        known.admit()?;
        Ok(Self { token: known.id() })
    }
}

fn bearer_token(headers: &HeaderMap) -> Result<Token, ApiError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Err(no_credentials());
    };
    if values.next().is_some() {
        return Err(ApiError::new(
            Kind::BadCredentials,
            "The Authorization header is given more than once; send one.",
        ));
    }
    let credentials = bearer_credentials(value)?;
    Token::parse(credentials).ok_or_else(ApiError::unknown_token)
}

fn bearer_credentials(value: &HeaderValue) -> Result<&str, ApiError> {
    let malformed = || {
        ApiError::new(
            Kind::BadCredentials,
            "The Authorization header is malformed; send `Bearer` and one token.",
        )
    };
    let value = value.to_str().map_err(|_| malformed())?;
    let (scheme, credentials) = value.split_once([' ', '\t']).unwrap_or((value, ""));
    if !scheme.eq_ignore_ascii_case("bearer") {
        // RFC 6750, section 3.1: another scheme counts as no credentials at all.
        return Err(no_credentials());
    }
    if value[scheme.len()..].starts_with('\t') {
        return Err(malformed());
    }
    let credentials = credentials.trim_matches(' ');
    let of_a_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    if credentials.is_empty() || !credentials.bytes().all(of_a_token) {
        return Err(malformed());
    }
    Ok(credentials)
}

fn no_credentials() -> ApiError {
    ApiError::new(
        Kind::NoCredentials,
        "This needs a token; send it as `Authorization: Bearer <token>`.",
    )
}
