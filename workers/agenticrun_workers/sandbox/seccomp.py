"""The system call filter: a BPF program that allows computing and answers the rest with EPERM.

It lists what is allowed, not what is forbidden, so system calls that a later kernel adds are
refused. What is missing matters more than what is listed. There is no way to start a process or a
program, to make a socket that reaches anything, to send a signal, to change modes, owners or times
of files, or to look into another process.
"""

from __future__ import annotations

import errno
import struct

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


NUMBERS: dict[str, tuple[int, int | None]] = {
    "access": (21, None),
    "alarm": (37, None),
    "arch_prctl": (158, None),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "fstat": (5, 80),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getitimer": (36, 102),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "ioctl": (16, 29),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "prctl": (157, 167),
    "pread64": (17, 67),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendfile": (40, 71),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setitimer": (38, 103),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "sigaltstack": (131, 132),
    "socketpair": (53, 199),
    "stat": (4, None),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, None),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Numbers of the system calls that computing needs: on x86-64, and on aarch64.

None: aarch64 has no such call.
"""
