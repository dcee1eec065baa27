-- For `plantstore list`, newest first.
CREATE INDEX IF NOT EXISTS plants_by_time ON plantstore.plants (added_at, id)
