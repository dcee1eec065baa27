-- A token that was rotated has a new secret, and for a while the previous one as well.
ALTER TABLE plantstore.tokens ADD COLUMN IF NOT EXISTS rotated_at TIMESTAMPTZ
