//! The `Authorization` header: whether its bearer token is valid is decided in `crate::auth`.

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, header::HeaderValue};

use crate::auth::{AuthError, Authorized};
use crate::http::error::{ApiError, ErrorKind};
use crate::http::{AppState, RequestContext};
use crate::store::TokenId;
use crate::token::Token;

/// A client that fails too often is rejected before its token is looked for in the store.
pub async fn authenticate(
    state: &AppState,
    headers: &HeaderMap,
    context: &mut RequestContext,
) -> Result<TokenId, ApiError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next();
    let is_repeated = values.next().is_some();
    let (started, name) = (context.started, &mut context.token_name);
    let cached = value.filter(|_| !is_repeated);
    let cached = cached.and_then(|value| state.tokens.cached(value.as_bytes(), started, name));
    let authorized = match cached {
        Some(authorized) => authorized,
        // In a box, because most requests do not need the memory.
        None => Box::pin(look_up(state, value, is_repeated, context)).await?,
    };
    if let Err(error) = &authorized
        && error.is_failed_authentication()
    {
        state.limits.auth_failures.count(context.client)?;
    }
    let authorized = authorized?;
    context.allowance = authorized.allowance;
    context.connection.set_authenticated();
    Ok(authorized.token)
}

/// For credentials that were not used before, or not for a while.
async fn look_up(
    state: &AppState,
    value: Option<&HeaderValue>,
    is_repeated: bool,
    context: &mut RequestContext,
) -> Result<Result<Authorized, AuthError>, ApiError> {
    let tokens = &state.tokens;
    let count_failure = || state.limits.auth_failures.count(context.client);
    let credentials = match credentials(value, is_repeated, tokens.accepts_jwts()) {
        Ok(credentials) => credentials,
        Err(error) => {
            count_failure()?;
            return Err(error);
        }
    };
    let value = value.map_or(&b""[..], HeaderValue::as_bytes);
    let name = &mut context.token_name;
    Ok(match credentials {
        Credentials::Token(token) => tokens.look_up(value, &token, name, count_failure).await,
        Credentials::Jwt(jwt) => tokens.look_up_jwt(value, jwt, name, count_failure).await,
    })
}

pub(crate) enum Credentials<'a> {
    Token(Token),
    /// Anything but a token, if JWTs are accepted.
    Jwt(&'a str),
}

pub(crate) fn credentials(
    value: Option<&HeaderValue>,
    is_repeated: bool,
    accepts_jwts: bool,
) -> Result<Credentials<'_>, ApiError> {
    let value = value.ok_or(ErrorKind::MissingCredentials)?;
    if is_repeated {
        return Err(ApiError::new(
            ErrorKind::MalformedCredentials,
            "The Authorization header is given more than once; send one.",
        ));
    }
    let credentials = bearer_credentials(value)?;
    match Token::parse(credentials) {
        Some(token) => Ok(Credentials::Token(token)),
        None if accepts_jwts => Ok(Credentials::Jwt(credentials)),
        None => Err(ErrorKind::UnknownToken.into()),
    }
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
