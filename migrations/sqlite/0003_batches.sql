-- The order of plants does not depend on the clock. `batch` numbers the transactions that add plants. It is 0 for plants that were stored
-- before this version or copied from another store: those are ordered by `added_at`, before all others.
ALTER TABLE plants ADD COLUMN batch INTEGER NOT NULL DEFAULT 0;
-- For `plantstore list`, newest first, and for the cutoff of an export. New entries are appended.
CREATE INDEX plants_by_batch ON plants (batch, added_at);
DROP INDEX IF EXISTS plants_by_time;
