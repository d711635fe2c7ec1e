"""The namespace where the links of all sandboxes end, and the links: a veth pair each, point to point, no bridge.

The namespace is the node's own and nobody's else: no address of the host, no interface of the host and no program of the host but the
warden is in it, so what a sandbox sends meets nothing that was not put there for it. It is kept by a mount in the node's private mount
namespace and so lives as long as the launcher or any sandbox: a node or warden that dies cuts no connection, and when the last of them
is gone nothing is left to remove.

Neither end of a link speaks ARP or neighbour discovery: both have the same hardware address and take the other's for their own. The inner
end is in a namespace that belongs to the host's user namespace, so root inside can neither change it nor send what it did not build.
"""
from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from pathlib import Path

from dsec.guard.egress import layout
from dsec.guard.egress.layout import GATEWAY4, GATEWAY6, INSIDE_INDEX, MAC, address4, address6, index
from dsec.linux import calls, netlink
from dsec.linux.netlink import F_ACK, F_CREATE, F_DUMP, F_EXCL, ROUTE, Netlink, NetlinkError, attr, in_namespace, message, nest, text, u32

PIN = "/.node/network"  # in the node's mount namespace
_IFF_UP, _IFF_NOARP = 1, 0x80
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_ALIAS, _IFLA_AF_SPEC, _IFLA_NET_NS_FD = 1, 3, 18, 20, 26, 28
_IFLA_TXQ, _IFLA_RXQ = 31, 32
_LOOPBACK = 1
_NODAD = 2
_QUEUES = u32(_IFLA_TXQ, 1) + u32(_IFLA_RXQ, 1)
# no address of its own making on an interface
_NO_LINK_LOCAL = nest(_IFLA_AF_SPEC, nest(socket.AF_INET6, attr(8, b"\x01")))


class Router:
    """The links' namespace, which the calling thread enters for good."""

    def __init__(self, keeper: int | None) -> None:
        """`keeper`: a process in the node's mount namespace; None: the namespace goes with this thread. OSError."""
        self.host = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._pinned = 0
        kept = None if keeper is None else _kept(keeper)
        self.fresh = kept is None
        if kept is None:
            calls.unshare(calls.CLONE_NEWNET)
            self.own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        else:
            self.own = kept
            calls.setns(kept, calls.CLONE_NEWNET)
        if kept is not None and keeper is not None:
            self._pinned = _mounts_of(keeper)
        self.rtnl = Netlink(ROUTE)
        if self.fresh:
            self._furnish()
            if keeper is not None:
                self.pin(keeper)
        self._free: deque[int] = deque()
        self._tries = 0
        self._next = layout.FIRST
        self.links = self._found()  # number by sandbox
        for number in self.links.values():
            self._next = max(self._next, number + 1)

    def close(self) -> None:
        """Let go of the namespaces; the thread stays where it is."""
        self.rtnl.close()
        os.close(self.own)
        os.close(self.host)

    def pin(self, keeper: int) -> None:
        """Keep the namespace while the mount namespace of this process lives."""
        mounts = _mounts_of(keeper)
        if mounts == self._pinned:
            return
        child = os.fork()
        if child == 0:
            os._exit(_pin(keeper, self.own))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            raise OSError(status, f"keep the links' namespace: {os.strerror(status)}")
        self._pinned = mounts

    def attach(self, sandbox: str, inside: int) -> int:
        """Make a link from the namespace of this descriptor; the link's number. OSError, and nothing is left."""
        number = self._take()
        while True:
            try:
                self._make(number, sandbox, inside)
                break
            except NetlinkError as error:
                self._free.append(number)
                if error.errno not in (errno.EEXIST, errno.EBUSY) or self._tries > layout.LAST:
                    raise
                self._tries += 1  # the kernel has not removed the last link of this number yet
                number = self._take()
        self._tries = 0
        try:
            with in_namespace(inside, self.own):
                rtnl = Netlink(ROUTE)
            with rtnl:
                rtnl.send(_inside(number))
        except OSError:
            self.remove(number)
            raise
        self.links[sandbox] = number
        return number

    def detach(self, sandbox: str) -> int | None:
        """The link's number is free again. The kernel removes the link with the sandbox's namespace."""
        number = self.links.pop(sandbox, None)
        if number is not None:
            self._free.append(number)
        return number

    def remove(self, number: int) -> None:
        """Remove a link whose sandbox lives on. Takes some milliseconds."""
        with Netlink(ROUTE) as rtnl, contextlib.suppress(NetlinkError):
            rtnl.send([_link(netlink.RTM_DELLINK, 0, index(number))])

    # how --------------------------------------------------------------------------------------------------------------------------

    def _take(self) -> int:
        if len(self._free) > 64 or (self._free and self._next > layout.LAST):  # late: removal of the last link of a number is the kernel's
            return self._free.popleft()
        if self._next > layout.LAST:
            raise OSError(errno.EADDRNOTAVAIL, "every address of the links is in use")
        self._next += 1
        return self._next - 1

    def _make(self, number: int, sandbox: str, inside: int) -> None:
        outer = index(number)
        peer = struct.pack("=BBHiII", 0, 0, 0, INSIDE_INDEX, _IFF_NOARP, _IFF_NOARP)
        ends = text(_IFLA_IFNAME, "eth0") + attr(_IFLA_ADDRESS, MAC) + u32(_IFLA_NET_NS_FD, inside) + _QUEUES
        kind = nest(_IFLA_LINKINFO, text(1, "veth"), nest(2, attr(1 | netlink.NESTED, peer + ends)))
        self.rtnl.send(
            [
                _link(netlink.RTM_NEWLINK, F_CREATE | F_EXCL, outer, _IFF_NOARP, text(_IFLA_IFNAME, f"s{number}"), attr(_IFLA_ADDRESS, MAC),
                      _QUEUES, kind),
                _link(netlink.RTM_SETLINK, 0, outer, 0, text(_IFLA_ALIAS, sandbox), _NO_LINK_LOCAL),
                _link(netlink.RTM_SETLINK, 0, outer, _IFF_UP),
                _route(outer, address4(number).packed, 32),
                _route(outer, address6(number).packed, 128),
            ]
        )  # fmt: skip

    def _furnish(self) -> None:
        """What is there before the first link."""
        for name, value in (
            ("ipv4/ip_forward", 1), ("ipv6/conf/all/forwarding", 1), ("ipv4/conf/all/rp_filter", 0), ("ipv4/conf/default/rp_filter", 0),
            ("ipv6/conf/default/accept_ra", 0), ("ipv4/conf/all/send_redirects", 0), ("ipv4/conf/default/send_redirects", 0),
            ("ipv4/conf/all/accept_redirects", 0), ("ipv6/conf/all/accept_redirects", 0),
        ):  # fmt: skip
            Path("/proc/sys/net", name).write_text(f"{value}\n")
        self.rtnl.send(
            [
                _link(netlink.RTM_SETLINK, 0, _LOOPBACK, _IFF_UP),
                address(_LOOPBACK, GATEWAY4.packed, 32),
                address(_LOOPBACK, GATEWAY6.packed, 128),
                # what no other route leads to is judged, and so told of, before it is refused
                default_route(_LOOPBACK, socket.AF_INET, metric=1000), default_route(_LOOPBACK, socket.AF_INET6, metric=1000),
            ]
        )  # fmt: skip

    def _found(self) -> dict[str, int]:
        """Links that an earlier warden made, by sandbox."""
        found = {}
        for kind, body in self.rtnl.send([message(netlink.RTM_GETLINK, F_DUMP, struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0))]):
            interface = struct.unpack_from("=i", body, 4)[0]
            if kind == netlink.RTM_NEWLINK and interface >= index(layout.FIRST):
                alias = dict(netlink.attrs(body, 16)).get(_IFLA_ALIAS, b"").rstrip(b"\0").decode(errors="replace")
                if alias:
                    found[alias] = layout.number_of(interface)
        return found


