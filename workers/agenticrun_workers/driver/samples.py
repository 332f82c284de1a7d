"""Sample episodes on disk for users: as text, and as animated GIFs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from agenticrun_api import Pipeline
from agenticrun_api.spec import Tracking
from agenticrun_workers.rollout.groups import EpisodeResult

log = logging.getLogger(__name__)


class SampleWriter:
    """Writes `tracking.sampleLogs` episodes per batch to samples/step-N[-val].txt.

    GIFs go to `tracking.renderDir` as step-N[-val]-<tag>-<group>-<member>.gif. Nothing is deleted.
    A failing disk does not stop training; it is logged once.

    Args:
        output: the run's output folder.
    """

    def __init__(self, output: Path, tracking: Tracking, pipeline: Pipeline) -> None:
        self._samples = output / "samples"
        self._pictures = output / tracking.render_dir if tracking.render_dir else None
        self._episodes = tracking.sample_logs
        self._every = pipeline.logging_steps
        self._works = True

    @property
    def frames(self) -> bool:
        """True if the run asks for GIFs."""
        return self._pictures is not None and self._episodes > 0

    def due(self, step: int) -> bool:
        """Return True if the batch of completed step `step` is sampled. Validations always are."""
        return self._every > 0 and step % self._every == 0

    def write(
        self, step: int, results: Iterable[EpisodeResult], *, validation: bool = False
    ) -> None:
        """Write at most `sampleLogs` of the episodes with a transcript, taking tags in turn.

        Args:
            step: completed training steps.
        """
        chosen = spread([result for result in results if result.transcript], self._episodes)
        if not chosen:
            return
        name = f"step-{step}{'-val' if validation else ''}"
        try:
            self._samples.mkdir(parents=True, exist_ok=True)
            (self._samples / f"{name}.txt").write_text(
                "\n".join(episode_text(result) for result in chosen), encoding="utf-8"
            )
            self._draw(name, chosen)
        except OSError as error:
            if self._works:
                log.warning("cannot write sample episodes: %s", error)
            self._works = False
        else:
            self._works = True

    def _draw(self, name: str, results: Iterable[EpisodeResult]) -> None:
        if self._pictures is None:
            return
        self._pictures.mkdir(parents=True, exist_ok=True)
        for result in results:
            if result.frames:
                (
                    self._pictures
                    / f"{name}-{result.tag}-{result.key.group}-{result.key.member}.gif"
                ).write_bytes(result.frames)


def spread(results: list[EpisodeResult], count: int) -> list[EpisodeResult]:
    """Return at most `count` episodes: one of each tag in order, then a second one of each."""
    nth: dict[str, int] = {}
    places: list[tuple[int, int]] = []
    for place, result in enumerate(results):
        nth[result.tag] = nth.get(result.tag, 0) + 1
        places.append((nth[result.tag], place))
    return [results[place] for _, place in sorted(places)[:count]]


def episode_text(result: EpisodeResult) -> str:
    """Return the text of an episode, below a line with its identity and outcome."""
    facts = [
        f"tag {result.tag}",
        f"group {result.key.group}",
        f"member {result.key.member}",
        *([f"branch {result.key.branch}"] if result.key.branch else []),
        f"score {result.score:.4g}",
        f"stop {result.stop_reason}",
        f"turns {result.turns}",
        f"tokens {result.tokens}",
        *([f"error {result.error}"] if result.error else []),
    ]
    return f"=== {', '.join(facts)} ===\n{result.transcript.rstrip()}\n"
