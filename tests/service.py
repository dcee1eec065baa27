"""What the test programs in Python share: a running plantstore, certificates of a test CA, and Python environments."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

TARGET = pathlib.Path(__file__).resolve().parents[1] / "target"
START_TIMEOUT_S = 20
STOP_TIMEOUT_S = 20
PIP_TIMEOUT_S = 600
LOOK_INTERVAL_S = 0.02


class Service:
    """A server with a new store in `directory`, on free ports. The end of the `with` block stops it."""

    def __init__(self, binary, directory, arguments=()):
        self.binary, self.directory = binary, directory
        self._log = directory / "log"
        any_port = "127.0.0.1:0"
        command = [binary, "serve", "--listen", any_port, "--ops-listen", any_port, *arguments]
        with self._log.open("wb") as stderr:
            self._process = subprocess.Popen(command, cwd=directory, stderr=stderr, env=self.environment())

    def __enter__(self):
        try:
            self.address = self.wait_for_line(lambda line: line.get("message") == "listening")["address"]
            self.token = (self.directory / "plantstore.token").read_text().strip()
        except BaseException:
            self.__exit__()
            raise
        self.port = int(self.address.rpartition(":")[2])
        return self

    def __exit__(self, *_):
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.exit_code = self._process.wait()

    def environment(self):
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PLANTSTORE_")}
        return {**settings, "PLANTSTORE_STORE": f"sqlite:{self.directory / 'plantstore.db'}"}

    def log(self):
        return self._log.read_text()

    def wait_for_line(self, is_wanted):
        """The first line of the log for which this is true."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            for line in json_lines(self.log()):
                if is_wanted(line):
                    return line
            time.sleep(LOOK_INTERVAL_S)
        sys.exit(f"the server did not log an expected line; its log:\n{self.log()}")

    def plant(self, plant_id):
        """The stored plant, read by another process."""
        command = [self.binary, "get", str(plant_id), "--json"]
        found = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=START_TIMEOUT_S)
        return json.loads(found.stdout) if found.returncode == 0 else None


class CertificateAuthority:
    """A CA for tests, with its certificate in `directory`/ca.pem."""

    def __init__(self, directory):
        self.directory = directory
        self.certificate = directory / "ca.pem"
        extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
        self._openssl("/CN=test CA", "ca.key", "ca.pem", extensions)

    def issue(self, name):
        """A certificate for localhost and 127.0.0.1: the paths of its chain and of its key."""
        extensions = ("basicConstraints=critical,CA:FALSE", "subjectAltName=DNS:localhost,IP:127.0.0.1", "extendedKeyUsage=serverAuth")
        self._openssl("/CN=localhost", f"{name}.key", f"{name}.pem", extensions, "-CA", "ca.pem", "-CAkey", "ca.key")
        return self.directory / f"{name}.pem", self.directory / f"{name}.key"

    def _openssl(self, subject, key, certificate, extensions, *arguments):
        command = [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", subject, "-keyout", key, "-out", certificate, *arguments),
        ]
        for extension in extensions:
            command += ["-addext", extension]
        made = subprocess.run(command, cwd=self.directory, capture_output=True, text=True)
        if made.returncode != 0:
            sys.exit(f"openssl failed: {made.stderr}")
        (self.directory / key).chmod(0o600)


def json_lines(text):
    """Skips plain text, and the last line if it is incomplete."""
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def python_environment(name, requirements):
    """The bin directory of target/NAME. The stamp is written last, so that an incomplete environment is created again."""
    venv = TARGET / name
    stamp = venv / "stamp"
    made_from = f"{sys.version}\n{requirements.read_text()}"
    if not stamp.exists() or stamp.read_text() != made_from:
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, timeout=PIP_TIMEOUT_S)
        install = [venv / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]
        subprocess.run(install, check=True, timeout=PIP_TIMEOUT_S)
        stamp.write_text(made_from)
    return venv / "bin"
