-- The user of the operating system who ran the command; NULL for events of earlier versions. `event` can also be rotated or renamed.
ALTER TABLE plantstore.token_events ADD COLUMN IF NOT EXISTS by_user TEXT
