-- A token that was rotated has a new secret, and for a while the previous one as well. The checksum covers these columns if it was rotated.
ALTER TABLE tokens ADD COLUMN rotated_at INTEGER;
ALTER TABLE tokens ADD COLUMN previous_digest BLOB;
ALTER TABLE tokens ADD COLUMN previous_expires_at INTEGER;

-- The user of the operating system who ran the command; NULL for events of earlier versions. `event` can also be rotated or renamed.
ALTER TABLE token_events ADD COLUMN by_user TEXT;
