"""Fork the sandbox's processes and run code in them without any right that the kernel can remove.

Started by path with `python -s -P -S`, so it imports nothing of ours but `fork_server`. A child's
files are its source, output, errors and report. The parent never reads code: a child reads a line
of JSON (`Order`) and then the code from its source, reports on the pipe `REPORT` which layers hold,
and closes it before the code runs.

There is one thread only: a process with several threads must not make a user namespace, and a fork
keeps only the forking thread.
"""

from __future__ import annotations

import ast
import base64
import builtins
import ctypes
import json
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import TypedDict

sys.path.append(sys.argv.pop())  # the folder of our package, for this import alone
from agenticrun_workers.fork_server import libc, serve

sys.path.pop()
for name in ("agenticrun_workers.fork_server", "agenticrun_workers"):
    del sys.modules[name]

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, CLOSE_RANGE = 444, 445, 446, 436
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 24, 22, 38
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000

CONTROL, REPORT = 0, 3
"""File descriptors: the parent's socket; the child's report, after its input, output and errors."""

READ_FILE, READ_DIR, WRITE_FILE, REMOVE_FILE, MAKE_REG, TRUNCATE = (
    1 << 2,
    1 << 3,
    1 << 1,
    1 << 5,
    1 << 8,
    1 << 14,
)
FILE_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of Landlock's file rights in each version of its ABI."""


class Order(TypedDict):
    """The order that a child reads."""

    limits: dict[str, int]
    """Values of `resource.RLIMIT_*`, by name."""
    readable: list[str]
    scratch: str
    packages: list[str]
    seccomp: str
    """The filter's program in base64; empty if there is none for this machine."""
    required: list[str]
    """Layers without which no code runs."""


class Refused(OSError):
    """The kernel does not provide this layer."""


def main() -> None:
    files = serve(CONTROL)
    # From here on this is a child, which keeps only the files that were handed over.
    for number, fd in enumerate(files):
        os.dup2(fd, number)  # above REPORT: the parent's control, output, errors were there first
    # An inherited file would be a way out of the sandbox.
    if libc.syscall(CLOSE_RANGE, REPORT + 1, 2**31 - 1, 0) != 0:
        os.closerange(REPORT + 1, os.sysconf("SC_OPEN_MAX"))
    with open(0, "rb", closefd=False) as source:
        order: Order = json.loads(source.readline())
        code = source.read().decode()
    # Before Landlock, which leaves only this folder writable.
    os.chdir(order["scratch"])
    os.environ.update(HOME=order["scratch"], TMPDIR=order["scratch"])
    layers = {
        name: attempt(layer, order)
        for name, layer in (
            ("limits", set_limits),
            ("namespaces", unshare),
            ("capabilities", drop_capabilities),
            ("no_new_privileges", forbid_privileges),
            ("landlock", restrict_files),
            ("seccomp", filter_calls),
        )
    }
    # Every layer is tried, so that the report names all that are missing.
    missing = [name for name in order["required"] if layers[name].startswith("no: ")]
    os.write(REPORT, json.dumps(layers).encode())
    # The code must not be able to report for the launcher.
    os.close(REPORT)
    if missing:
        os._exit(0)
    sys.path += order["packages"]
    # Standard input was the order with the code: the code reads an empty one.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    run(code)


def run(code: str) -> None:
    """Run the code as its own module and print the value of a last expression.

    Interactive Python does the same.
    """
    module = sys.modules["__main__"] = ModuleType("__main__")
    names = module.__dict__
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # python -S has none
    linecache.cache["<code>"] = (
        len(code),
        None,
        [line + "\n" for line in code.splitlines()],
        "<code>",
    )
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
            if value is not None:
                print(repr(value))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = frames[
            next(
                (number for number, frame in enumerate(frames) if frame.filename == "<code>"),
                len(frames),
            ) :
        ]
        sys.stderr.write(
            "".join(
                traceback.format_list(own[:1] + own[1:][-2:])
                + traceback.format_exception_only(error)
            )
        )
        status = 1
    # `os._exit` flushes nothing.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = 1
    os._exit(status & 255)


def attempt(layer: Callable[[Order], str], order: Order) -> str:
    """Return the layer's report, or `no: ` and the reason why it does not hold."""
    try:
        return layer(order)
    except OSError as error:
        return f"no: {error}"


def set_limits(order: Order) -> str:
    for name, limit in order["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        # A hard limit that is lower already stays, because it cannot be raised.
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))
    return ", ".join(f"{name} {limit}" for name, limit in order["limits"].items())


def unshare(_: Order) -> str:
    """Give the process an empty network of its own, and no shared memory with others."""
    check("unshare", libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC))
    return "user, net, ipc"


def drop_capabilities(_: Order) -> str:
    # Kernels have fewer than 64: the call fails at the first that does not exist.
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) != 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    check("capset", libc.capset(header, nothing))
    return "none left"


def forbid_privileges(_: Order) -> str:
    # Without this, Landlock and seccomp would need privileges.
    check("prctl", prctl(PR_SET_NO_NEW_PRIVS, 1))
    check("prctl", prctl(PR_SET_DUMPABLE, 0))
    return "on"


def restrict_files(order: Order) -> str:
    """Allow reading below `readable`, and writing plain files in `scratch`. Nothing else."""
    abi = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    check("landlock", abi)
    rights = (1 << FILE_RIGHTS_BY_ABI.get(abi, 16)) - 1
    # ABI 4 can also forbid TCP, and ABI 6 signals and abstract sockets.
    ruleset = (ctypes.c_uint64 * 3)(rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset_fd = libc.syscall(
        LANDLOCK_CREATE, ruleset, ctypes.c_size_t(24 if abi >= 6 else 16 if abi >= 4 else 8), 0
    )
    check("landlock", ruleset_fd)
    for path in order["readable"]:
        allow_beneath(ruleset_fd, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
    writing = WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
    allow_beneath(ruleset_fd, order["scratch"], (READ_FILE | READ_DIR | writing) & rights)
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        allow_beneath(ruleset_fd, device, READ_FILE | WRITE_FILE)
    check("landlock", libc.syscall(LANDLOCK_RESTRICT, ruleset_fd, 0))
    os.close(ruleset_fd)
    return f"ABI {abi}"


def allow_beneath(ruleset_fd: int, path: str, rights: int) -> None:
    """Allow these rights below a path. A path that does not exist needs no rule."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rule = rights.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
    check("landlock", libc.syscall(LANDLOCK_ADD, ruleset_fd, 1, rule, 0))
    os.close(fd)


def filter_calls(order: Order) -> str:
    program = base64.b64decode(order["seccomp"])
    if not program:
        raise Refused("there is no filter for this machine")
    content = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filled = Program(len(program) // 8, ctypes.addressof(content))
    check("seccomp", prctl(PR_SET_SECCOMP, 2, ctypes.addressof(filled)))
    return f"{len(program) // 8} instructions"


def prctl(option: int, value: int, address: int = 0) -> int:
    answer: int = libc.prctl(option, *(ctypes.c_ulong(number) for number in (value, address, 0, 0)))
    return answer


def check(what: str, answer: int) -> None:
    """Raise `Refused` if the call failed."""
    if answer < 0:
        raise Refused(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
