//! The `Authorization` header: its bearer token becomes a `Caller`. Whether the token is valid is decided in
//! `crate::auth`.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

use crate::auth::AuthError;
use crate::http::AppState;
use crate::http::access_log::RequestNotes;
use crate::http::error::{ApiError, Kind};
use crate::store::TokenId;
use crate::token::Token;

/// The token of an authorised request.
#[derive(Debug)]
pub struct Caller {
    pub(super) token: TokenId,
}

impl FromRequestParts<Arc<AppState>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &Arc<AppState>,
    ) -> Result<Self, ApiError> {
        let token = bearer_token(&parts.headers)?;
        let token = state.tokens.look_up(&token, &state.metrics).await?;
        if let Some(notes) = parts.extensions.get::<RequestNotes>() {
            notes.set_token_name(token.name());
        }
        token.authorize()?;
        Ok(Self { token: token.id() })
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
    Ok(Token::parse(credentials).ok_or(AuthError::UnknownToken)?)
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
    let is_token_char = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    if credentials.is_empty() || !credentials.bytes().all(is_token_char) {
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
