"""Every seed of a run derives from `pipeline.seed` by named streams: the same at every launch and after every resume.

Nothing here keeps a state, so there is nothing to restore: a seed is a function of what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np

from agenticrun_workers.agents import Episode
from agenticrun_workers.types import EpisodeKey, Stream


def derive(seed: int, *path: str | int) -> int:
    """A seed in [0, 2**63) for what `path` names; different paths give independent seeds."""
    words = [crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0] >> 1)


def env_seed(seed: int, stream: Stream, group: int) -> int:
    """The level of a group: equal for all its members."""
    return derive(seed, "env", stream.value, group)


def sampling_seed(seed: int, key: EpisodeKey, attempt: int = 0) -> int:
    """Sampling of one member; `attempt` counts the re-rolls of an episode that could not be trained on."""
    return derive(seed, "sampling", key.stream.value, key.group, key.member, attempt)


def episode(
    seed: int, key: EpisodeKey, tag: str, attempt: int = 0, item: Mapping[str, Any] | None = None
) -> Episode:
    """What an agent is asked to play; `item` is what the episode is about."""
    return Episode(
        key, tag, env_seed(seed, key.stream, key.group), sampling_seed(seed, key, attempt), item
    )
