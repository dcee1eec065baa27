ALTER TABLE plantstore.tokens ADD COLUMN IF NOT EXISTS previous_expires_at TIMESTAMPTZ
