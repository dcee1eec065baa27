-- Text cannot hold U+0000: it is U+001A '0' here, and U+001A itself U+001A '1' (src/store/postgres/rows.rs).
CREATE TABLE IF NOT EXISTS plantstore.plants (
    id       BIGINT PRIMARY KEY,
    name     TEXT NOT NULL,
    tag      TEXT,
    added_at TIMESTAMPTZ NOT NULL,
    added_by BIGINT NOT NULL
)
