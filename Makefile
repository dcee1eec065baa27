# The few things people expect. `make test` is what CI runs; everything else is a part of it or takes longer.

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
TOOLS := $(TARGET)/tools
DENY_VERSION := 0.20.2
DEB_VERSION := 3.8.0
FAULT_TOOLS := strace libfaketime postgresql haproxy pgbouncer

# Test modules that run against PostgreSQL as well as SQLite.
ON_BOTH_STORES := contract:: errors:: tokens:: connections:: logging:: monitoring:: import_export:: copy:: list:: backup:: outage:: packaging::systemd

.PHONY: test check setup fmt lint docs deny advisories build it browser faults-share faults schemathesis bench bench-growth bench-backup bench-import instructions bench-build package clean

test: setup check deny it browser faults-share schemathesis
	@echo "all is well"

# What needs nothing but the crates.
check: fmt lint docs

# Installs what the tests run: curl and sqlite3 (the README's commands), strace, libfaketime, PostgreSQL, PgBouncer and HAProxy
# (faults), openssl (TLS to PostgreSQL), Python (Schemathesis), promtool (metrics), nginx and Caddy (configurations in the docs), Node and Chromium (the docs page). A
# share of the faults mounts a small file system, which needs root, or sudo.
setup: $(TOOLS)/bin/promtool $(TOOLS)/bin/nginx $(TOOLS)/bin/caddy
	@scripts/install-missing curl sqlite3 $(FAULT_TOOLS) openssl python3 python3-venv nodejs npm chromium

fmt:
	$(CARGO) fmt --check

lint:
	$(CARGO) clippy --all-targets --locked -- -D warnings
	$(CARGO) clippy --test faults --locked -- -D warnings

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --no-deps --document-private-items --locked

# Licences, sources, duplicates. Advisories need a database from the network and are a matter for `make advisories`.
deny: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --locked check bans licenses sources

advisories: $(TOOLS)/bin/cargo-deny
	$(TOOLS)/bin/cargo-deny --locked check advisories

$(TOOLS)/bin/cargo-deny:
	$(CARGO) install cargo-deny --version $(DENY_VERSION) --locked --debug --root $(TOOLS)

# Reads our metrics, alerts and dashboard as Prometheus does.
$(TOOLS)/bin/promtool:
	scripts/unpack-tool prometheus /usr/bin/promtool $@

# Check the reverse proxy configurations of docs/security.md.
$(TOOLS)/bin/nginx:
	scripts/unpack-tool nginx /usr/sbin/nginx $@

$(TOOLS)/bin/caddy:
	scripts/unpack-tool caddy /usr/bin/caddy $@

build:
	$(CARGO) build --release --locked

it: build
	$(CARGO) test --locked
	scripts/with-postgres $(CARGO) test --locked --test it -- --include-ignored $(ON_BOTH_STORES) postgres:: documentation::page outage::an_outage_of_the_database

# The docs page in a real browser. What it looked like is then in target/docs-page.
browser: build
	tests/browser/run $(TARGET)/release/plantstore $(TARGET)/docs-page

# A share of the faults, and proof that the suite notices a broken service.
faults-share:
	$(CARGO) test --locked --test faults -- --cuts 1000 --kills 20 --step 20 --each 2 \
	  --failovers 1 --standby-losses 1 --connection-cuts 20 --rolling 1

# All of them: power cuts by the ten thousand, a thousand kills, every sync and every write of a run, fifty of each
# other fault; with PostgreSQL a thousand connections cut and fifty failovers. Writes the table in docs/reliability.md.
faults:
	@scripts/install-missing $(FAULT_TOOLS)
	$(CARGO) test --release --locked --test faults -- --cuts 20000 --kills 1000 --step 1 --each 50 \
	  --failovers 50 --standby-losses 10 --connection-cuts 1000 --rolling 10 --publish

schemathesis: build
	tests/schemathesis/run $(TARGET)/release/plantstore

# Compares the service with other servers and with the baseline, into docs/performance.md: about 15 minutes. ROUNDS and SECONDS_A_ROUND shorten it.
bench: bench-build
	bench/run

# The store as it grows to ten million plants, into the same page: about an hour. PLANTS_MAX shortens it.
bench-growth: bench-build
	bench/growth

# What a backup costs while it runs: about five minutes. PLANTS, ROUNDS and SECONDS_A_ROUND shorten it.
bench-backup: bench-build
	bench/backup

# A million plants in and out, beside sqlite3's own import: a few minutes. PLANTS and ROUNDS shorten it.
bench-import: build
	@scripts/install-missing python3 sqlite3
	bench/import

# The binary for itself, so that it is built as it is released.
bench-build: build
	@scripts/install-missing python3
	$(CARGO) build --release --locked --example baseline --example load

# Counts the instructions of an add and fails when they have grown by more than 5 %. To be run before a change to that
# path is called done.
instructions:
	@scripts/install-missing valgrind python3
	$(CARGO) build --release --locked --example instructions
	bench/instructions

# A Debian package, in $(TARGET)/debian, and `cargo install`: built, checked, installed, used, and taken away again. Needs
# root, or sudo.
package: build $(TOOLS)/bin/cargo-deb
	@scripts/install-missing dpkg-dev lintian systemd man-db groff-base mandoc zsh fish strace curl python3
	rm -rf $(TARGET)/release/package
	$(TARGET)/release/plantstore man --to $(TARGET)/release/package/man
	gzip -9n $(TARGET)/release/package/man/*
	gzip -9nc CHANGELOG.md > $(TARGET)/release/package/changelog.gz
	for shell in bash zsh fish; do \
	  $(TARGET)/release/plantstore completions $$shell > $(TARGET)/release/package/plantstore.$$shell || exit 1; done
	$(TOOLS)/bin/cargo-deb --no-build --locked --output $(TARGET)/debian/plantstore.deb
	scripts/check-package $(TARGET)/debian/plantstore.deb
	$(CARGO) install --path . --locked --root $(TARGET)/installed
	$(TARGET)/installed/bin/plantstore --version

$(TOOLS)/bin/cargo-deb:
	$(CARGO) install cargo-deb --version $(DEB_VERSION) --locked --debug --root $(TOOLS)

clean:
	$(CARGO) clean
