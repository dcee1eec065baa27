-- For `plantstore list`, newest first, and for the cutoff of an export: one row per transaction that added plants, instead of an index entry
-- per plant. `ids` has eight bytes for each of its plants, big-endian.
CREATE TABLE batches (
    number   INTEGER PRIMARY KEY,
    added_at INTEGER NOT NULL,
    ids      BLOB    NOT NULL
) STRICT;

INSERT INTO batches (number, added_at, ids)
    SELECT batch, max(added_at), unhex(group_concat(printf('%016x', id), '')) FROM plants WHERE batch <> 0 GROUP BY batch;

-- Plants that were copied, or stored before there were batches, are listed by time. The index takes the page of the old one, so that a new
-- store has no free pages.
DROP INDEX plants_by_batch;
CREATE INDEX plants_without_batch ON plants (added_at) WHERE batch = 0;
