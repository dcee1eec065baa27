//! All plants of one moment: one transaction that sees what was committed when it began.

use std::future::Future;
use std::ops::ControlFlow;
use std::pin::pin;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use tokio::time::timeout;
use tokio_postgres::Error;

use crate::store::error::StoreError;
use crate::store::postgres::client::Param;
use crate::store::postgres::retry::Link;
use crate::store::postgres::rows::plant_record;
use crate::store::postgres::session::Session;
use crate::store::types::Page;

/// So many in one statement: some servers end what takes long.
const STATEMENT_LEN: i64 = 10_000;

const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
const SELECT: &str = "SELECT id, name, tag, added_at, added_by FROM plantstore.plants WHERE id >= $1 ORDER BY id LIMIT $2";

impl Link {
    /// Hands over the pages, until that is enough. A connection that is lost takes the transaction with it, so nothing is
    /// tried again.
    pub async fn export(
        &mut self,
        hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let patience = self.timeout;
        let session = self.session().await;
        let session = session.map_err(|error| StoreError::Unavailable(error.into()))?;
        let read = Reading { session, patience };
        let done = read.all(hand_over).await;
        // With it goes the transaction.
        self.session = None;
        done
    }
}

struct Reading<'a> {
    session: &'a Session,
    /// For whatever is asked.
    patience: Duration,
}

impl Reading<'_> {
    async fn all(
        &self,
        hand_over: &mut dyn FnMut(&Page) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.answer(self.session.client.batch_execute(BEGIN))
            .await?;
        let mut next = Some(i64::MIN);
        while let Some(first) = next {
            let values: [&dyn Param; 2] = [&first, &STATEMENT_LEN];
            let rows = self.session.client.query_raw(SELECT, &values);
            let mut rows = pin!(self.answer(rows).await?.fuse());
            next = None;
            loop {
                let mut page = Page::default();
                while !page.is_full()
                    && let Some(row) = self.answer(rows.try_next()).await?
                {
                    page.push(plant_record(&row)?);
                }
                if page.plants.is_empty() {
                    break;
                }
                next = page.next_id();
                if hand_over(&page).is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    async fn answer<T>(
        &self,
        question: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, StoreError> {
        match timeout(self.patience, question).await {
            Ok(answer) => answer.map_err(|error| StoreError::Unknown(error.into())),
            Err(elapsed) => Err(StoreError::Unknown(elapsed.into())),
        }
    }
}
