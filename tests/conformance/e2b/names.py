"""A resolver of our own, as somebody has who uses host names: every name below .dsec.test is this machine. Answers A queries by UDP on port 53
of a loopback address; whoever shall use it runs behind `preface`, in a mount namespace with a resolv.conf of its own."""
from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

ADDRESS = "127.53.53.53"
ZONE = b"\4dsec\4test\0"


def answer(query: bytes) -> bytes:
    """Names of the zone have one address; what else is asked of them has no answer, other names do not exist."""
    end = query.index(b"\0", 12) + 1
    name, kind = query[12:end].lower(), struct.unpack_from(">H", query, end)[0]
    ours = name.endswith(ZONE)
    records = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + bytes((127, 0, 0, 1)) if ours and kind == 1 else b""
    flags = 0x8580 if ours else 0x8583
    return query[:2] + struct.pack(">HHHHH", flags, 1, 1 if records else 0, 0, 0) + query[12 : end + 4] + records


@contextlib.contextmanager
def resolver(directory: Path) -> Iterator[list[str]]:
    """The resolver, and the words that go before a command that uses it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((ADDRESS, 53))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    query, client = sock.recvfrom(4096)
                    if not query:
                        return
                    with contextlib.suppress(ValueError, struct.error):  # not a question
                        sock.sendto(answer(query), client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        conf = directory / "resolv.conf"
        conf.write_text(f"nameserver {ADDRESS}\n")
        yield ["unshare", "-m", "--propagation", "private", "sh", "-c", 'mount --bind "$0" /etc/resolv.conf && exec "$@"', str(conf)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", (ADDRESS, 53))
        thread.join()
