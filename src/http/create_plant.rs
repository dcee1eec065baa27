//! `POST /plants`: reads the body within its limits, decodes the plant, hands it to the writer and responds.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{HeaderMap, Request};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::http::auth::authenticate;
use crate::http::error::{ApiError, ErrorKind, JSON};
use crate::http::{AppState, RequestContext, Response};
use crate::plant::{NewPlant, Plant};
use crate::shutdown::Phase;
use crate::store::TokenId;

/// Bodies up to this size are many and need no permission. Larger ones need a permit, so that all of them together take
/// about `LARGE_BODIES_BYTES` of memory, until their plants are stored.
const SMALL_BODY_BYTES: u64 = 16 << 10;
const LARGE_BODIES_BYTES: usize = 256 << 20;

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
    let (token, plant, permit) = read_plant(state, request, context).await?;
    let plant = state.writer.add(plant, token, permit).await?;
    Ok(plant_response(&plant))
}

/// One permit for each large body that may be in memory.
pub fn large_body_permits(body_bytes_max: usize) -> Arc<Semaphore> {
    Arc::new(Semaphore::new((LARGE_BODIES_BYTES / body_bytes_max).max(1)))
}

/// Without a valid token the body is not read.
pub async fn read_plant<B>(
    state: &AppState,
    request: Request<B>,
    context: &mut RequestContext,
) -> Result<(TokenId, NewPlant, Option<OwnedSemaphorePermit>), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let token = authenticate(state, request.headers(), context).await?;
    check_media_type(request.headers())?;
    let (body, permit) = read_body(state, request.into_body()).await?;
    context.is_body_read = true;
    Ok((token, NewPlant::from_json(&body)?, permit))
}

/// The 200: the plant is durable.
pub fn plant_response(plant: &Plant) -> Response {
    let body = serde_json::to_vec(plant).expect("two strings can be written as JSON");
    let mut response = Response::new(Full::from(body));
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

async fn read_body<B>(
    state: &AppState,
    body: B,
) -> Result<(Bytes, Option<OwnedSemaphorePermit>), ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    if body.size_hint().lower() > state.body_bytes_max as u64 {
        return Err(too_large(state.body_bytes_max));
    }
    let is_small = body
        .size_hint()
        .upper()
        .is_some_and(|bytes| bytes <= SMALL_BODY_BYTES);
    let permits = (!is_small).then(|| Arc::clone(&state.large_body_permits));
    let read = async {
        let permit = match permits {
            Some(permits) => permits.acquire_owned().await.ok(),
            None => None,
        };
        Ok((read_frames(body, state.body_bytes_max).await?, permit))
    };
    let mut read = std::pin::pin!(read);
    // Most bodies have arrived already, and need no timers.
    if let Some(body) = read.as_mut().now_or_never() {
        return body;
    }
    let drained = async {
        state.shutdown.reached(Phase::Draining).await;
        sleep(DRAIN_GRACE).await;
    };
    tokio::select! {
        body = timeout(state.body_timeout, read) => body.unwrap_or_else(|_| Err(ApiError::new(
            ErrorKind::RequestTimeout,
            format!(
                "The body did not arrive within {} s; send the request again.",
                state.body_timeout.as_secs_f64()
            ),
        ))),
        () = drained => Err(ApiError::new(
            ErrorKind::RequestTimeout,
            "The body did not arrive before the service was shut down; send the request again.",
        )),
    }
}

/// A body of several frames is copied into one buffer: each of many small frames would keep a whole read buffer of the
/// connection alive.
async fn read_frames<B>(mut body: B, bytes_max: usize) -> Result<Bytes, ApiError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut whole = Vec::new();
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
        if whole.is_empty() && body.is_end_stream() {
            return Ok(data);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.into())
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
