-- One row. The identity tells stores apart. The generation grows whenever a server starts or stops and whenever the WAL starts
-- again from its beginning; the highest one is also written to the lock file, so that a missing WAL or an older copy of the
-- database is noticed (src/store/sqlite/session.rs).
CREATE TABLE store (
    id         INTEGER PRIMARY KEY CHECK (id = 1),
    identity   BLOB    NOT NULL,
    generation INTEGER NOT NULL
) STRICT;

INSERT INTO store (id, identity, generation) VALUES (1, randomblob(16), 0);
