//! Cross-origin requests: rejected by browsers unless the operator allows their origin.

use hyper::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD,
    HeaderValue, ORIGIN,
};
use hyper::{HeaderMap, Method, Request, StatusCode};

use crate::http::Response;

/// The response to the question of a browser whether it may send a request, if the origin is allowed.
pub(super) fn preflight<B>(request: &Request<B>, origins: &[HeaderValue]) -> Option<Response> {
    let headers = request.headers();
    let is_preflight = request.method() == Method::OPTIONS
        && headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        && allowed_origin(headers, origins).is_some();
    is_preflight.then(|| {
        let mut response = Response::default();
        *response.status_mut() = StatusCode::NO_CONTENT;
        for (name, value) in [
            (ACCESS_CONTROL_ALLOW_METHODS, "POST"),
            (
                ACCESS_CONTROL_ALLOW_HEADERS,
                "authorization, content-type, traceparent, x-request-id",
            ),
            (ACCESS_CONTROL_MAX_AGE, "600"),
        ] {
            response
                .headers_mut()
                .insert(name, HeaderValue::from_static(value));
        }
        response
    })
}

/// The origin of a request, if it is allowed.
pub(super) fn allowed_origin(headers: &HeaderMap, origins: &[HeaderValue]) -> Option<HeaderValue> {
    if origins.is_empty() {
        return None;
    }
    let mut values = headers.get_all(ORIGIN).iter();
    let origin = values.next().filter(|_| values.next().is_none())?;
    origins.contains(origin).then(|| origin.clone())
}

/// Lets the script of this origin read the response.
pub(super) fn allow(origin: HeaderValue, response: &mut Response) {
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let exposed = "ratelimit, ratelimit-policy, retry-after, x-request-id";
    headers.insert(
        ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static(exposed),
    );
}
