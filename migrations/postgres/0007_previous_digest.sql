ALTER TABLE plantstore.tokens ADD COLUMN IF NOT EXISTS previous_digest BYTEA
