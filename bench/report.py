"""Writes the results as tables and a chart into docs/performance.md."""

import datetime
import os
import pathlib
import re
import statistics

import chart
import measure

DOCS = pathlib.Path(os.environ.get("BENCH_DOCS", measure.ROOT / "docs"))
MIB = 2**20
INTRODUCTION = """# Performance

Reproduce these numbers with `make bench` (comparison with other servers, about 25 minutes; TLS and HTTP/2, about 3 minutes; the released binary
and an open status page, about 5 minutes), `make bench-growth` (about 10 minutes) and `make bench-tokens` (about 5 minutes). They rewrite this page.
`make bench-tls` and `make bench-variants` run only one part. Absolute numbers depend on the machine; compare the ratios of one run. A target with the result FAIL is not
met by this version; it stays in the table as the aim of a later one.
"""
METHOD = """Every server runs on the same machine as the load generator, as an unprivileged user, over loopback, with a fresh store on the same
disk and the settings that its documentation recommends for production. All servers run all the time; one is measured, the others are
idle, and `sync` is called before each turn. A round goes through the numbers of connections, and for each through all servers, in an
order that changes with each round. A number is the median over {rounds} rounds of {seconds:g} s. The load generator (`bench/load`)
has one thread. It sends the same plants to all servers: ids ascending, half of them with a tag, one plant per request, each
authenticated. Before the measurement starts, every connection has had one response. Peak memory and CPU are those of all processes of a
server. Bytes on disk are the growth of its directory; over PostgreSQL they are left out, since its WAL has a fixed size.

*baseline* is our HTTP server without a store: the upper limit. A peer is *durable* if its success response means that the plant is stored and
survives a power failure (rqlite's queue does not report a plant that it could not store). *best* is the best durable peer of each
column.
"""


def medians(results):
    """The median of every number over several rounds."""
    numbers = [key for key, value in results[0].items() if isinstance(value, (int, float))]
    median = {key: statistics.median(result[key] for result in results) for key in numbers}
    median["wrong"] = sum(result["wrong"] for result in results)
    return median