def address(interface: int, packed: bytes, prefix: int) -> bytes:
    """The message that gives an interface an address."""
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    body = struct.pack("=BBBBI", family, prefix, _NODAD if family == socket.AF_INET6 else 0, 0, interface)
    return message(netlink.RTM_NEWADDR, F_CREATE | F_EXCL | F_ACK, body, attr(1, packed), attr(2, packed))


def default_route(interface: int, family: int, via: bytes = b"", metric: int = 1) -> bytes:
    """The message for a way to everywhere."""
    return _route(interface, b"", 0, family, via, metric)


def up(interface: int) -> bytes:
    """The message that brings an interface up, without an address of its own making."""
    return _link(netlink.RTM_SETLINK, 0, interface, _IFF_UP)


def _inside(number: int) -> list[bytes]:
    return [
        _link(netlink.RTM_SETLINK, 0, INSIDE_INDEX, 0, _NO_LINK_LOCAL),
        _link(netlink.RTM_SETLINK, 0, INSIDE_INDEX, _IFF_UP),
        address(INSIDE_INDEX, address4(number).packed, 32),
        address(INSIDE_INDEX, address6(number).packed, 128),
        default_route(INSIDE_INDEX, socket.AF_INET),
        default_route(INSIDE_INDEX, socket.AF_INET6),
    ]


def _link(kind: int, flags: int, interface: int, state: int = 0, *attributes: bytes) -> bytes:
    return message(kind, flags | F_ACK, struct.pack("=BBHiII", 0, 0, 0, interface, state, state), *attributes)


def _route(interface: int, packed: bytes, prefix: int, family: int = 0, via: bytes = b"", metric: int = 1) -> bytes:
    family = family or (socket.AF_INET if len(packed) == 4 else socket.AF_INET6)
    scope = 253 if not via and family == socket.AF_INET else 0  # link, universe
    body = struct.pack("=BBBBBBBBI", family, prefix, 0, 0, 254, 4, scope, 1, 0)  # main table, static, unicast
    to, gateway = attr(1, packed) if packed else b"", attr(5, via) if via else b""
    return message(netlink.RTM_NEWROUTE, F_CREATE | netlink.F_REPLACE | F_ACK, body, to, u32(4, interface), gateway, u32(6, metric))


def _mounts_of(pid: int) -> int:
    return os.stat(f"/proc/{pid}/ns/mnt").st_ino


def _kept(keeper: int) -> int | None:
    """A descriptor of the namespace that is kept there; None: there is none."""
    try:
        fd = os.open(f"/proc/{keeper}/root{PIN}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        calls.setns(fd, calls.CLONE_NEWNET)
    except OSError:
        os.close(fd)
        return None
    return fd


def _pin(keeper: int, own: int) -> int:
    """In a process of its own: mount the namespace. An errno, or 0."""
    try:
        tree = calls.syscall(calls.OPEN_TREE, own, b"", calls.OPEN_TREE_CLONE | calls.AT_EMPTY_PATH | os.O_CLOEXEC)
        mounts = os.open(f"/proc/{keeper}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        calls.setns(mounts, calls.CLONE_NEWNS)
        os.close(os.open(PIN, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        calls.syscall(calls.MOVE_MOUNT, tree, b"", calls.AT_FDCWD, PIN.encode(), calls.MOVE_MOUNT_F_EMPTY_PATH)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
