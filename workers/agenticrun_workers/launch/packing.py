"""Methods of actors whose arguments and results travel as one block each (see `serialization`)."""

from __future__ import annotations

from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, TypeVar

from agenticrun_workers.serialization import pack, unpack

Method = TypeVar("Method", bound=Callable[..., Any])

MARK = "__packed__"


def packed(method: Method) -> Method:
    """Send each argument of a method of an actor, and what it returns, as one block.

    For values with many small arrays. They must not hold handles of actors. A tuple that the method
    returns is one block per item, so that `ActorHandle.call_pair` can split it.
    """
    setattr(method, MARK, True)
    return method


def is_packed(method: object) -> bool:
    return getattr(method, MARK, False) is True


class Block:
    """A value on its way to another process, where it arrives as the value itself."""

    def __init__(self, value: Any) -> None:
        self._data = pack(value)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[PickleBuffer]]:
        # A buffer, so that Ray does not copy the bytes into a pickle of its own.
        return unpack, (PickleBuffer(self._data),)
