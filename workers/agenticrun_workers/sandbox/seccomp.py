"""The system call filter: a BPF program that allows computing and answers the rest with EPERM.

It lists what is allowed, not what is forbidden, so system calls that a later kernel adds are
refused. What is missing matters more than what is listed. There is no way to start a process or a
program, to make a socket that reaches anything, to send a signal, to change modes, owners or times
of files, or to look into another process.
"""

from __future__ import annotations

import errno
import struct

from agenticrun_workers.sandbox.syscalls import NUMBERS

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By `platform.machine()`: the kernel's AUDIT_ARCH_* number, and the column in `NUMBERS`."""

ALLOWED_VALUES: dict[str, tuple[int, tuple[int, ...]]] = {
    "ioctl": (
        1,
        (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5450),
    ),  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIOCLEX FIONCLEX
    "fcntl": (
        1,
        (0, 1, 2, 3, 4, 5, 6, 7, 1030),
    ),  # F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC; not F_SETOWN, which sends signals
    "prctl": (0, (15, 16)),  # PR_SET_NAME PR_GET_NAME
    "prlimit64": (0, (0,)),  # of itself
    "socketpair": (0, (1,)),  # AF_UNIX: event loops wake themselves with it
}
"""Calls of which one argument must have one of these values: (argument, values)."""

CLONE_THREAD = 0x00010000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS
"""For clone3: a filter cannot see its flags. libc then falls back to clone."""
_KILL = 0x80000000
_X32 = 0x40000000


def program(machine: str) -> bytes:
    """Return the filter as `struct sock_filter[]`. Raises `KeyError` for an unknown machine."""
    architecture, column = ARCHITECTURES[machine]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _REFUSE),
    ]
    for name, numbers in NUMBERS.items():
        number = numbers[column]
        if number is not None:
            then = _consequence(name)
            code += [_instruction(_EQUAL, number, 0, len(then)), *then]
    return b"".join([*code, _instruction(_RETURN, _REFUSE)])


def _consequence(name: str) -> list[bytes]:
    """Return the instructions for this call, which end with a decision."""
    if name == "clone3":
        return [_instruction(_RETURN, _UNKNOWN)]
    if name == "clone":
        return [
            _load_argument(0),
            _instruction(_ANY_BIT, CLONE_THREAD, 0, 1),
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, _REFUSE),
        ]
    if name not in ALLOWED_VALUES:
        return [_instruction(_RETURN, _ALLOW)]
    argument, values = ALLOWED_VALUES[name]
    tests = [
        step
        for value in values
        for step in (_instruction(_EQUAL, value, 0, 1), _instruction(_RETURN, _ALLOW))
    ]
    return [_load_argument(argument), *tests, _instruction(_RETURN, _REFUSE)]


def _load_argument(position: int) -> bytes:
    """Load the lower half of an argument. The kernel ignores the rest in these calls.

    Both machines are little-endian.
    """
    return _instruction(_LOAD, _ARGUMENTS + 8 * position)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
