"""How well-known environments of gymnasium are put into words, where nothing else is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Success = Literal["reward", "end"]
"""An episode is a success if its last reward is positive, or if it terminates."""


def no_fields(_: Any) -> Mapping[str, str]:
    """Of observations whose parts say everything."""
    return {}


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults of the adapter's config. Environments with a preset answer in microseconds."""

    task: str
    actions: tuple[str, ...]
    observation: str
    success: Success = "reward"
    fields: Callable[[Any], Mapping[str, str]] = field(default=no_fields)
    """More placeholders for the observation's template."""


TAXI_STANDS = (
    "R at row 0, column 0",
    "G at row 0, column 4",
    "Y at row 4, column 0",
    "B at row 4, column 3",
)


def taxi_fields(observation: Any) -> Mapping[str, str]:
    """Taxi's state number as places: ((row * 5 + column) * 5 + passenger) * 4 + destination."""
    rest, destination = divmod(int(observation), 4)
    rest, passenger = divmod(rest, 5)
    row, column = divmod(rest, 5)
    place = "in the taxi" if passenger == len(TAXI_STANDS) else f"at {TAXI_STANDS[passenger]}"
    return {
        "row": str(row),
        "column": str(column),
        "passenger": place,
        "destination": TAXI_STANDS[destination],
    }


CLIFF_WALKING = Preset(
    task="Walk from the start x to the target T and keep off the cliff C.",
    actions=("up", "right", "down", "left"),
    observation="{ansi}",
    success="end",
)
FROZEN_LAKE = Preset(
    task="Walk over the frozen lake F to the goal G and keep out of the holes H. You are where the brackets are.",
    actions=("left", "down", "right", "up"),
    observation="{ansi}",
)
TAXI = Preset(
    task="Drive the taxi to the passenger, pick the passenger up, drive to the destination and drop the passenger off.",
    actions=("south", "north", "east", "west", "pickup", "dropoff"),
    observation="The taxi is at row {row}, column {column}. The passenger is {passenger}. The destination is {destination}.\n{ansi}",
    fields=taxi_fields,
)
BLACKJACK = Preset(
    task="Get closer to 21 than the dealer without going over.",
    actions=("stick", "hit"),
    observation="Your cards sum to {0}, the dealer shows {1}, usable aces: {2}.",
)

PRESETS = {
    "CliffWalking": CLIFF_WALKING,
    "CliffWalkingSlippery": CLIFF_WALKING,
    "FrozenLake": FROZEN_LAKE,
    "FrozenLake8x8": FROZEN_LAKE,
    "Taxi": TAXI,
    "Blackjack": BLACKJACK,
}
"""By gymnasium's name without the version."""


def preset_of(id: str) -> Preset | None:
    """The preset of an environment's id, whatever its version."""
    return PRESETS.get(id.rpartition("-v")[0] or id)
