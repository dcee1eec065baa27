# `make test` runs everything that CI runs; `make check` is the quick part of it. The other targets take longer or are parts.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
TOOLS := $(TARGET)/tools
ABOUT_VERSION := 0.9.3
DENY_VERSION := 0.20.2
DEB_VERSION := 3.8.0
FUZZ_VERSION := 0.13.2
CYCLONEDX_VERSION := 0.5.9
FAULT_TOOLS := strace libfaketime postgresql haproxy pgbouncer etcd-server etcd-client openssl python3-venv

# Test modules that run against PostgreSQL as well as SQLite.
ON_BOTH_STORES := contract:: errors:: tokens:: connections:: logging:: monitoring:: import_export:: copy:: list:: backup:: outage:: oidc::jwts packaging::systemd

.PHONY: test tests-sqlite tests-postgres tests-programs check setup fmt lint docs deny advisories build build-tests it it-sqlite it-readme it-tls it-http2 it-postgres browser clients generated-clients generated-clients-all manifests acme faults-sample accidents faults-transports faults-patroni faults-patroni-all faults schemathesis upgrade engine harden fuzz bench bench-tls bench-variants bench-growth bench-scale bench-tokens bench-backup bench-import instructions bench-build release clean

# Builds everything once, for the tests, the lints and the README's `cargo run --release`: with the checks of a debug build and without
# optimisation, which takes half of the time. `make release` tests the binary that is published.
test: export CARGO_PROFILE_RELEASE_LTO := off
test: export CARGO_PROFILE_RELEASE_CODEGEN_UNITS := 16
test: export CARGO_PROFILE_RELEASE_OPT_LEVEL := 0
test: export CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS := true
test: export CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS := true
test: export PROFILE := --release
test: setup fmt
	@$(PART) build-tests lint docs
	@$(MAKE) --no-print-directory --jobs=3 tests-sqlite tests-postgres tests-programs
	@echo "all tests passed"

# Without the job server of make, which would limit each cargo to one process.
PART := env MAKEFLAGS= $(MAKE) --no-print-directory CARGO="$(CARGO)"

# The tests mostly wait, for disks, databases and timeouts, so three parts run at the same time. Every line of output starts with the
# name of its part; a failure of a command before the pipe is a failure of the part.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
LABEL = 2>&1 | sed --unbuffered 's/^/$@: /'

tests-sqlite:
	@$(PART) it-sqlite faults-sample $(LABEL)

tests-postgres:
	@$(PART) it-postgres it-tls it-http2 faults-patroni faults-transports $(LABEL)

# Tests of the binary from outside.
tests-programs:
	@$(PART) it-readme browser clients generated-clients manifests acme schemathesis accidents $(LABEL)

# Needs only Rust and a C compiler.
check: fmt lint docs

# Installs the tools of the tests: curl, sqlite3 and rsync (commands in README.md and docs/), strace, libfaketime, PostgreSQL,
# PgBouncer, Patroni, etcd and HAProxy (faults), openssl (certificates), Python (Schemathesis), promtool (metrics), nginx and
# Caddy (configurations in the docs), Node.js and Chromium (docs page, status page, generated clients), h2load and wrk (clients over TLS), certbot and Pebble
# (ACME), an identity provider (JWTs). The full-disk fault mounts a tmpfs, which needs root or sudo.
setup: $(TOOLS)/bin/promtool $(TOOLS)/bin/nginx $(TOOLS)/bin/caddy
	@scripts/install-missing curl sqlite3 rsync $(FAULT_TOOLS) python3 nodejs npm chromium nghttp2-client wrk certbot pebble
	@scripts/install-patroni
	@scripts/npm-install tests/oidc

fmt:
	$(CARGO) fmt --check

lint:
	$(CARGO) clippy $(PROFILE) --all-targets --locked -- -D warnings
	$(CARGO) clippy $(PROFILE) --test faults --locked -- -D warnings

# With the examples, so that the dependencies have the same features as in `lint` and are not checked twice.
docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(PROFILE) --lib --examples --no-deps --document-private-items --locked

# Licences, sources and duplicates: a part of `make release`. `make advisories` needs the advisory database from the network.
deny: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --locked check bans licenses sources

advisories: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --locked check advisories

# Without optimisation and debug information it compiles fastest.
$(TOOLS)/bin/cargo-deny:
	CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) install cargo-deny --version $(DENY_VERSION) --locked --debug --root $(TOOLS)

# Validates metrics, alerts and the dashboard.
$(TOOLS)/bin/promtool:
	scripts/unpack-tool prometheus /usr/bin/promtool $@

# Validate the reverse proxy configurations of docs/security.md.
$(TOOLS)/bin/nginx:
	scripts/unpack-tool nginx /usr/sbin/nginx $@

$(TOOLS)/bin/caddy:
	scripts/unpack-tool caddy /usr/bin/caddy $@

build:
	$(CARGO) build --release --locked

build-tests:
	$(CARGO) test $(PROFILE) --locked --lib --test it --test faults --no-run

