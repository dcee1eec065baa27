-- Times are milliseconds since 1970 in UTC. A token is never deleted, so that a plant always knows who added it.
-- A checksum is over the rest of its row (src/store/sqlite/rows.rs), but for last_used_at.

CREATE TABLE tokens (
    id           INTEGER PRIMARY KEY,
    name         TEXT    NOT NULL UNIQUE,
    digest       BLOB    NOT NULL UNIQUE,
    rate_limit   INTEGER,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    revoked_at   INTEGER,
    last_used_at INTEGER,
    checksum     INTEGER NOT NULL
) STRICT;

CREATE TABLE plants (
    id       INTEGER PRIMARY KEY,
    name     TEXT    NOT NULL,
    tag      TEXT,
    added_at INTEGER NOT NULL,
    added_by INTEGER NOT NULL REFERENCES tokens (id),
    checksum INTEGER NOT NULL
) STRICT;
