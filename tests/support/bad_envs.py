"""An environment that misbehaves on purpose as its config says, once per run or in one level."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from agenticrun_workers.envs import StepResult
from agenticrun_workers.types import Stream

GOOD = StepResult("word", 1.0, True, metrics={"success": 1.0})


class Bad:
    """One turn per episode.

    The first one to make the file `marker` misbehaves. With `seed`, every episode of that level
    misbehaves; with seed "any", every episode does.
    """

    instruction = ""

    def __init__(self, *, does: str = "", marker: str = "", seed: int | str = -1) -> None:
        self._does = does
        self._marker = marker
        self._bad_seed = seed

    def reset(self, seed: int, split: Stream) -> str:
        self._seed = seed
        return "word"

    def step(self, action: str) -> Any:
        bad = self._bad_seed in ("any", self._seed)
        return self._misbehave() if bad or self._is_first() else GOOD

    def valid_actions(self) -> list[str]:
        return ["word"]

    def _is_first(self) -> bool:
        try:
            Path(self._marker or __file__).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _misbehave(self) -> Any:
        match self._does:
            case "raise":
                raise ValueError(f"bad cell {time.time()}")
            case "sys.exit":
                sys.exit(3)
            case "nan":
                return StepResult("word", float("nan"), True)
            case "bytes":
                return b"word", 1.0, True, False, {}
            case "10 MB":
                return StepResult("word" * 2_500_000, 1.0, True)
            case "sleep":
                time.sleep(1000)
            case "async sleep":
                return asyncio.sleep(1000)
            case "hang in C":
                ctypes.PyDLL(None).sleep(1000)  # holds the GIL
            case "exit":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
        raise AssertionError(self._does)
