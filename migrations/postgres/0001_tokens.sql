-- A token is never deleted, so that a plant always knows who added it. Numbers come from us: no sequence.
CREATE TABLE IF NOT EXISTS plantstore.tokens (
    id           BIGINT PRIMARY KEY,
    name         TEXT NOT NULL UNIQUE,
    digest       BYTEA NOT NULL UNIQUE,
    rate_limit   BIGINT,
    created_at   TIMESTAMPTZ NOT NULL,
    expires_at   TIMESTAMPTZ,
    revoked_at   TIMESTAMPTZ,
    last_used_at TIMESTAMPTZ
)
