"""Runs inside a sandbox: servers on its loopback for the tests of ports. HTTP on 8080 (IPv4) and 8081 (IPv6 alone), bytes on 9000, 9001."""
import asyncio
import hashlib
import json
import sys

go = asyncio.Event()
sent = 0


async def body_of(reader, headers):
    if headers.get("transfer-encoding") == "chunked":
        data = b""
        while size := int(await reader.readline(), 16):
            data += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return data
    return await reader.readexactly(int(headers.get("content-length", 0)))


async def http(reader, writer):
    global sent
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        kind = target.split("?")[0]
        if kind == "/echo":
            body = await body_of(reader, headers)
            said = {"method": method, "target": target, "headers": pairs, "size": len(body), "sha": hashlib.sha256(body).hexdigest()}
            data = json.dumps(said).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: application/json\r\n\r\n" % len(data))
            writer.write(data if method != "HEAD" else b"")
        elif kind == "/events":  # the second waits for somebody to ask for it; the end is that of the connection
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
            await writer.drain()
            await go.wait()
            writer.write(b"data: 2\n\n")
        elif kind == "/go":
            go.set()
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif kind == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        elif kind == "/sent":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n%d" % sent)
        elif kind == "/cookies":
            writer.write(
                b"HTTP/1.1 201 Made\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nconnection: close, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\n"
                b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
            )
        elif kind == "/trailer":  # one that has no end
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: ")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        elif kind == "/broken":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nten bytes.")
        elif kind == "/garbage":
            writer.write(b"220 mail.example ready\r\n")
        elif kind == "/early":
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        elif kind == "/ws":
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: yes\r\n\r\nhello ")
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def digest(reader, writer):
    """All that comes until its end, then its size and hash."""
    data = await reader.read()
    writer.write(b"%d %s" % (len(data), hashlib.sha256(data).hexdigest().encode()))
    await writer.drain()
    writer.close()


async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def main():
    await asyncio.start_server(http, "127.0.0.1", 8080)
    await asyncio.start_server(http, "::1", 8081)
    await asyncio.start_server(digest, "0.0.0.0", 9000)
    await asyncio.start_server(echo, "127.0.0.1", 9001, backlog=1000)
    print("listening", flush=True)
    sys.stdout.close()
    await asyncio.Event().wait()


asyncio.run(main())
