"""Stops a run whose engines compute another model than its trainer, before its first step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from agenticrun_api import Pipeline
from agenticrun_api.algorithm import Guards
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.inference.parity import Parity, ParityProbe, ProbeSample
from agenticrun_workers.launch import ActorHandle

if TYPE_CHECKING:
    from agenticrun_workers.inference.actor import EngineActor

log = logging.getLogger(__name__)

MOST_ENGINES = 4
"""Engines that are compared. All run the same code; `engine/<id>/logprob_gap` watches each."""
PARITY_GAP = "engine/parity_gap"


class Scorer(Protocol):
    """The trainer ranks; see `TrainerGroup`."""

    async def parity_probe(self) -> ParityProbe: ...

    async def parity(
        self, engines: Mapping[str, Sequence[ProbeSample]]
    ) -> Mapping[str, Parity]: ...


class Servers(Protocol):
    """The engines; see `EnginePool`."""

    @property
    def engines(self) -> Mapping[str, ActorHandle[EngineActor]]: ...


class ParityCheck:
    """Compares engines and trainer once per attempt, with the weights of the first sync.

    Engines and trainer may share devices: `sample` needs the engines, `compare` the trainer.
    """

    def __init__(self, trainers: Scorer, engines: Servers, pipeline: Pipeline) -> None:
        self._trainers = trainers
        self._engines = engines
        self._pipeline = pipeline
        self._played: dict[str, list[ProbeSample]] | None = None

    async def sample(self) -> None:
        """Have engines sample. One that dies of it is left out: the pool replaces it."""
        probe = await self._trainers.parity_probe()
        engines = dict(islice(self._engines.engines.items(), MOST_ENGINES))

        async def play(engine: ActorHandle[EngineActor], name: str) -> list[ProbeSample]:
            return await probe.play(
                lambda requests: engine.call(lambda actor: actor.sample(requests)),
                f"parity-{name}",
            )

        answers = await asyncio.gather(
            *(play(engine, name) for name, engine in engines.items()), return_exceptions=True
        )
        self._played = {}
        for name, answer in zip(engines, answers, strict=True):
            if isinstance(answer, Exception):
                log.warning("%s cannot be compared with the trainer: %s", name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._played[name] = answer

    async def compare(self) -> tuple[Metrics, InvalidConfig | None]:
        """Compare what was sampled, if that has not been done.

        Returns:
            the metric `engine/parity_gap`, of the engine that differs most; and the error to raise
            if it computes another model.
        """
        played, self._played = self._played, None
        if not played:
            return {}, None
        found = await self._trainers.parity(played)
        name, worst = max(found.items(), key=lambda item: item[1].gap / item[1].allowed)
        strategy = self._pipeline.actor_infer.strategy.name
        log.info(
            "%s (%s) and the trainer differ by %.2g nats over %d sampled tokens; rounding explains "
            "%.2g",
            name,
            strategy,
            worst.gap,
            worst.tokens,
            worst.allowed,
        )
        metrics = {PARITY_GAP: worst.gap}
        if worst.gap <= max(worst.allowed, self._accepted):
            return metrics, None
        return metrics, InvalidConfig(
            "spec.pipeline.actorInfer.strategy.name",
            f"the engine {strategy} computes another model than the trainer: log-probs of "
            f"{worst.tokens} tokens that {name} sampled differ by {worst.gap:.2g} nats, "
            f"rounding explains {worst.allowed:.2g}. Choose another engine; if you want this "
            f"difference, set guards.maxLogprobGap above {worst.gap:.2g} and "
            "algorithm.trainInferCorrection",
        )

    @property
    def _accepted(self) -> float:
        """Return the difference that the user accepts: a value above the default of the guard."""
        accepted = self._pipeline.guards.max_logprob_gap
        return accepted if accepted > Guards().max_logprob_gap else 0.0
