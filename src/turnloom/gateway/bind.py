"""Where a gateway may listen without an admin key of its own: on this machine only."""

from __future__ import annotations

from ipaddress import ip_address

from turnloom.errors import ConfigError


def checked_key(admin_key: str) -> str:
    """The admin key as a client can send it: a line end after it, as files have, is no part of it. Raises ConfigError."""
    key = admin_key.strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the admin key holds characters that no HTTP header can carry: use printable ASCII")
    return key


def check_bind(host: str, admin_key: str) -> None:
    """Raises ConfigError where others could reach the gateway and no admin key was set."""
    if not admin_key and not loopback(host):
        raise ConfigError(f"serving on {host or 'all addresses'} needs an admin key of your own: set --admin-key or TURNLOOM_ADMIN_KEY")


def loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
