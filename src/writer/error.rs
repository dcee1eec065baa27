//! What a client is told when its plant was not added.

use crate::metrics::{Adds, Figure};
use crate::store::StoreError;

/// Why a plant was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The id belongs to a different plant.
    #[error("the id belongs to a different plant")]
    Taken,
    /// Nothing was stored: too many plants are waiting already, or others use the store.
    #[error("the store is busy")]
    Busy,
    /// Nothing was stored: the store cannot be reached, or rejects what it is given.
    #[error("the store cannot be reached or used")]
    Unreachable,
    /// Nothing was stored: no room.
    #[error("the store is full")]
    Full,
    /// The plant may or may not be stored.
    #[error("the store did not confirm a write, which may or may not be stored")]
    Unknown,
    /// The plant that has the id is no longer what was stored.
    #[error("the stored plant is damaged")]
    Damaged,
}

impl AddError {
    /// The counter of adds that ended like this.
    pub fn counter(self, adds: &Adds) -> &Figure {
        match self {
            Self::Taken => &adds.taken,
            Self::Busy => &adds.busy,
            Self::Unreachable => &adds.unreachable,
            Self::Full => &adds.full,
            Self::Unknown => &adds.unknown,
            Self::Damaged => &adds.damaged,
        }
    }
}

impl From<&StoreError> for AddError {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::Busy(_) => Self::Busy,
            StoreError::Unavailable(_) | StoreError::Unusable(_) => Self::Unreachable,
            StoreError::Full(_) => Self::Full,
            StoreError::Unknown(_) | StoreError::Fatal(_) => Self::Unknown,
            StoreError::Damaged(_) => Self::Damaged,
        }
    }
}