it: it-sqlite it-readme it-tls it-http2 it-postgres

it-sqlite:
	$(CARGO) test $(PROFILE) --locked --lib --test it -- --skip documentation::readme

# Waits for the release build, and would keep other tests waiting.
it-readme:
	$(CARGO) test $(PROFILE) --locked --test it -- documentation::readme

# The tests of the public listener again, over TLS and over HTTP/2. A module http1 or plaintext has what does not apply there.
ON_ALL_TRANSPORTS := contract:: errors:: tokens:: connections:: logging::

it-tls:
	TRANSPORT=tls $(CARGO) test $(PROFILE) --locked --test it -- $(ON_ALL_TRANSPORTS) --skip ::plaintext::

it-http2:
	TRANSPORT=http2 $(CARGO) test $(PROFILE) --locked --test it -- $(ON_ALL_TRANSPORTS) --skip ::plaintext:: --skip ::http1::

it-postgres:
	scripts/with-postgres $(CARGO) test $(PROFILE) --locked --test it -- --include-ignored $(ON_BOTH_STORES) postgres:: documentation::page outage::an_outage_of_the_database

# The docs page and the status page in Chromium; screenshots are in target/docs-page.
browser: build
	tests/browser/run $(TARGET)/release/plantstore $(TARGET)/docs-page

# Adds plants over TLS with curl, h2load, wrk, httpx and Node.js.
clients: build
	tests/clients/run $(TARGET)/release/plantstore

# Generates the clients of docs/clients.md and runs its examples; checks openapi.yaml with two linters.
generated-clients: build
	tests/generated_clients/run $(TARGET)/release/plantstore lint curl python typescript

# The examples in Rust and Go too, whose dependencies take some minutes; `make release` runs these.
generated-clients-all: generated-clients
	@scripts/install-missing golang-go
	tests/generated_clients/run $(TARGET)/release/plantstore rust go

# Validates deploy/kubernetes.yaml and deploy/compose.yaml.
manifests: build
	tests/manifests/run $(TARGET)/release/plantstore

# The recipe for Let's Encrypt in docs/security.md, against a server for tests.
acme: build
	tests/acme/run $(TARGET)/release/plantstore

# A sample of the faults, and the deliberate breaks that the suite has to detect.
faults-sample:
	$(CARGO) test $(PROFILE) --locked --test faults -- --faults-only --cuts 1000 --kills 20 --step 20 --each 2 \
	  --failovers 1 --standby-losses 1 --connection-cuts 20 --rolling 1

# Mistakes of an operator. Their deliberate breaks are in `faults-sample`.
accidents:
	$(CARGO) test $(PROFILE) --locked --test faults -- --accidents-only

# A cluster under Patroni: some faults once, each with a restore of its backup. About three minutes.
faults-patroni:
	$(CARGO) test $(PROFILE) --locked --test faults -- --patroni-only --leader-failures 3 --patroni-each 1 \
	  --only "leader's PostgreSQL killed,leader killed,replica lost,switchover"

# All of them: 30 failures of the leader and 10 of each other fault; about an hour. Writes the table of docs/reliability.md.
faults-patroni-all:
	@scripts/install-missing $(FAULT_TOOLS)
	@scripts/install-patroni
	$(CARGO) test --release --locked --test faults -- --patroni-only --leader-failures 30 --patroni-each 10 --publish

# The faults that depend most on how clients connect, over TLS and over HTTP/2.
OVER_TLS := --cuts 100 --kills 5 --each 3 --failovers 1 --connection-cuts 10 --rolling 1 \
  --only "power cuts,kills,SIGTERM,failovers,connections cut,nodes killed,rolling restarts"

faults-transports:
	TRANSPORT=tls $(CARGO) test $(PROFILE) --locked --test faults -- $(OVER_TLS)
	TRANSPORT=http2 $(CARGO) test $(PROFILE) --locked --test faults -- $(OVER_TLS)

# All faults: 20,000 power cuts, 1,000 kills, a kill at every sync and write of a run, 50 of each other fault; with PostgreSQL
# 1,000 cut connections and 50 failovers. Then all faults over TLS and over HTTP/2, a fifth as often, and a cluster under Patroni. Writes
# the tables of docs/reliability.md; takes about two and a half hours on an idle machine.
FAULTS_OVER_TLS := --cuts 4000 --kills 200 --step 5 --each 10 --failovers 10 --standby-losses 2 --connection-cuts 200 --rolling 2 --publish

faults:
	@scripts/install-missing $(FAULT_TOOLS)
	$(CARGO) test --release --locked --test faults -- --cuts 20000 --kills 1000 --step 1 --each 50 \
	  --failovers 50 --standby-losses 10 --connection-cuts 1000 --rolling 10 --publish
	TRANSPORT=tls $(CARGO) test --release --locked --test faults -- $(FAULTS_OVER_TLS)
	TRANSPORT=http2 $(CARGO) test --release --locked --test faults -- $(FAULTS_OVER_TLS)
	@$(MAKE) --no-print-directory faults-patroni-all

