//! The `Authorization` header: its bearer token becomes a `Caller`. Whether the token is valid is decided in
//! `crate::auth`.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};

use crate::http::AppState;
use crate::http::access_log::RequestContext;
use crate::http::error::{ApiError, ErrorKind};
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
        if let Some(context) = parts.extensions.get::<Arc<RequestContext>>() {
            let _ = context.token_name.set(Arc::clone(&token.record.name));
        }
        token.authorize()?;
        Ok(Self {
            token: token.record.id,
        })
    }
}

fn bearer_token(headers: &HeaderMap) -> Result<Token, ApiError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(ErrorKind::MissingCredentials)?;
    if values.next().is_some() {
        return Err(ApiError::new(
            ErrorKind::MalformedCredentials,
            "The Authorization header is given more than once; send one.",
        ));
    }
    let credentials = bearer_credentials(value)?;
    Ok(Token::parse(credentials).ok_or(ErrorKind::UnknownToken)?)
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
