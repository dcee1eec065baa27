//! `POST /plants`: reads the body within its limits, decodes the plant, hands it to the writer and responds.

#[cfg(any(test, feature = "fuzzing"))]
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{HeaderMap, Request};
use tokio::time::{sleep, sleep_until, timeout};

use crate::http::auth::authenticate;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::large_bodies::SMALL_BODY_BYTES;
use crate::http::{AppState, RequestContext, Response, json_headers};
use crate::plant::{NewPlant, Plant};
use crate::shutdown::Phase;
use crate::store::TokenId;
use crate::writer::MemoryPermits;

/// The timeout of a body that is arriving when the server starts to drain.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

pub(super) async fn create_plant<B>(
    state: &AppState,
    request: Request<B>,
    context: &mut RequestContext,
) -> Result<Response, ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (token, plant, permits) = read_plant(state, request, context).await?;
    let plant = state.writer.add(plant, token, permits).await?;
    Ok(plant_response(&plant))
}

/// Without a valid token the body is not read.
pub async fn read_plant<B>(
    state: &AppState,
    request: Request<B>,
    context: &mut RequestContext,
) -> Result<(TokenId, NewPlant, Option<Box<MemoryPermits>>), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let token = authenticate(state, request.headers(), context).await?;
    check_media_type(request.headers())?;
    let (body, permits) = read_body(state, request.into_body(), token, context).await?;
    context.is_body_read = true;
    Ok((token, NewPlant::from_json(&body)?, permits))
}

/// Decodes a plant without a token, and stores nothing.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) async fn decode_request<B>(
    state: Arc<AppState>,
    request: Request<B>,
    mut context: RequestContext,
) -> crate::http::Handled
where
    B: Body<Data = Bytes> + Unpin,
{
    let read = async {
        let (body, _) = read_body(&state, request.into_body(), TokenId(0), &context).await?;
        context.is_body_read = true;
        Ok(plant_response(&NewPlant::from_json(&body)?.plant))
    };
    let result = read.await;
    crate::http::Handled { result, context }
}

/// The 200: the plant is durable.
pub fn plant_response(plant: &Plant) -> Response {
    let body = serde_json::to_vec(plant).expect("two strings can be written as JSON");
    let mut response = Response::new(Full::from(body));
    *response.headers_mut() = json_headers();
    response
}

async fn read_body<B>(
    state: &AppState,
    body: B,
    token: TokenId,
    context: &RequestContext,
) -> Result<(Bytes, Option<Box<MemoryPermits>>), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.size_hint().lower() > state.limits.body_bytes_max as u64 {
        return Err(too_large(state.limits.body_bytes_max));
    }
    let mut read = std::pin::pin!(read_frames(state, body, token));
    // Most bodies have arrived already, and need no timers.
    if let Some(body) = read.as_mut().now_or_never() {
        return body;
    }
    let drained = async {
        state.shutdown.reached(Phase::Draining).await;
        sleep(DRAIN_GRACE).await;
    };
    let request_timeout = state.limits.request_timeout;
    let request_deadline = context.first_byte_at + request_timeout;
    tokio::select! {
        body = timeout(state.limits.body_timeout, read) => body.unwrap_or_else(|_| Err(ApiError::new(
            ErrorKind::RequestTimeout,
            format!(
                "The body did not arrive within {} s; send the request again.",
                state.limits.body_timeout.as_secs_f64()
            ),
        ))),
        () = sleep_until(request_deadline) => Err(ApiError::new(
            ErrorKind::RequestTimeout,
            format!("The request did not arrive within {} s; send it again.", request_timeout.as_secs_f64()),
        )),
        () = drained => Err(ApiError::new(
            ErrorKind::RequestTimeout,
            "The body did not arrive before the service was shut down; send the request again.",
        )),
    }
}

/// A body of several frames is copied into one buffer: each of many small frames would keep a whole read buffer of the
/// connection alive. Waits for permits when more than a small body has arrived.
async fn read_frames<B>(
    state: &AppState,
    mut body: B,
    token: TokenId,
) -> Result<(Bytes, Option<Box<MemoryPermits>>), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let bytes_max = state.limits.body_bytes_max;
    let mut whole = Vec::new();
    let mut permits = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| {
            ApiError::new(
                ErrorKind::MalformedRequest,
                "The body ended early or its chunks are malformed; send the complete request again.",
            )
        })?;
        let Ok(data) = frame.into_data() else {
            continue; // trailers
        };
        if whole.len() + data.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        if permits.is_none() && whole.len() + data.len() > SMALL_BODY_BYTES {
            permits = state.limits.large_bodies.permits(token).await;
        }
        if whole.is_empty() && body.is_end_stream() {
            return Ok((data, permits));
        }
        whole.extend_from_slice(&data);
    }
    Ok((whole.into(), permits))
}

fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let reject = |message| Err(ApiError::new(ErrorKind::UnsupportedMediaType, message));

    let mut types = headers.get_all(CONTENT_TYPE).iter();
    let (Some(content_type), None) = (types.next(), types.next()) else {
        return reject("Give one Content-Type: application/json.");
    };
    // Parameters such as charset change nothing: JSON is UTF-8.
    let essence = content_type.as_bytes().split(|&byte| byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    if !essence.eq_ignore_ascii_case(b"application/json") {
        return reject("The Content-Type must be application/json.");
    }
    let encoded = headers
        .get_all(CONTENT_ENCODING)
        .iter()
        .any(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity"));
    if encoded {
        return reject("The body must not be encoded; leave Content-Encoding out.");
    }
    Ok(())
}

fn too_large(bytes_max: usize) -> ApiError {
    ApiError::new(
        ErrorKind::BodyTooLarge,
        format!("The body is larger than {bytes_max} bytes."),
    )
}