schemathesis: build
	tests/schemathesis/run $(TARGET)/release/plantstore

# Nodes of the previous version and of this one over one PostgreSQL database, under load. Builds the previous version from the git
# history; PREVIOUS is a tag or commit. About 5 minutes.
upgrade:
	@scripts/install-missing postgresql python3
	CARGO="$(CARGO)" tests/upgrade/run

# Checks an engine with PostgreSQL's protocol: STORE=postgres://USER@HOST:PORT, of a server for tests. Writes engine.md into $(TARGET).
engine:
	@scripts/install-missing haproxy python3
	CARGO="$(CARGO)" scripts/check-engine "$(STORE)" --report $(TARGET)/engine.md

# Attacks, HTTP/2 floods and overload while honest clients use the service; writes the tables of docs/security.md. About 25 minutes;
# ONLY selects by name (ONLY=TLS: the floods).
harden: bench-build
	@scripts/install-missing postgresql
	tests/harden/run

# Ten million inputs for each fuzz target; adds what they reach to fuzz/corpus and writes the table of docs/security.md. RUNS shortens
# it, ONLY selects targets. About an hour.
fuzz: $(TOOLS)/bin/cargo-fuzz
	@scripts/install-missing g++ python3
	fuzz/run

$(TOOLS)/bin/cargo-fuzz:
	$(CARGO) install cargo-fuzz --version $(FUZZ_VERSION) --locked --debug --root $(TOOLS)

# Compares the service with other servers and with the baseline, TLS and HTTP/2 with HTTP/1.1, and the binary of `make release` with that of cargo;
# writes docs/performance.md. About 35 minutes; ROUNDS and SECONDS_A_ROUND shorten it.
bench: bench-build
	CARGO="$(CARGO)" scripts/release binary
	bench/run
	bench/tls
	bench/variants

# Only TLS and HTTP/2. About 3 minutes.
bench-tls: bench-build
	bench/tls

# Only the binary of `make release`, and an open status page. About 5 minutes, after a release build.
bench-variants: bench-build
	CARGO="$(CARGO)" scripts/release binary
	bench/variants

# Throughput as the store grows to ten million plants; writes docs/performance.md. About 10 minutes; PLANTS_MAX shortens it.
bench-growth: bench-build
	bench/growth

# 100 million plants in SQLite and in PostgreSQL, and several nodes; writes docs/scaling.md. Needs 60 GB of disk and more than an hour;
# PLANTS and ONLY (sqlite, postgres, nodes) shorten it.
bench-scale: bench-build
	@scripts/install-missing postgresql
	bench/scale

# 100,000 tokens in use; writes docs/performance.md. About 5 minutes; TOKENS, ROUNDS and SECONDS_A_ROUND shorten it.
bench-tokens: bench-build
	@scripts/install-missing postgresql
	bench/tokens

# Throughput while a backup runs. About five minutes; PLANTS, ROUNDS and SECONDS_A_ROUND shorten it.
bench-backup: bench-build
	bench/backup

# Import and export of a million plants, compared with sqlite3's import. A few minutes; PLANTS and ROUNDS shorten it.
bench-import: build
	@scripts/install-missing python3 sqlite3
	bench/import

# The binary is built separately from the examples, as for a release: their features would be unified.
bench-build: build
	@scripts/install-missing python3
	$(CARGO) build --release --locked --example baseline --example create_tokens --example load

# Counts the instructions of an add and fails if they have grown by more than 5 %. Run it after a change to that path.
instructions:
	@scripts/install-missing valgrind python3
	$(CARGO) build --release --locked --example instructions
	bench/instructions

# Builds what is published, from the last commit, into $(TARGET)/dist: a tarball and a Debian package whose binary runs with glibc 2.28 or later, the
# list of components (SBOM, CycloneDX) and SHA-256 sums. Then checks it: install, run, purge, `cargo install`, and whether another
# build is identical. Needs root or sudo. 20 to 30 minutes.
release: deny $(TOOLS)/bin/cargo-deb $(TOOLS)/bin/cargo-cyclonedx $(TOOLS)/bin/cargo-about
	@scripts/install-missing binutils python3 python3-venv dpkg-dev lintian systemd man-db groff-base mandoc zsh fish strace curl nodejs npm nghttp2-client wrk openssl golang-go
	CARGO="$(CARGO)" scripts/release
	CARGO="$(CARGO)" scripts/check-release

$(TOOLS)/bin/cargo-cyclonedx:
	$(CARGO) install cargo-cyclonedx --version $(CYCLONEDX_VERSION) --locked --debug --root $(TOOLS)

$(TOOLS)/bin/cargo-deb:
	$(CARGO) install cargo-deb --version $(DEB_VERSION) --locked --debug --root $(TOOLS)

$(TOOLS)/bin/cargo-about:
	$(CARGO) install cargo-about --version $(ABOUT_VERSION) --locked --features cli --root $(TOOLS)

clean:
	$(CARGO) clean
