//! The `Authorization` header: whether its bearer token is valid is decided in `crate::auth`.

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, header::HeaderValue};

use crate::http::error::{ApiError, ErrorKind};
use crate::http::{AppState, RequestContext};
use crate::store::TokenId;
use crate::token::Token;

pub async fn authenticate(
    state: &AppState,
    headers: &HeaderMap,
    context: &mut RequestContext,
) -> Result<TokenId, ApiError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(ErrorKind::MissingCredentials)?;
    if values.next().is_some() {
        return Err(ApiError::new(
            ErrorKind::MalformedCredentials,
            "The Authorization header is given more than once; send one.",
        ));
    }
    let (tokens, metrics, name) = (&state.tokens, &state.metrics, &mut context.token_name);
    let authorization = value.as_bytes();
    if let Some(authorized) = tokens.cached(authorization, metrics, name) {
        return Ok(authorized?);
    }
    let token = Token::parse(bearer_credentials(value)?).ok_or(ErrorKind::UnknownToken)?;
    let authorized = tokens.look_up(authorization, &token, metrics, name).await;
    Ok(authorized?)
}

fn bearer_credentials(value: &HeaderValue) -> Result<&str, ErrorKind> {
    let value = value.to_str();
    let value = value.map_err(|_| ErrorKind::MalformedCredentials)?;
    let (scheme, credentials) = value.split_once([' ', '\t']).unwrap_or((value, ""));
    if !scheme.eq_ignore_ascii_case("bearer") {
        // RFC 6750, section 3.1: another scheme counts as no credentials at all.
        return Err(ErrorKind::MissingCredentials);
    }
    let has_tab = value[scheme.len()..].starts_with('\t');
    let credentials = credentials.trim_matches(' ');
    let is_token_char = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
    if has_tab || credentials.is_empty() || !credentials.bytes().all(is_token_char) {
        return Err(ErrorKind::MalformedCredentials);
    }
    Ok(credentials)
}
