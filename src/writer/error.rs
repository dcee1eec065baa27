//! What a client is told when its plant was not added.

/// Why a plant was not added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The id belongs to a different plant.
    #[error("the id belongs to a different plant")]
    Taken,
    /// Nothing was stored: too many are waiting already, or the store cannot take it now.
    #[error("the store is busy or cannot be reached")]
    Busy,
    /// Nothing was stored: no room.
    #[error("the store is full")]
    Full,
    /// Nobody knows whether it was stored.
    #[error("the answer of the store was lost")]
    Lost,
    /// The plant that has the id is no longer what was stored.
    #[error("the stored plant is damaged")]
    Damaged,
}
