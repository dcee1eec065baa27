-- One row. The identity tells stores apart. `clean` is 0 from the start of a server to its end: a database that says 0 is
-- incomplete without its WAL, unless the lock file shows otherwise. `wal_cycle` is raised by one of the first transactions
-- whenever the WAL starts from its beginning, so that the WAL holds the identity of its store (src/store/sqlite/lock.rs).
CREATE TABLE store (
    id        INTEGER PRIMARY KEY CHECK (id = 1),
    identity  BLOB    NOT NULL,
    clean     INTEGER NOT NULL,
    wal_cycle INTEGER NOT NULL
) STRICT;

INSERT INTO store (id, identity, clean, wal_cycle) VALUES (1, randomblob(16), 1, 0);
