"""`python -I -S preloaded_client.py SOCKET PROGRAM ARGUMENT...`: stand for a preloaded process.

It asks the server of `preloaded_server.py` for a process that runs the program with the folder,
environment and standard files of this one, passes SIGINT and SIGTERM on to it, and ends as it does.
Standard library only, and little of it: this is the start that remains.
"""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> int:
    """Return the program's exit status, or 128 and the number of the signal that killed it."""
    passed_on = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    request = [os.getcwd(), str(len(sys.argv) - 2), *sys.argv[2:]]
    request += [f"{name}={value}" for name, value in os.environ.items()]
    body = "\0".join(request).encode("utf-8", "surrogateescape")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        socket.send_fds(server, [len(body).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(body)
        if pid := int.from_bytes(server.recv(4), "big"):
            for number in passed_on:
                signal.signal(number, lambda number, _: os.kill(pid, number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        status = server.recv(16)
    if not status:
        return 128 + signal.SIGKILL  # the server is gone, and its processes with it
    return int(status) if int(status) >= 0 else 128 - int(status)


if __name__ == "__main__":
    sys.exit(main())
