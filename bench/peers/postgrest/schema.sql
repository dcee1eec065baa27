-- Roles and schema as PostgREST's tutorial has them: an authenticator role that can only switch to other roles.
CREATE SCHEMA api;
CREATE TABLE api.plants (id bigint PRIMARY KEY, name text NOT NULL, tag text);

CREATE ROLE gardener NOLOGIN;
GRANT USAGE ON SCHEMA api TO gardener;
GRANT INSERT ON api.plants TO gardener;

CREATE ROLE authenticator NOINHERIT LOGIN;
GRANT gardener TO authenticator;
