"""Seeds of a run, derived from `pipeline.seed` by named streams.

A seed is a pure function of its purpose. It is the same at every launch and after every resume, and
a checkpoint has no seed state to save.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np

from agenticrun_workers.types import EpisodeKey, Stream


def derive(seed: int, *path: str | int) -> int:
    """Return a seed in [0, 2**63) for the purpose that `path` names.

    Different paths give independent seeds.
    """
    words = [crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0] >> 1)


VALIDATION_SEEDS = 2**30
"""Seeds of environments are below this number, those of validation levels from it to 2**31."""


def env_seed(seed: int, stream: Stream, group: int) -> int:
    """Return the seed of a group's level. All members of the group play the same level.

    It is below 2**31, because many generators refuse larger ones, such as numpy's RandomState.
    Validation never has a seed of another stream.
    """
    level = derive(seed, "env", stream.value, group) % VALIDATION_SEEDS
    return level + (VALIDATION_SEEDS if stream is Stream.VALIDATION else 0)


def sampling_seed(seed: int, key: EpisodeKey, attempt: int = 0) -> int:
    """Return the seed that one member samples with.

    Args:
        seed: `pipeline.seed`.
        key: the episode.
        attempt: number of the re-roll, after attempts that could not be trained on; 0 = first try.
    """
    return derive(seed, "sampling", key.stream.value, key.group, key.member, attempt)
