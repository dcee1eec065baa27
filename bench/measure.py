"""Measurements: the load generator, CPU and memory of a server's processes, the disk, the machine."""

import contextlib
import json
import os
import pathlib
import pwd
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
RELEASE = TARGET / "release"
TICKS = os.sysconf("SC_CLK_TCK")
AT_START = {}
AS_NOBODY = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def get_ready():
    """Turns SIGTERM into an exit that stops all servers, and raises the limit of open files for them and the load generator."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    AT_START.update(processor_times())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def hand_over(path):
    """Makes the user of the servers the owner of this directory."""
    if AS_NOBODY:
        os.chown(path, pwd.getpwnam("nobody").pw_uid, AS_NOBODY["group"])


def start_unprivileged(command, directory, **environment):
    """Starts a server in `directory`, with its output in the file `log` there."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "LANG": "C.UTF-8", **environment}
    with open(directory / "log", "a") as log:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=log, **AS_NOBODY)


def run_unprivileged(command, directory, timeout=120, **environment):
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "LANG": "C.UTF-8", **environment}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout, **AS_NOBODY
    )
    if done.returncode != 0:
        raise RuntimeError(f"{pathlib.Path(command[0]).name}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def load_command(
    contender, connections, *, streams=None, seconds=None, requests=None, rate=None, random=False, tokens=None, from_send=False
):
    """With `streams`, HTTP/2 with this many requests at a time on each connection."""
    command = [
        RELEASE / "examples" / "load", "--address", contender.address, "--connections", str(connections),
        "--path", contender.path, "--expect", str(contender.expect), "--first", str(contender.next_plant),
        "--header", "Content-Type: application/json",
    ]  # fmt: skip
    for header in contender.headers() if tokens is None else []:
        command += ["--header", header]
    for body in contender.bodies:
        command += ["--body", body]
    command += ["--tls", contender.certificate] if contender.certificate else []
    command += ["--streams", str(streams)] if streams else []
    command += ["--tokens", tokens] if tokens else []
    command += ["--seconds", str(seconds)] if seconds else ["--requests", str(requests)]
    command += ["--rate", str(rate)] if rate else []
    command += ["--random"] if random else []
    command += ["--from-send"] if from_send else []
    return command


@contextlib.contextmanager
def background_load(contender, connections, **options):
    """Load until the end of a `with` block, which is not measured."""
    command = load_command(contender, connections, requests=2**60, random=True, **options)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **AS_NOBODY)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def load(contender, connections, **options):
    """Runs the load generator against a contender; returns its results and the server's CPU time and memory."""
    command = load_command(contender, connections, **options)

    # Flush the writes of other servers before the measurement.
    os.sync()
    reset_peak_memory(contender.pids())
    cpu_before, times_before = cpu_seconds(contender.pids()), processor_times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=(options.get("seconds") or 3600) + 180, **AS_NOBODY)
    if done.returncode != 0:
        raise RuntimeError(f"load on {contender.name}: {done.stderr.strip()[-500:]}")
    result = json.loads(done.stdout)
    added = result["good"] + result["warm_good"]
    contender.next_plant += result["requests"] + result["warm_requests"]
    contender.added += added
    server_cpu_per_1000 = (cpu_seconds(contender.pids()) - cpu_before) / max(added, 1) * 1000
    generator_cpu_per_1000 = result["cpu_seconds"] / max(result["requests"], 1) * 1000
    result.update(
        connections=connections,
        rate=result["good"] / result["seconds"] if result["good"] else 0,
        wrong=result["requests"] + result["warm_requests"] - added,
        cpu_per_1000=server_cpu_per_1000,
        generator_of_core=result["cpu_seconds"] / max(result["seconds"], 1e-9),
        generator_of_cpu=generator_cpu_per_1000 / max(generator_cpu_per_1000 + server_cpu_per_1000, 1e-9),
        memory=peak_memory(contender.pids()),
        stolen=stolen_since(times_before),
    )
    if result["wrong"]:
        complaint = f"{contender.name}, {connections} connections: {result['wrong']} of {result['requests']} went wrong"
        print(f"  {complaint}: {result['statuses']} {done.stderr.strip()[:300]}", flush=True)
    return result


def family(pid):
    """The pids of a process and its descendants."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := stat_of(entry)):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


def stat_of(pid):
    """The fields of /proc/PID/stat from the state on; none if the process is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def cpu_seconds(pids):
    """User and system time, including waited-for children."""
    stats = [fields for pid in pids if (fields := stat_of(pid))]
    return sum(int(ticks) for fields in stats for ticks in fields[11:15]) / TICKS


def processor_times():
    """Ticks of all processors since the machine was started: in total, and those that the host of a virtual machine gave to others."""
    ticks = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return {"all": sum(ticks), "stolen": ticks[7]}


def stolen_since(before):
    """The part of the processor time that the host has given to others."""
    now = processor_times()
    return (now["stolen"] - before["stolen"]) / max(now["all"] - before["all"], 1)


def reset_peak_memory(pids):
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended, as a worker of PostgreSQL does
            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(pids):
    """Bytes; memory that processes share, such as PostgreSQL's buffers, is counted once."""
    if len(pids) == 1:
        return kilobytes(pids[0], "status", "VmHWM") * 1024
    shared = lambda pid: kilobytes(pid, "smaps_rollup", "Rss") - kilobytes(pid, "smaps_rollup", "Pss")
    return sum(kilobytes(pid, "status", "VmHWM") - shared(pid) for pid in pids) * 1024


def kilobytes(pid, file, name):
    try:
        lines = pathlib.Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)


def bytes_on_disk(directory, without=()):
    """The disk usage of a directory."""
    total = 0
    for parent, directories, files in os.walk(directory):
        directories[:] = [name for name in directories if name not in without]
        total += sum(os.lstat(pathlib.Path(parent, name)).st_blocks * 512 for name in files if name != "log")
    return total


def sync_us(directory, seconds):
    """The median time of a 4 KiB write and fdatasync within a preallocated file."""
    path, page, blocks = directory / "sync", os.urandom(4096), 1024
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.write(file, page * blocks)
        os.fsync(file)
        times, end = [], time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            os.pwrite(file, page, len(times) % blocks * 4096)
            os.fdatasync(file)
            times.append(time.perf_counter() - begin)
    finally:
        os.close(file)
        path.unlink()
    return statistics.median(times) * 1e6


def machine():
    """A one-line description of the machine."""
    proc = pathlib.Path("/proc")
    cpu = next(line for line in (proc / "cpuinfo").read_text().splitlines() if line.startswith("model name"))
    memory = int((proc / "meminfo").read_text().split()[1]) / 2**20
    filesystem = run_text("findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(TARGET))
    machine = f"{os.cpu_count()} × {cpu.partition(':')[2].strip()}, {memory:.0f} GiB, {filesystem}, Linux {os.uname().release}"
    stolen = stolen_since(AT_START) if AT_START else 0
    return machine + (f"; its host gave {stolen:.0%} of the processor time to others" if stolen >= 0.005 else "")


def commit():
    changed = run_text("git", "status", "--porcelain", "--untracked-files=no", "--", ":!docs")
    return run_text("git", "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def run_text(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
