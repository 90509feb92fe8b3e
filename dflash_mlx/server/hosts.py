"""Which names mean this machine alone."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can reach a host of this name: `localhost`, or a loopback address."""
    if host is None:
        return False
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
