"""Installs the peers from Debian, npm and PyPI into an ignored directory."""

import subprocess
import sys

from measure import ROOT, TARGET

PEERS = ROOT / "bench" / "peers"
INSTALLED = TARGET / "bench"


class CannotRun(Exception):
    """The reason why a contender is left out."""


def from_debian(*packages):
    run_installer([ROOT / "scripts" / "install-missing", *packages])


def from_npm(peer):
    """Installs the exact versions in the package.json of a peer."""
    manifest = (PEERS / peer / "package.json").read_text()
    directory = INSTALLED / peer
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "installed.json"
    if done.exists() and done.read_text() == manifest:
        return
    (directory / "package.json").write_text(manifest)
    run_installer(["npm", "install", "--prefix", directory, "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"])
    done.write_text(manifest)


def from_cargo(peer):
    """Builds the package of a peer with the versions in its Cargo.lock."""
    manifest = PEERS / peer / "Cargo.toml"
    run_installer(["cargo", "build", "--release", "--locked", "--manifest-path", manifest, "--target-dir", INSTALLED / peer])


def run_installer(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    except OSError as error:
        raise CannotRun(str(error)) from error
    except subprocess.TimeoutExpired as error:
        raise CannotRun("installing took too long") from error
    if done.returncode != 0:
        raise CannotRun((done.stderr or done.stdout).strip()[-300:])


def from_pypi(peer):
    """Installs the requirements.txt of a peer into its own virtual environment."""
    venv = INSTALLED / peer
    if not (venv / "bin" / "python").exists():
        run_installer([sys.executable, "-m", "venv", venv])
    requirements = PEERS / peer / "requirements.txt"
    run_installer([venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--requirement", requirements])
