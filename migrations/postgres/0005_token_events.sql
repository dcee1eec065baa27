-- What happened to tokens, in the order of the commits: a node reads it to learn of changes. `event` is created, revoked or copied.
CREATE TABLE IF NOT EXISTS plantstore.token_events (
    number BIGINT PRIMARY KEY,
    token  BIGINT NOT NULL,
    event  TEXT NOT NULL,
    at     TIMESTAMPTZ NOT NULL
)
