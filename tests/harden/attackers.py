"""Clients that try to keep others out. Each attack is a process of its own, from many addresses of 127.0.0.0/8."""

import asyncio
import itertools
import multiprocessing
import os
import random
import resource
import signal
import socket

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"POST /plants HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer %s\r\n"


class Attack:
    """Starts an attack, and stops it at the end of a `with` block."""

    def __init__(self, behaviour, address, connections, **options):
        self.connected = multiprocessing.Event()
        arguments = (behaviour, address, connections, options, self.connected)
        self.process = multiprocessing.Process(target=run, args=arguments, daemon=True)

    def __enter__(self):
        self.process.start()
        if not self.connected.wait(60):
            raise RuntimeError("the attack does not begin")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.join(10)


def run(behaviour, address, connections, options, connected):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Real attackers do not take their processor time from the server.
    os.nice(19)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.run(attack(behaviour, address, connections, options, connected))


async def attack(behaviour, address, connections, options, connected):
    host, port = address.split(":")
    sources = itertools.cycle(f"127.{a}.{b}.9" for a in range(1, 5) for b in range(1, 65))
    tasks = []
    for number, source in zip(range(connections), sources):
        client = keep_connected(behaviour, (host, int(port)), source, options)
        tasks.append(asyncio.create_task(client))
        if number % 100 == 99:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.5)
    connected.set()
    await asyncio.gather(*tasks)


async def keep_connected(behaviour, address, source, options):
    """Connects again some seconds after the server has closed the connection."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0), limit=4096)
            try:
                await behaviour(reader, writer, **options)
            finally:
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            pass
        await asyncio.sleep(10 + 10 * random.random())


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
