//! The `Authorization` header: whether its bearer token is valid is decided in `crate::auth`.

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, header::HeaderValue};

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
    let (tokens, failures) = (&state.tokens, &state.limits.auth_failures);
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next();
    let is_repeated = values.next().is_some();
    let name = &mut context.token_name;
    let cached = value.filter(|_| !is_repeated);
    let cached = cached.and_then(|value| tokens.cached(value.as_bytes(), context.started, name));
    let count_failure = || failures.count(context.client);
    let authorized = match (cached, value) {
        (Some(authorized), _) => authorized,
        (None, value) => {
            let credentials = match credentials(value, is_repeated, tokens.accepts_jwts()) {
                Ok(credentials) => credentials,
                Err(error) => {
                    count_failure()?;
                    return Err(error);
                }
            };
            let value = value.map_or(&b""[..], HeaderValue::as_bytes);
            match credentials {
                Credentials::Token(token) => {
                    tokens.look_up(value, &token, name, count_failure).await
                }
                Credentials::Jwt(jwt) => {
                    // Boxed, because most requests do not need the memory.
                    Box::pin(tokens.look_up_jwt(value, jwt, name, count_failure)).await
                }
            }
        }
    };
    if let Err(error) = &authorized
        && error.is_failed_authentication()
    {
        count_failure()?;
    }
    let authorized = authorized?;
    context.allowance = authorized.allowance;
    context.connection.set_authenticated();
    Ok(authorized.token)
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