def table(head, rows):
    """An aligned Markdown table: words to the left, numbers to the right."""
    rows = [head, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    is_number = [column > 0 and any(row[column][:1].isdigit() for row in rows[1:]) for column in range(len(head))]
    place = [str.rjust if number else str.ljust for number in is_number]
    lines = ["| " + " | ".join(to(cell, width) for to, cell, width in zip(place, row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 1) + ("-:"[number]) for number, width in zip(is_number, widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def verdict(text, value, sense, limit, unit):
    """A row of the table of targets: the measured value, the limit, and whether it is met."""
    holds = value >= limit if sense == "≥" else value <= limit
    formats = {"%": "{:.0%}", "×": "{:.2f}×", "KiB": "{:.1f} KiB"}
    show = formats.get(unit, "{:,.0f} " + unit).format
    return [text, show(value), f"{sense} {show(limit)}", "pass" if holds else "FAIL"]


def verdict_table(verdicts):
    return table(["target", "measured", "required", "result"], verdicts)


def write_section(name, markdown):
    """Replaces one part of the page."""
    DOCS.mkdir(parents=True, exist_ok=True)
    page = DOCS / "performance.md"
    old = page.read_text() if page.exists() else ""
    parts = {}
    for part in ("peers", "tls", "variants", "growth", "tokens"):
        found = re.search(rf"<!-- {part} -->\n(.*?)<!-- end of {part} -->", old, re.DOTALL)
        parts[part] = found.group(1) if found else ""
    parts[name] = markdown
    sections = [f"<!-- {part} -->\n{text}<!-- end of {part} -->\n" for part, text in parts.items() if text]
    page.write_text("\n".join([INTRODUCTION, *sections]))
    print(f"\nwritten: {page}")


def provenance():
    return f"{datetime.date.today()}, commit {measure.commit()}, on {measure.machine()}."


class Peers:
    """The first part: the comparison."""

    def __init__(self, contenders, closed, opened, sync_us, singles, memory_run, idle_run, left_out, rounds, seconds):
        self.idle_run = idle_run
        self.single_rows = statistics.median(singles) if singles else None
        self.contenders, self.left_out, self.sync_us, self.memory_run = contenders, left_out, sync_us, memory_run
        self.rounds, self.seconds = rounds, seconds
        self.closed = {key: medians(results) for key, results in closed.items()}
        self.opened = {name: medians(results) for name, results in opened.items()}
        self.levels = sorted({connections for _, connections in closed})
        self.durable_peers = [contender for contender in contenders if contender.peer and contender.durable]

    def at(self, name, connections, key):
        return self.closed[name, connections][key]

    def best(self, connections, key, better=min):
        """The name of the best durable peer in one measurement, and its value."""
        value = lambda contender: self.at(contender.name, connections, key)
        best = better(self.durable_peers, key=value)
        return best.name, value(best)

    def verdicts(self):
        ours = lambda connections, key: self.at("Plant Store", connections, key)
        relative = lambda name, connections: ours(connections, "rate") / self.at(name, connections, "rate")
        names = {contender.name for contender in self.contenders}
        rows = []
        if "axum, no store" in names:
            for connections, least in ((256, 1), (64, 0.9), (8, 0.5)):
                text = f"adds/s at {connections} connections, relative to axum without a store"
                rows.append(verdict(text, relative("axum, no store", connections), "≥", least, "%"))
        if "axum + sqlx, FULL" in names:
            text = "adds/s at 256 connections, relative to axum + sqlx"
            rows.append(verdict(text, relative("axum + sqlx, FULL", 256), "≥", 12, "×"))
        if self.durable_peers:
            peer, rate = self.best(256, "rate", max)
            text = f"adds/s at 256 connections, relative to the best durable peer ({peer})"
            rows.append(verdict(text, ours(256, "rate") / rate, "≥", 9, "×"))
            peer, p99 = self.best(64, "p99_us")
            text = f"p99 at 64 connections, times lower than the best durable peer ({peer})"
            rows.append(verdict(text, p99 / ours(64, "p99_us"), "≥", 6, "×"))
        if "Plant Store, PostgreSQL" in names:
            over = self.at("Plant Store, PostgreSQL", 256, "rate")
            text = "adds/s over PostgreSQL at 256 connections, relative to SQLite"
            rows.append(verdict(text, over / ours(256, "rate"), "≥", 0.75, "%"))
            text = f"… relative to the {self.single_rows:,.0f} single-row inserts/s of `pgbench -M prepared -c 32`"
            rows.append(verdict(text, over / self.single_rows, "≥", 1, "×"))
        one = ours(1, "p50_us") / (self.sync_us + self.at("baseline", 1, "p50_us"))
        text = "p50 of one connection, relative to one 4 KiB write and fdatasync plus the baseline's p50"
        rows.append(verdict(text, one, "≤", 1.15, "×"))
        text = "adds/s at 1,024 connections, relative to 256"
        rows.append(verdict(text, ours(1024, "rate") / ours(256, "rate"), "≥", 0.85, "%"))
        adds, peak = self.memory_run
        text = f"peak memory at 256 connections, {adds:,} adds, default settings"
        rows.append(verdict(text, peak / MIB, "≤", 48, "MiB"))
        text = f"memory of an idle connection, of {self.idle_run['connections']:,} that have added a plant"
        rows.append(verdict(text, self.idle_run["bytes"] / 1024, "≤", 12, "KiB"))
        stores = [contender for contender in self.contenders if contender.stored is not None]
        differing = sum(abs(contender.added - contender.stored) for contender in stores)
        rows.append(verdict("difference between acknowledged and stored, all servers", differing, "≤", 0, "plants"))
        return rows

    def main_table(self, connections=256):
        head = ["256 connections", "adds/s", "of baseline", "of best", "p50 ms", "p99 ms", "p99.9 ms", "memory MiB", "bytes/plant",
                "CPU s/1000 adds", "generator: of a core", "of all CPU", "errors", "a success response means"]  # fmt: skip
        baseline = self.at("baseline", connections, "rate")
        best = self.best(connections, "rate", max)[1] if self.durable_peers else float("nan")
        rows = []
        for contender in self.contenders:
            result = self.closed[contender.name, connections]
            grown = contender.bytes_on_disk() if contender.stored is not None else None
            per_plant = "–" if grown is None else f"{(grown - contender.empty_bytes) / max(contender.added, 1):,.0f}"
            rows.append([
                contender.name, f"{result['rate']:,.0f}", f"{result['rate'] / baseline:.0%}", f"{result['rate'] / best:.2f}×",
                *(f"{result[key] / 1000:.2f}" for key in ("p50_us", "p99_us", "p999_us")),
                f"{result['memory'] / MIB:.0f}",
                per_plant,
                f"{result['cpu_per_1000']:.3f}", f"{result['generator_of_core']:.0%}", f"{result['generator_of_cpu']:.0%}",
                f"{result['wrong']:.0f}", contender.promise,
            ])  # fmt: skip
        return table(head, rows)

    def ratio_table(self, connections=256):
        """Plant Store relative to the best peer and the baseline."""
        rows = []
        for title, key, better in [
            ("adds/s", "rate", max), ("p50", "p50_us", min), ("p99", "p99_us", min), ("p99.9", "p999_us", min),
            ("peak memory", "memory", min), ("CPU per add", "cpu_per_1000", min),
        ]:  # fmt: skip
            ours = self.at("Plant Store", connections, key)
            peer, value = self.best(connections, key, better) if self.durable_peers else ("none", float("nan"))
            rows.append([title, f"{ours / value:.2f}×", peer, f"{ours / self.at('baseline', connections, key):.2f}×"])
        return table(["Plant Store, 256 connections", "relative to best durable peer", "peer", "relative to baseline"], rows)

    def level_table(self, key, show):
        row = lambda name: [name, *(show(self.at(name, level, key)) for level in self.levels)]
        return table(["connections", *map(str, self.levels)], [row(contender.name) for contender in self.contenders])

    def open_table(self):
        rows = []
        for contender in self.contenders:
            if result := self.opened.get(contender.name):
                latencies = (f"{result[key] / 1000:.2f}" for key in ("p50_us", "p99_us", "p999_us", "max_us"))
                rates = (f"{result[key]:,.0f}" for key in ("asked", "rate"))
                rows.append([contender.name, *rates, *latencies, f"{result['wrong']:.0f}"])
        return table(["open loop", "target adds/s", "adds/s", "p50 ms", "p99 ms", "p99.9 ms", "max ms", "errors"], rows)

    def write(self):
        verdicts = verdict_table(self.verdicts())
        left_out = [f"Left out: {name}: `{' '.join(reason.split())}`" for name, reason in self.left_out.items()]
        parts = [
            "## Comparison with other servers", provenance(), METHOD.format(rounds=self.rounds, seconds=self.seconds), *left_out, verdicts,
            self.main_table(), self.ratio_table(),
            f"One 4 KiB write and fdatasync took {self.sync_us:.0f} µs on this disk in the same run (median).",
            f"With {self.idle_run['connections']:,} connections, a fresh Plant Store made {self.idle_run['rate']:,.0f} adds/s "
            f"(p99 {self.idle_run['p99_us'] / 1000:.0f} ms); idle, each of them took {self.idle_run['bytes'] / 1024:.1f} KiB of memory.",
            "![adds per second by connections](performance.svg)",
            "### Adds per second", self.level_table("rate", lambda rate: f"{rate:,.0f}"),
            "### p50 in ms", self.level_table("p50_us", lambda us: f"{us / 1000:.2f}"),
            "### p99 in ms", self.level_table("p99_us", lambda us: f"{us / 1000:.2f}"),
            "### Latency at half of the maximum throughput",
            "Open loop: requests are sent at a fixed rate, 50 % of the server's own highest median above, over 256 connections. Latency is "
            "measured from the time when a request was due, so it includes the waiting time behind a stall.",
            self.open_table(),
        ]  # fmt: skip
        for part in (self.main_table(), self.ratio_table(), self.open_table(), verdicts):
            print("\n" + part)
        write_section("peers", "\n\n".join(parts) + "\n")
        (DOCS / "performance.svg").write_text(chart.svg([self.panel()]))

    def panel(self):
        kinds = {"Plant Store": "ours", "baseline": "baseline"}
        names = sorted((contender.name for contender in self.contenders), key=lambda name: name != "Plant Store")
        rates = lambda name: [self.at(name, level, "rate") for level in self.levels]
        series = [(name, rates(name), kinds.get(name, "")) for name in names]
        title, unit = "Throughput", "adds per second (logarithmic)"
        return chart.panel(title, unit, "connections", self.levels, series, logarithmic=True)


class Transports:
    """The second part: TLS, and HTTP/2 over it. The results by name, connections, and requests at a time on each."""

    METHOD = (
        "One service without TLS and one with TLS 1.3, each with its own SQLite store. All rows have {requests} requests in flight. They "
        "are measured in turn, in an order that changes with each round; a number is the median over {rounds} rounds of {seconds:g} s. "
        "Handshakes are not included. The load generator (`bench/load`) runs on the same machine, in one thread, and its encryption is part "
        "of its processor time. Both sides of an HTTP/2 connection send what is ready with one write, so HTTP/2 needs fewer system calls "
        "and fewer TLS records for an add. The streams of one connection are handled by one thread, connections by as many threads as there are "
        "cores ({cores} here)."
    )

    def __init__(self, results, differing, requests, rounds, seconds):
        self.results = {transport: medians(rounds) for transport, rounds in results.items()}
        self.differing, self.requests, self.rounds, self.seconds = differing, requests, rounds, seconds

    def relative(self, transport):
        """Throughput, relative to one request at a time on each HTTP/1.1 connection over TLS."""
        return self.results[transport]["rate"] / self.results["TLS, HTTP/1.1", self.requests, 1]["rate"]

    def verdicts(self):
        text = f"adds/s of one HTTP/2 connection with {self.requests} streams, relative to {self.requests} HTTP/1.1 connections with TLS"
        return [
            verdict(text, self.relative(("TLS, HTTP/2", 1, self.requests)), "≥", 0.9, "%"),
            verdict("difference between acknowledged and stored", self.differing, "≤", 0, "plants"),
        ]

    def main_table(self):
        head = ["", "connections", "streams each", "adds/s", "relative to TLS, HTTP/1.1", "p50 ms", "p99 ms", "p99.9 ms", "memory MiB",
                "CPU s/1000 adds", "generator: of a core", "of all CPU", "errors"]  # fmt: skip
        rows = []
        for (name, connections, streams), result in self.results.items():
            rows.append([
                name, str(connections), str(streams), f"{result['rate']:,.0f}", f"{self.relative((name, connections, streams)):.0%}",
                *(f"{result[key] / 1000:.2f}" for key in ("p50_us", "p99_us", "p999_us")), f"{result['memory'] / MIB:.0f}",
                f"{result['cpu_per_1000']:.3f}", f"{result['generator_of_core']:.0%}", f"{result['generator_of_cpu']:.0%}",
                f"{result['wrong']:.0f}",
            ])  # fmt: skip
        return table(head, rows)

    def write(self):
        verdicts = verdict_table(self.verdicts())
        print("\n" + self.main_table() + "\n\n" + verdicts)
        method = self.METHOD.format(requests=self.requests, rounds=self.rounds, seconds=self.seconds, cores=os.cpu_count())
        parts = ["## TLS and HTTP/2", provenance(), method, verdicts, self.main_table()]
        write_section("tls", "\n\n".join(parts) + "\n")


class Variants:
    """The third part: the binary of `make release`, and an open status page."""

    METHOD = (
        "Three services with an SQLite store each, at {connections} connections: the binary of `cargo build --release`; that of `make release`, which "
        "is linked for an older C library and compiles SQLite with another compiler; and the first one again, with the requests of an open status page, one a "
        "second. They are measured in turn, in an order that changes with each round; a number is the median over {rounds} rounds of {seconds:g} s."
    )

    def __init__(self, results, differing, connections, rounds, seconds):
        self.results = {name: medians(rounds) for name, rounds in results.items()}
        self.differing, self.connections, self.rounds, self.seconds = differing, connections, rounds, seconds

    def relative(self, name):
        return self.results[name]["rate"] / self.results["Plant Store"]["rate"]

    def verdicts(self):
        names = [name for name in self.results if name != "Plant Store"]
        ratios = [verdict(f"adds/s: {name}, relative to Plant Store", self.relative(name), "≥", 0.97, "%") for name in names]
        return [*ratios, verdict("difference between acknowledged and stored", self.differing, "≤", 0, "plants")]

    def main_table(self):
        head = ["", "adds/s", "relative", "p50 ms", "p99 ms", "p99.9 ms", "memory MiB", "CPU s/1000 adds", "errors"]
        rows = []
        for name, result in self.results.items():
            times = (f"{result[key] / 1000:.2f}" for key in ("p50_us", "p99_us", "p999_us"))
            rows.append([
                name, f"{result['rate']:,.0f}", f"{self.relative(name):.0%}", *times, f"{result['memory'] / MIB:.0f}",
                f"{result['cpu_per_1000']:.4f}", f"{result['wrong']:.0f}",
            ])  # fmt: skip
        return table(head, rows)

    def write(self):
        verdicts = verdict_table(self.verdicts())
        print("\n" + self.main_table() + "\n\n" + verdicts)
        method = self.METHOD.format(connections=self.connections, rounds=self.rounds, seconds=self.seconds)
        parts = ["## The released binary, and an open status page", provenance(), method, verdicts, self.main_table()]
        write_section("variants", "\n\n".join(parts) + "\n")


class Growth:
    """The third part: throughput as the store grows."""

    def __init__(self, sizes, ascending, random, connections, rounds):
        self.sizes, self.connections, self.rounds = sizes, connections, rounds
        self.orders = {"ascending": ascending, "random": random}

    def verdicts(self):
        largest = self.sizes[-1]
        kept = lambda order: self.orders[order][largest]["of_small"]
        start_ms = max(order[largest]["start_ms"] for order in self.orders.values())
        return [
            verdict(f"adds/s at {largest:,} plants, relative to 10,000: ascending", kept("ascending"), "≥", 0.9, "%"),
            verdict(f"adds/s at {largest:,} plants, relative to 10,000: random", kept("random"), "≥", 0.7, "%"),
            verdict(f"after kill: start to first 200, with {largest:,} plants", start_ms, "≤", 50, "ms"),
        ]

    def main_table(self):
        rows = []
        for order, results in self.orders.items():
            for size in self.sizes:
                result = results[size]
                rows.append([
                    order, f"{size:,}", f"{result['rate']:,.0f}", f"{result['of_small']:.0%}", f"{result['p99_us'] / 1000:.2f}",
                    f"{result['memory'] / MIB:.0f}", f"{result['start_ms']:.0f}",
                ])  # fmt: skip
        return table(["ids", "plants", "adds/s", "relative to small store", "p99 ms", "memory MiB", "start ms"], rows)

    def write(self):
        verdicts = verdict_table(self.verdicts())
        print("\n" + self.main_table() + "\n\n" + verdicts)
        method = (
            f"A store is filled through the service, over {self.connections} connections. At each size the server is killed and "
            "restarted, with a warm page cache, and then measured while 20,000 more plants are added. A *small store* is a fresh one "
            f"of 10,000 plants, measured in turn with the large one. Medians of {self.rounds}."
        )
        picture = "![adds per second, p99, memory and start time by plants](growth.svg)"
        parts = ["## Growth of the store", provenance(), method, verdicts, self.main_table(), picture]
        write_section("growth", "\n\n".join(parts) + "\n")
        (DOCS / "growth.svg").write_text(chart.svg(self.panels()))

    def panels(self):
        labels = [f"{size:,}" for size in self.sizes]
        panels = []
        for title, unit, key, scale in [
            ("Throughput", "adds per second", "rate", 1),
            ("p99", "ms", "p99_us", 1000),
            ("Peak memory", "MiB", "memory", MIB),
            ("From start to the first 200", "ms", "start_ms", 1),
        ]:
            values = lambda order: [self.orders[order][size][key] / scale for size in self.sizes]
            series = [(order, values(order), "ours") for order in self.orders]
            panels.append(chart.panel(title, unit, "plants in the store", labels, series))
        return panels
