//! The `Authorization` header: whether its bearer token is valid is decided in `crate::auth`.

use hyper::header::AUTHORIZATION;
use hyper::{HeaderMap, header::HeaderValue};

use crate::auth::AuthError;
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
            let token = match credentials(value, is_repeated) {
                Ok(token) => token,
                Err(error) => {
                    count_failure()?;
                    return Err(error);
                }
            };
            let value = value.map_or(&b""[..], HeaderValue::as_bytes);
            tokens.look_up(value, &token, name, count_failure).await
        }
    };
    if let Err(AuthError::RevokedToken | AuthError::ExpiredToken) = authorized {
        count_failure()?;
    }
    let authorized = authorized?;
    context.allowance = authorized.allowance;
    context.connection.set_authenticated();
    Ok(authorized.token)
}

pub(crate) fn credentials(
    value: Option<&HeaderValue>,
    is_repeated: bool,
) -> Result<Token, ApiError> {
    let value = value.ok_or(ErrorKind::MissingCredentials)?;
    if is_repeated {
        return Err(ApiError::new(
            ErrorKind::MalformedCredentials,
            "The Authorization header is given more than once; send one.",
        ));
    }
    Ok(Token::parse(bearer_credentials(value)?).ok_or(ErrorKind::UnknownToken)?)
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
