"""Program: make a listening socket in another process's network namespace and hand it out. Needs nothing but Python.

    python -I -S listener.py PID PORT DESCRIPTOR

A namespace is entered as its owner: first the user namespace it belongs to, in
which this process then has every right, then the network (setns(2), ioctl_ns(2)).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import sys
import time

_NS_GET_USERNS = 0xB701
_NEWUSER = 0x10000000
_NEWNET = 0x40000000
_BACKLOG = 128
_TRIES = 1000


def main() -> None:
    pid, port, channel = (int(word) for word in sys.argv[1:])
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    owner = fcntl.ioctl(network, _NS_GET_USERNS)
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in ((owner, _NEWUSER), (network, _NEWNET)):
        if libc.setns(descriptor, kind) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    listener = socket.socket()
    _bind(listener, port)
    listener.listen(_BACKLOG)
    with socket.socket(fileno=channel) as out:
        socket.send_fds(out, [b"x"], [listener.fileno()])


def _bind(listener: socket.socket, port: int) -> None:
    for _ in range(_TRIES):
        try:
            listener.bind(("127.0.0.1", port))
            return
        except OSError as error:
            # bwrap may not have brought the loopback up yet.
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            time.sleep(0.005)
    raise OSError(errno.EADDRNOTAVAIL, "the loopback does not come up")


if __name__ == "__main__":
    main()
