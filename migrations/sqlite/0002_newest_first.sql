-- For `plantstore list`, newest first, and for the cut of an export. New entries go to its end: a page a batch.
CREATE INDEX plants_by_time ON plants (added_at);
