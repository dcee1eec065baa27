"""A TCP proxy that passes on everything after a delay, as if its target were far away."""

import asyncio
import signal


def serve(port, socket, round_trip_s):
    """Connects each client to a Unix socket."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.run(listen(port, socket, round_trip_s / 2))


async def listen(port, socket, delay_s):
    async def connect(reader, writer):
        try:
            to_reader, to_writer = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await asyncio.gather(forward(reader, to_writer, delay_s), forward(to_reader, writer, delay_s))

    server = await asyncio.start_server(connect, "127.0.0.1", port)
    await server.serve_forever()


async def forward(reader, writer, delay_s):
    loop = asyncio.get_running_loop()
    try:
        while data := await reader.read(1 << 16):
            loop.call_later(delay_s, write, writer, data)
    except OSError:
        pass
    loop.call_later(delay_s, writer.close)


def write(writer, data):
    if not writer.is_closing():
        writer.write(data)
