"""What tests of egress run inside a sandbox: small network clients in Python, whose answers come back as JSON.

    await inside(box, 'tcp("192.0.2.7", 7000)')      # "ok: hi", or the name of the error
"""
from __future__ import annotations

import json
from typing import Any

from libdsec import Sandbox

LIBRARY = r'''
import errno, json, os, socket, ssl, struct, sys, time
def name(error):
    if isinstance(error, socket.gaierror): return "EAI_%d" % error.errno
    if isinstance(error, ssl.SSLError): return "no handshake"
    if isinstance(error, TimeoutError): return "timeout"
    return errno.errorcode.get(error.errno, str(error)) if error.errno else type(error).__name__
def family(a): return socket.AF_INET6 if ":" in a else socket.AF_INET
def tried(f):
    def run(*a, **k):
        try: return f(*a, **k)
        except OSError as error: return name(error)
    return run
@tried
def tcp(address, port, say=b"hi", timeout=5, source=None):
    with socket.socket(family(address), socket.SOCK_STREAM) as s:
        s.settimeout(timeout)
        if source: s.bind(source)
        s.connect((address, port)); s.sendall(say)
        return "ok: " + s.recv(100).decode()
@tried
def udp(address, port, say=b"hi", timeout=1, source=None):
    with socket.socket(family(address), socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        if source: s.bind(source)
        s.connect((address, port)); s.send(say)
        return "ok: %d" % len(s.recv(65535))
@tried
def ping(address, size=8, timeout=1):
    six = ":" in address
    with socket.socket(family(address), socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP) as s:
        s.settimeout(timeout)
        s.connect((address, 0)); s.send(struct.pack(">BBHHH", 128 if six else 8, 0, 0, 0, 1) + b"x" * size)
        return "ok: %d" % s.recvfrom(65535)[0][0]
@tried
def web(name, address=None, sni=None, port=443, raw=None):
    with socket.create_connection((address or name, port), 5) as s:
        if port == 443:
            context = ssl._create_unverified_context()
            s = context.wrap_socket(s, server_hostname=name if sni is None else sni or None)
        s.sendall(raw or b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
        got = b""
        while not got.endswith(b"}"):
            part = s.recv(4096)
            if not part: return "closed"
            got += part
        return json.loads(got[got.find(b"\r\n\r\n") + 4:])
@tried
def resolve(name):
    return sorted({a[4][0] for a in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
def question(name, kind=1, server="169.254.1.1", timeout=2):
    query = struct.pack(">6H", 7, 256, 1, 0, 0, 0) + b"".join(bytes([len(p)]) + p.encode() for p in name.split(".")) + struct.pack(">BHH", 0, kind, 1)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(timeout); s.connect((server, 53)); s.send(query)
            reply = s.recv(4096)
            return {"code": reply[3] & 15, "answers": struct.unpack(">H", reply[6:8])[0]}
    except OSError as error: return name_of(error)
name_of = name
'''


async def inside(box: Sandbox, *expressions: str, timeout: float = 60) -> Any:
    """The value of an expression inside, or a list of the values of several. Text before the last line of one is done first."""
    body = "found = []\n"
    for text in expressions:
        *before, last = text.strip().splitlines()
        body += "\n".join([*before, f"found.append({last})"]) + "\n"
    result = await box.exec(["python3", "-c", LIBRARY + body + "print(json.dumps(found))"], timeout=timeout)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout_text)
    return found if len(expressions) > 1 else found[0]
