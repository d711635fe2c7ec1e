"""A small internet in a network namespace of its own, linked to this machine by one cable, for tests of egress: name server, web servers,
an echo by TCP and UDP, pings. It says who came.

    with Internet() as net:
        net.names["www.example.org"] = ["192.0.2.10"]      # what its name server says
        net.visits()                                         # [("tcp", "192.0.2.10", 443), ...] since the last call

All of 192.0.2.0/24 and 2001:db8:1::/64 is there. Web servers answer with what they were asked for: the server name, the host, the address.
"""
from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import ipaddress
import json
import os
import signal
import socket
import ssl
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from dsec.guard.egress.links import address, default_route, up
from dsec.linux import calls, netlink
from dsec.linux.netlink import F_ACK, F_CREATE, F_EXCL, ROUTE, Netlink, attr, in_namespace, message, nest, text, u32

NET4, NET6 = "192.0.2.0/24", "2001:db8:1::/64"
DNS = "192.0.2.53"
HTTP, HTTPS, ECHO, DNS_PORT = 80, 443, 7000, 53
_HOST4, _FAR4 = "198.51.100.1", "198.51.100.2"
_HOST6, _FAR6 = "2001:db8:ff::1", "2001:db8:ff::2"


class Internet:
    """Started by `with`."""

    def __init__(self) -> None:
        self.name = f"dst{os.getpid() % 100000}"
        self.names: dict[str, list[str]] = {}
        self.pid = 0

    def __enter__(self) -> Self:
        self._turn = open("/tmp/dsec-internet.lock", "a")  # there is one of these addresses on a machine: test runs take turns
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        ours, theirs = socket.socketpair()
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ours.close()
                calls.unshare(calls.CLONE_NEWNET)
                calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
                theirs.send(b"1")
                theirs.recv(1)
                asyncio.run(_Servers(theirs).run())
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._control = ours
        ours.settimeout(20)
        assert ours.recv(1) == b"1"
        far = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._cable(far, own)
        ours.send(b"2")
        assert ours.recv(2) == b"ok"
        os.close(far)
        os.close(own)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._control.close()
        with Netlink(ROUTE) as rtnl, contextlib.suppress(OSError):
            rtnl.send([message(netlink.RTM_DELLINK, F_ACK, _link(socket.if_nametoindex(self.name)))])
        self._turn.close()

    def visits(self) -> list[tuple[str, str, int]]:
        """(protocol, address, port) of whoever came since the last call, datagrams and connections."""
        return [tuple(visit) for visit in self._ask({"op": "visits"})]

    def say(self) -> None:
        """The name server answers from `names` as they are now; a name of [] does not exist."""
        self._ask({"op": "names", "names": self.names})

    def asked(self) -> list[str]:
        """Names that the name server was asked for since the last call."""
        return list(self._ask({"op": "asked"}))

    def _ask(self, what: dict[str, Any]) -> Any:
        self._control.sendall(json.dumps(what).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            part = self._control.recv(1 << 16)
            assert part, "the internet is gone"
            data += part
        return json.loads(data)

    def _cable(self, far: int, own: int) -> None:
        peer = _link(20) + text(3, "eth0") + u32(28, far)
        kind = nest(18, text(1, "veth"), nest(2, attr(1 | netlink.NESTED, peer)))
        with Netlink(ROUTE) as rtnl:
            rtnl.send([message(netlink.RTM_NEWLINK, F_CREATE | F_EXCL | F_ACK, _link(2_000_000 + self.pid), text(3, self.name), kind)])
            index = socket.if_nametoindex(self.name)
            rtnl.send([up(index), address(index, _packed(_HOST4), 30), address(index, _packed(_HOST6), 64)])
        with in_namespace(far, own):
            rtnl = Netlink(ROUTE)
        with rtnl:
            rtnl.send([up(1), up(20), address(20, _packed(_FAR4), 30), address(20, _packed(_FAR6), 64)])
            rtnl.send([default_route(20, socket.AF_INET, _packed(_HOST4)), default_route(20, socket.AF_INET6, _packed(_HOST6))])
            rtnl.send([_everything(NET4), _everything(NET6)])
        with Netlink(ROUTE) as rtnl:
            rtnl.send([_to(index, NET4, _FAR4), _to(index, NET6, _FAR6)])
        Path(f"/proc/sys/net/ipv4/conf/{self.name}/forwarding").write_text("1")
        with contextlib.suppress(FileNotFoundError):
            Path(f"/proc/sys/net/ipv6/conf/{self.name}/force_forwarding").write_text("1")


class _Servers:
    """What is in there."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._visits: list[tuple[str, str, int]] = []
        self._asked: list[str] = []
        self._names: dict[str, list[str]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with tempfile.TemporaryDirectory() as directory:
            context = _certificate(Path(directory))
        asked: dict[int, str] = {}
        context.sni_callback = lambda sock, name, _: asked.__setitem__(id(sock), name or "")
        for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            await asyncio.start_server(self._web, everywhere, HTTP, family=family)
            await asyncio.start_server(lambda r, w: self._web(r, w, asked), everywhere, HTTPS, family=family, ssl=context)
            for port in (22, ECHO, ECHO + 1):
                await asyncio.start_server(self._echo, everywhere, port, family=family)
            for port in (ECHO, 5353):
                self._datagrams(family, everywhere, port, lambda data: data)
        self._datagrams(socket.AF_INET, "0.0.0.0", DNS_PORT, self._dns)
        self._control.send(b"ok")
        reader, writer = await asyncio.open_connection(sock=self._control)
        while line := await reader.readline():
            what = json.loads(line)
            reply: Any = None
            if what["op"] == "visits":
                reply, self._visits = self._visits, []
            elif what["op"] == "asked":
                reply, self._asked = self._asked, []
            else:
                self._names = what["names"]
            writer.write(json.dumps(reply).encode() + b"\n")
        loop.stop()

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._came("tcp", writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _web(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: dict[int, str] | None = None) -> None:
        self._came("tcp", writer)
        secured = writer.get_extra_info("ssl_object")
        name = "" if asked is None else asked.get(id(secured), "")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                host = next((line[5:].strip() for line in head.decode("latin-1").split("\r\n") if line.lower().startswith("host:")), "")
                where = writer.get_extra_info("sockname")[0]
                body = json.dumps({"host": host, "sni": name, "address": where, "line": head.split(b"\r\n")[0].decode("latin-1")}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    def _datagrams(self, family: int, where: str, port: int, answer: Any) -> None:
        """The answer comes from the address that the question went to."""
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        level, option, form = (socket.IPPROTO_IP, 8, "I4s4s") if family == socket.AF_INET else (socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, "16sI")
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND: answers come from any of its addresses
        sock.setsockopt(level, option, 1)
        sock.bind((where, port))

        def readable() -> None:
            data, ancillary, _, peer = sock.recvmsg(65535, 256)
            raw = ancillary[0][2]
            to = struct.unpack_from(form, raw)[2 if family == socket.AF_INET else 0]
            self._visits.append(("udp", str(ipaddress.ip_address(to)), port))
            back = struct.pack("I4s4s", 0, to, bytes(4)) if family == socket.AF_INET else struct.pack("16sI", to, 0)
            reply = answer(data)
            if reply is not None:
                sock.sendmsg([reply], [(level, 8 if family == socket.AF_INET else socket.IPV6_PKTINFO, back)], 0, peer)

        asyncio.get_running_loop().add_reader(sock.fileno(), readable)

    def _dns(self, data: bytes) -> bytes:
        import dns.message
        import dns.rcode
        import dns.rrset

        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        self._asked.append(name)
        reply = dns.message.make_response(query)
        known = self._names.get(name)
        if not known:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        else:
            version = {1: 4, 28: 6}.get(int(question.rdtype))
            found = [a for a in known if ipaddress.ip_address(a).version == version]
            if found:
                reply.answer.append(dns.rrset.from_text_list(question.name, 60, "IN", question.rdtype, found))
        return reply.to_wire()

    def _came(self, protocol: str, writer: asyncio.StreamWriter) -> None:
        where = writer.get_extra_info("sockname")
        self._visits.append((protocol, where[0].removeprefix("::ffff:"), where[1]))


def _certificate(directory: Path) -> ssl.SSLContext:
    """For whoever does not look."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "internet")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    signed = made.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1)).sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    (directory / "pem").write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "pem")
    return context


def _packed(given: str) -> bytes:
    return ipaddress.ip_address(given).packed


def _link(index: int) -> bytes:
    return struct.pack("=BBHiII", 0, 0, 0, index, 0, 0)


def _everything(network: str) -> bytes:
    """All addresses of a network are its own (a local route on lo)."""
    net = ipaddress.ip_network(network)
    body = struct.pack("=BBBBBBBBI", 2 if net.version == 4 else 10, net.prefixlen, 0, 0, 255, 4, 254 if net.version == 4 else 0, 2, 0)
    return message(netlink.RTM_NEWROUTE, F_CREATE | F_ACK, body, attr(1, net.network_address.packed), u32(4, 1))


def _to(index: int, network: str, via: str) -> bytes:
    net = ipaddress.ip_network(network)
    body = struct.pack("=BBBBBBBBI", 2 if net.version == 4 else 10, net.prefixlen, 0, 0, 254, 4, 0, 1, 0)
    return message(netlink.RTM_NEWROUTE, F_CREATE | F_ACK, body, attr(1, net.network_address.packed), u32(4, index), attr(5, _packed(via)))


@contextlib.contextmanager
def internet() -> Iterator[Internet]:
    """As a fixture wants it."""
    with Internet() as made:
        yield made


if __name__ == "__main__":
    with Internet() as there:
        print(there.name, flush=True)
        sys.stdin.read()
