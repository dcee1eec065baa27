-- For `plantstore list`, newest first.
CREATE INDEX IF NOT EXISTS plants_by_time ON plants (added_at, id)
