-- What happened to tokens, in the order of the commits: a server reads it to learn of changes. `event` is created, revoked or copied.
CREATE TABLE token_events (
    number INTEGER PRIMARY KEY,
    token  INTEGER NOT NULL REFERENCES tokens (id),
    event  TEXT    NOT NULL,
    at     INTEGER NOT NULL
) STRICT;
