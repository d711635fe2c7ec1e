"""Addresses and numbers of the links' namespace. They are the same on every node: nothing of them is seen outside it."""
from __future__ import annotations

import ipaddress

from dsec.guard.services import GATEWAY

GATEWAY4 = ipaddress.IPv4Address(GATEWAY)
GATEWAY6 = ipaddress.IPv6Address("fd64:7365:6300::1")
DNS_PORT, WEB_PORT = 53, 3128
FIRST, LAST = 16, 65000  # numbers of links
_POOL4, _POOL6 = int(ipaddress.IPv4Address("100.99.0.0")), int(ipaddress.IPv6Address("fd64:7365:6300:1::"))
OWN = (ipaddress.ip_network("100.99.0.0/16"), ipaddress.ip_network("fd64:7365:6300::/48"))
LINK_INDEX = 1000  # interface index of link 0
UPLINK_INDEX = 50
INSIDE_INDEX = 100  # of eth0 in every sandbox
MAC = bytes.fromhex("026473656300")  # of both ends of every link: without ARP and ND, each end takes the other's for its own


def address4(number: int) -> ipaddress.IPv4Address:
    """Of the sandbox at a link."""
    return ipaddress.IPv4Address(_POOL4 + number)


def address6(number: int) -> ipaddress.IPv6Address:
    """Of the sandbox at a link."""
    return ipaddress.IPv6Address(_POOL6 + number)


def index(number: int) -> int:
    """Interface index of a link's outer end."""
    return LINK_INDEX + number


def number_of(interface: int) -> int:
    """The link of an interface index."""
    return interface - LINK_INDEX
