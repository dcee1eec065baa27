"""A PostgreSQL server for the contenders that need one."""

import pathlib
import re
import signal
import time

import measure
from install import CannotRun


class Postgres:
    """A PostgreSQL server that the contenders of a run share; only one of them is measured at a time."""

    running = {}

    def __init__(self, directory):
        self.directory = directory / "postgresql"
        self.directory.mkdir()
        measure.hand_over(self.directory)
        self.data = self.directory / "data"
        self.process = None
        self.users = 0

    @classmethod
    def borrow(cls, directory):
        if directory not in cls.running:
            cls.running[directory] = cls(directory)
            cls.running[directory].start()
        cls.running[directory].users += 1
        return cls.running[directory]

    def give_back(self):
        """Stops the server after its last user."""
        self.users -= 1
        if self.users == 0:
            self.stop()

    @staticmethod
    def program(name):
        found = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        if not found:
            raise CannotRun("PostgreSQL is not installed")
        return found[-1]

    def start(self):
        """Default settings: fsync and synchronous_commit are on. It listens on a socket in our directory only."""
        initdb = [self.program("initdb"), "--pgdata", self.data, "--username=postgres", "--auth=trust", "--encoding=UTF8"]
        measure.run_unprivileged(initdb, self.directory)
        settings = ["listen_addresses=", f"unix_socket_directories={self.directory}", "shared_buffers=1GB"]
        command = [self.program("postgres"), "-D", self.data]
        for setting in settings:
            command += ["-c", setting]
        self.process = measure.start_unprivileged(command, self.directory)
        for _ in range(600):
            try:
                return self.sql("SELECT 1")
            except RuntimeError:
                time.sleep(0.05)
        raise CannotRun("PostgreSQL does not start")

    def sql(self, statement, database="postgres", timeout=120):
        psql = [self.program("psql"), "--host", self.directory, "--username=postgres", "--no-psqlrc", "--no-align"]
        command = [*psql, "--tuples-only", "--set=ON_ERROR_STOP=1", "--command", statement, database]
        return measure.run_unprivileged(command, self.directory, timeout)

    def inserts_per_second(self, seconds):
        """pgbench's single-row inserts per second: 32 connections, prepared statements."""
        self.sql("CREATE TABLE IF NOT EXISTS single_rows (id bigint PRIMARY KEY, name text NOT NULL, tag text)")
        script = self.directory / "insert.sql"
        script.write_text(
            "\\set id random(1, 9000000000000000)\n"
            "INSERT INTO single_rows VALUES (:id, 'Monstera deliciosa', 'indoor') ON CONFLICT DO NOTHING;\n"
        )
        script.chmod(0o644)
        command = [self.program("pgbench"), "--host", self.directory, "--username=postgres", "--no-vacuum", "--protocol=prepared"]
        command += ["--client=32", "--jobs=2", f"--time={max(1, round(seconds))}", "--file", script, "postgres"]
        printed = measure.run_unprivileged(command, self.directory)
        return float(re.search(r"tps = ([0-9.]+)", printed).group(1))

    def stop(self):
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)  # its fast shutdown
        self.process.wait(timeout=120)
        self.process = None
        del self.running[self.directory.parent]

    def pids(self):
        return measure.family(self.process.pid)
