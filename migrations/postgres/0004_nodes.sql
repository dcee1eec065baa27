-- One row for each running node, which only that node writes: the readiness probe. Rows that are a day old are deleted.
CREATE TABLE IF NOT EXISTS plantstore.nodes (
    id         BIGINT PRIMARY KEY,
    started_at TIMESTAMPTZ NOT NULL,
    seen_at    TIMESTAMPTZ NOT NULL
)
