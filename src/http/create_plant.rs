//! `POST /plants`: reads the body within its limits, decodes the plant, hands it to the writer and responds.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::{FromRequest, Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use tokio::time::{sleep, timeout};

use crate::http::AppState;
use crate::http::access_log::RequestContext;
use crate::http::auth::Caller;
use crate::http::error::{ApiError, ErrorKind};
use crate::plant::{NewPlant, Plant};
use crate::shutdown::Phase;

/// The timeout of a body that is arriving when the server starts to drain.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// Extractors run in order: without a valid token the body is not read.
pub(super) async fn create_plant(
    State(state): State<Arc<AppState>>,
    caller: Caller,
    JsonBody(body): JsonBody,
) -> Result<PlantResponse, ApiError> {
    let plant = NewPlant::from_json(&body)?;
    drop(body); // not needed while the plant waits for its commit
    Ok(PlantResponse(state.writer.add(plant, caller.token).await?))
}

/// The 200: the plant is durable.
pub struct PlantResponse(pub Plant);

impl IntoResponse for PlantResponse {
    fn into_response(self) -> Response {
        let body = serde_json::to_vec(&self.0).expect("two strings can be written as JSON");
        let mut response = Body::from(body).into_response();
        let json = HeaderValue::from_static("application/json");
        response.headers_mut().insert(CONTENT_TYPE, json);
        response
    }
}

/// A body with the media type of JSON, within the limits.
pub struct JsonBody(pub Vec<u8>);

impl FromRequest<Arc<AppState>> for JsonBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<AppState>) -> Result<Self, ApiError> {
        check_media_type(request.headers())?;
        if request.body().size_hint().lower() > state.body_bytes_max as u64 {
            return Err(too_large(state.body_bytes_max));
        }
        let context = request.extensions().get::<Arc<RequestContext>>().cloned();
        let body = read(request.into_body(), state.body_bytes_max);
        let drained = async {
            state.shutdown.reached(Phase::Draining).await;
            sleep(DRAIN_GRACE).await;
        };
        let body = tokio::select! {
            // Most bodies have arrived already.
            biased;
            body = timeout(state.body_timeout, body) => body.unwrap_or_else(|_| Err(ApiError::new(
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
        };
        if let (Ok(_), Some(context)) = (&body, context) {
            context.is_body_read.store(true, Ordering::Relaxed);
        }
        body.map(Self)
    }
}

/// Copies the body into one buffer: each of many small frames would keep a whole read buffer of the connection alive.
async fn read(mut body: Body, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| {
            ApiError::new(
                ErrorKind::MalformedRequest,
                "The body ended early or its chunks are malformed; send the complete request again.",
            )
        })?;
        if let Ok(data) = frame.into_data() {
            if whole.len() + data.len() > bytes_max {
                return Err(too_large(bytes_max));
            }
            whole.extend_from_slice(&data);
        }
    }
    Ok(whole)
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
