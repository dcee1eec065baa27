//! Statements without names: parsed, bound and executed in one round trip, so that a pooler that gives each transaction another server
//! connection (PgBouncer in transaction mode) can be used. Only the statement of a batch is prepared, and only on a direct connection.

use std::borrow::Cow;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use jiff::Timestamp;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OnceCell;
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Error, Row, RowStream, Statement};

/// A connection for statements. The driver's own `query` and `execute` are not offered: they name every statement.
pub(super) struct Client {
    /// The URL without password, for error messages.
    pub(super) database: String,
    driver: tokio_postgres::Client,
    is_direct: bool,
    prepared: OnceCell<Statement>,
}

/// A value for a statement, with its SQL type.
pub(super) trait Param: ToSql + Sync {
    fn sql_type(&self) -> Type;
}

/// A value that is a column of a row, or an element of an array.
pub(super) trait Scalar: ToSql + Sync {
    const TYPE: Type;
    const ARRAY: Type;
}

macro_rules! scalar {
    ($($value:ty: $scalar:ident, $array:ident;)*) => {
        $(impl Scalar for $value {
            const TYPE: Type = Type::$scalar;
            const ARRAY: Type = Type::$array;
        })*
    };
}

scalar! {
    i64: INT8, INT8_ARRAY;
    &str: TEXT, TEXT_ARRAY;
    String: TEXT, TEXT_ARRAY;
    Cow<'_, str>: TEXT, TEXT_ARRAY;
    &[u8]: BYTEA, BYTEA_ARRAY;
    Timestamp: TIMESTAMPTZ, TIMESTAMPTZ_ARRAY;
}

impl<T: Scalar> Scalar for Option<T> {
    const TYPE: Type = T::TYPE;
    const ARRAY: Type = T::ARRAY;
}

impl<T: Scalar> Param for T {
    fn sql_type(&self) -> Type {
        T::TYPE
    }
}

impl<T: Scalar> Param for Vec<T> {
    fn sql_type(&self) -> Type {
        T::ARRAY
    }
}

impl<T: Scalar> Param for &[T] {
    fn sql_type(&self) -> Type {
        T::ARRAY
    }
}

type Typed<'a> = Vec<(&'a (dyn ToSql + Sync), Type)>;

fn typed<'a>(values: &[&'a dyn Param]) -> Typed<'a> {
    let typed = values.iter().map(|&value| {
        let sql: &(dyn ToSql + Sync) = value;
        (sql, value.sql_type())
    });
    typed.collect()
}

impl Client {
    pub(super) async fn new(
        driver: tokio_postgres::Client,
        database: String,
    ) -> Result<Self, Error> {
        let backend_pid = match driver.query_typed_one("SELECT pg_backend_pid()", &[]).await {
            Ok(row) => row.try_get::<_, i32>(0).ok(),
            // An engine that has no such function.
            Err(error) if error.code().is_some() => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            database,
            is_direct: backend_pid.is_some() && announced_pid(&driver).await == backend_pid,
            prepared: OnceCell::new(),
            driver,
        })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.driver.is_closed()
    }

    pub(super) async fn query(&self, sql: &str, values: &[&dyn Param]) -> Result<Vec<Row>, Error> {
        self.driver.query_typed(sql, &typed(values)).await
    }

    pub(super) async fn query_one(&self, sql: &str, values: &[&dyn Param]) -> Result<Row, Error> {
        self.driver.query_typed_one(sql, &typed(values)).await
    }

    pub(super) async fn query_raw(
        &self,
        sql: &str,
        values: &[&dyn Param],
    ) -> Result<RowStream, Error> {
        self.driver.query_typed_raw(sql, typed(values)).await
    }

    pub(super) async fn execute(&self, sql: &str, values: &[&dyn Param]) -> Result<u64, Error> {
        self.driver.execute_typed(sql, &typed(values)).await
    }

    /// Runs statements without values, in one transaction unless they contain `BEGIN` or `COMMIT`.
    pub(super) async fn batch_execute(&self, sql: &str) -> Result<(), Error> {
        self.driver.batch_execute(sql).await
    }

    /// Runs the statement of a batch, which is prepared once on a direct connection.
    pub(super) async fn query_prepared(
        &self,
        sql: &str,
        values: &[&dyn Param],
    ) -> Result<Vec<Row>, Error> {
        if !self.is_direct {
            return self.query(sql, values).await;
        }
        let prepare = || self.driver.prepare(sql);
        let statement = self.prepared.get_or_try_init(prepare).await?;
        let values: Vec<&(dyn ToSql + Sync)> = values.iter().map(|&value| value as _).collect();
        self.driver.query(statement, &values).await
    }
}

/// The process id of the backend that was announced when the connection was made. A pooler announces a number of its own, which differs
/// from `pg_backend_pid()`. The driver exposes the number only in a cancel request, which is therefore written to memory; nothing is sent.
async fn announced_pid(driver: &tokio_postgres::Client) -> Option<i32> {
    let mut request = Vec::new();
    let stream = Memory(&mut request);
    let written = driver
        .cancel_token()
        .cancel_query_raw(stream, NoHandshake)
        .await;
    // Length, code, process id, key: 4 bytes each, after a request for TLS if the connection is encrypted.
    let pid = request.len().checked_sub(8)?..request.len() - 4;
    written.ok()?;
    Some(i32::from_be_bytes(request[pid].try_into().ok()?))
}

/// Keeps what is written. Reading returns the byte with which a server accepts TLS.
struct Memory<'a>(&'a mut Vec<u8>);

/// Passes the stream through unchanged in place of a TLS handshake.
struct NoHandshake;

impl<'a> TlsConnect<Memory<'a>> for NoHandshake {
    type Stream = Memory<'a>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Memory<'a>>>;

    fn connect(self, stream: Memory<'a>) -> Self::Future {
        std::future::ready(Ok(stream))
    }
}

impl TlsStream for Memory<'_> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Memory<'_> {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buffer.put_slice(b"S");
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Memory<'_> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.extend(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
