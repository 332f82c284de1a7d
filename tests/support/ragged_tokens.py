"""Ragged trajectories as plain lists for slow definitions, and packed into the product's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from agenticrun_workers.algorithms import Tokens

NUMBERS = st.floats(-3, 3, width=32)


@dataclass(frozen=True)
class Token:
    """A response token."""

    engine: float
    old: float
    ref: float
    value: float


@dataclass(frozen=True)
class Turn:
    number: float
    """Its reward or advantage."""
    prompt: int
    """Tokens before its response."""
    response: tuple[Token, ...]


@dataclass(frozen=True)
class Trajectory:
    sequences: tuple[tuple[Turn, ...], ...]
    """One sequence of all turns, or one per turn, or anything between."""
    bootstrap: float
    trains: bool

    @property
    def turns(self) -> list[Turn]:
        return [turn for sequence in self.sequences for turn in sequence]

    @property
    def response(self) -> list[Token]:
        return [token for turn in self.turns for token in turn.response]

    @property
    def ends(self) -> list[bool]:
        """Per response token: the last of its turn."""
        return [
            i == len(turn.response) - 1 for turn in self.turns for i in range(len(turn.response))
        ]

    @property
    def rewards(self) -> list[float]:
        """Per response token: its turn's number on the last one."""
        return [
            turn.number if i == len(turn.response) - 1 else 0.0
            for turn in self.turns
            for i in range(len(turn.response))
        ]


def token_of(number: int) -> Token:
    """Return one of 2^32 tokens: log-probs in [-4, -1/64], a value in [-3, 3).

    One number is drawn four times as fast as four floats, and most draws are of tokens.
    """
    engine, old, ref, value = number.to_bytes(4, "little")
    return Token(-(engine + 1) / 64, -(old + 1) / 64, -(ref + 1) / 64, value * 3 / 128 - 3)


tokens = st.integers(0, 2**32 - 1).map(token_of)
turns = st.builds(Turn, NUMBERS, st.integers(0, 2), st.lists(tokens, max_size=3).map(tuple))
trajectories = st.builds(
    Trajectory,
    st.lists(st.lists(turns, max_size=3).map(tuple), max_size=3).map(tuple),
    NUMBERS,
    st.booleans(),
)
batches = st.lists(trajectories, max_size=5)


def pack(batch: Sequence[Trajectory]) -> tuple[Tokens, NDArray[np.float64]]:
    """The packed tokens and the turns' numbers. Prompts hold NaN: nothing may read them."""
    rows: list[tuple[int, float, float, float, float]] = []
    seqlens, trajectory_ends = [0], [0]
    numbers: list[float] = []
    nan = float("nan")
    nothing = (-1, nan, nan, nan, nan)
    for trajectory in batch:
        for sequence in trajectory.sequences:
            for turn in sequence:
                rows += [nothing] * turn.prompt
                rows += [
                    (len(numbers), token.engine, token.old, token.ref, token.value)
                    for token in turn.response
                ]
                numbers.append(turn.number)
            seqlens.append(len(rows))
        trajectory_ends.append(len(rows))
    columns = np.array(rows, np.float64).reshape(-1, 5).T
    engine, old, ref, value = (column.astype(np.float32) for column in columns[1:])
    packed = Tokens(
        cu_seqlens_S1=np.array(seqlens),
        cu_trajectories_N1=np.array(trajectory_ends),
        turns_L=columns[0].astype(np.int32),
        trains_N=np.array([trajectory.trains for trajectory in batch], np.bool_),
        engine_logprobs_L=engine,
        old_logprobs_L=old,
        ref_logprobs_L=ref,
        values_L=value,
        bootstrap_N=np.array([trajectory.bootstrap for trajectory in batch], np.float64),
    )
    return packed, np.array(numbers, np.float64)


def of_responses(packed: Tokens, values_L: NDArray[np.generic]) -> list[list[float]]:
    """The values at each trajectory's response tokens."""
    cuts = zip(packed.cu_trajectories_N1[:-1], packed.cu_trajectories_N1[1:], strict=True)
    return [
        [float(values_L[i]) for i in range(begin, end) if packed.turns_L[i] >= 0]
        for begin, end in cuts
    ]
