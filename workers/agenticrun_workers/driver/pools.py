"""The engines and env workers of an attempt: they come, die, and follow the operator's numbers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agenticrun_api import AgenticRun, AgenticRunSpec, PoolStatus, Role
from agenticrun_api.roles import ELASTIC
from agenticrun_workers.driver.actors import ActorStarter, torch_threads
from agenticrun_workers.driver.metrics import Metrics
from agenticrun_workers.driver.progress import ProgressReporter, Requests
from agenticrun_workers.inference.actor import EngineActor
from agenticrun_workers.inference.pool import ColocatedSlot, EnginePool
from agenticrun_workers.launch import ActorHandle, killed_on_error
from agenticrun_workers.models.source import ModelSource, TokenizerCorpus
from agenticrun_workers.rollout.env_pool import EnvPool
from agenticrun_workers.rollout.env_worker import EnvWorker
from agenticrun_workers.rollout.trajectory_store import Stores
from agenticrun_workers.weights.transports import Transport

MANY_CALLS = 10_000
"""Concurrent calls of an async actor."""


class ActorPools:
    """Starts, replaces and resizes the engines and env workers.

    Args:
        run: the run.
        starter: starts the actors.
        on_change: called when engines or env workers join, die or leave.
    """

    def __init__(
        self,
        run: AgenticRun,
        starter: ActorStarter,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._starter = starter
        self._on_change = on_change
        loop = asyncio.get_running_loop()
        self.texts: asyncio.Future[TokenizerCorpus] = loop.create_future()
        """Set by the first env worker that has built the environments."""
        self.source: asyncio.Future[ModelSource] = loop.create_future()
        """Set by the start-up. Engines wait for it to load the model, env workers for its
        tokenizer."""
        self._slots: Sequence[ColocatedSlot] = ()
        """The place of each engine, where engines share the GPUs of trainers."""
        self._stores: Stores = ()
        self._env_names = (f"env-worker-{number}" for number in itertools.count())
        self._fixed = _fixed_pools(run.spec)
        self.engines = EnginePool(
            self._spawn_engine,
            run.spec.actors(Role.INFERENCE),
            self._send_endpoints,
            self._start_engine,
        )
        self.envs = EnvPool(
            self._spawn_env_worker,
            run.spec.actors(Role.ENV),
            node_of=lambda worker: starter.place_of(worker).node_id,
            on_change=on_change,
        )

    async def start_env_workers(self) -> None:
        """Start the env workers; those beyond minReplicas may join later."""
        await self.envs.start(self._needed(Role.ENV))

    async def start_engines(self, slots: Sequence[ColocatedSlot] = ()) -> None:
        """Start the engines; those beyond minReplicas may join later.

        Args:
            slots: the place of each engine, where engines share the GPUs of trainers. These
                engines sleep afterwards, so that the trainers can load their models.

        Raises:
            InvalidConfig: one cannot start with this model or these options.
        """
        self._slots = slots
        await self.engines.start(self._needed(Role.INFERENCE))
        if slots:
            await self.engines.sleep()

    async def connect(self, stores: Stores) -> None:
        """Let env workers run episodes with the engines, and put trajectories into these stores."""
        self._stores = stores
        await self._send_endpoints(self.engines.engines)

    def resize(self, replicas: Mapping[Role, int]) -> None:
        """Follow other numbers of pods, by role, in the background.

        Roles that cannot change while they run keep theirs; `status` says why.
        """
        for role, pool in self._elastic.items():
            # The operator sends all numbers whenever one of them changes.
            if role in replicas and not self._fixed.get(role):
                self._run = self._run.with_replicas({role.value: replicas[role]})
                pool.resize(self._run.spec.actors(role))

    async def follow(self, requests: Requests, progress: ProgressReporter) -> None:
        """Keep as many actors as the operator has asked for last, and report them; never ends."""
        while True:
            requests.changed.clear()
            if requests.config is not None:
                self.resize(requests.config.replicas)
            progress.pools(self.status)
            await requests.changed.wait()

    @property
    def status(self) -> dict[Role, PoolStatus]:
        """Counts of the current engines and env workers, by the role of their pods."""
        live: dict[Role, Collection[ActorHandle[Any]]] = {
            Role.INFERENCE: self.engines.engines.values(),
            Role.ENV: self.envs.workers.values(),
        }
        return {
            role: PoolStatus(
                replicas=self._run.spec.roles.replicas(role),
                serving=len(live[role]),
                joining=pool.joining,
                leaving=pool.leaving,
                vacant=self._starter.vacant_pods(role, live[role]),
                fixed=self._fixed.get(role, ""),
            )
            for role, pool in self._elastic.items()
        }

    @property
    def sizes(self) -> Metrics:
        """Return the numbers of engines and env workers at work, as metrics."""
        return {
            "system/engines": float(len(self.engines.serving)),
            "system/env_workers": float(len(self.envs.workers)),
        }

    async def stop(self) -> None:
        """Stop watching and replacing the actors, after a failed start too."""
        await self.envs.stop()
        await self.engines.stop()

    @property
    def _elastic(self) -> dict[Role, EnginePool | EnvPool]:
        """The pools with pods of their own."""
        pools: dict[Role, EnginePool | EnvPool] = {
            Role.INFERENCE: self.engines,
            Role.ENV: self.envs,
        }
        return {role: pool for role, pool in pools.items() if self._run.spec.roles.has(role)}

    def _needed(self, role: Role) -> int:
        """Return the number of actors of a role on its minReplicas: the others join later."""
        spec = self._run.spec
        # No others can join later, so all have to be there.
        if role in self._fixed or (role is Role.INFERENCE and spec.colocated):
            return spec.actors(role)
        return spec.roles.min_replicas(role) * spec.actors_per_pod(role)[role]

    async def _spawn_engine(self, engine_id: str, slot: int) -> ActorHandle[EngineActor]:
        options = replace(
            self._starter.options(Role.INFERENCE),
            # A replacement must take the GPUs of the engine that died: others belong to other
            # slots.
            node_id=self._slots[slot].node_id if self._slots else None,
            max_concurrency=MANY_CALLS,
        )
        actor = self._starter.start(options, EngineActor, engine_id)
        with killed_on_error(actor):
            self._starter.note(actor, await actor.call(lambda engine: engine.placement()))
        return actor

    async def _start_engine(self, actor: ActorHandle[EngineActor], slot: int) -> None:
        if self._slots:
            gpus = self._slots[slot].gpus
            await actor.call(lambda engine: engine.use_gpus(gpus))
        # Shielded: many wait for the future, and one that is cancelled must not cancel it.
        source = await asyncio.shield(self.source)
        threads = torch_threads(self._run, Role.INFERENCE, self._starter.place_of(actor).cores)
        await actor.call(lambda engine: engine.start(self._run.spec.pipeline, source, threads))

    async def _spawn_env_worker(self) -> ActorHandle[EnvWorker]:
        options = replace(self._starter.options(Role.ENV), max_concurrency=MANY_CALLS)
        name = next(self._env_names)
        actor = self._starter.start(options, EnvWorker, name, self._run.spec.pipeline)
        with killed_on_error(actor):
            self._starter.note(actor, await actor.call(lambda worker: worker.placement()))
            texts = await actor.call(lambda worker: worker.describe())
            # All env workers find the same texts, and replacements start when the model is made
            # already.
            if not self.texts.done():
                self.texts.set_result(texts)
            source = await asyncio.shield(self.source)
            await actor.call(lambda worker: worker.setup(source.tokenizer()))
        return actor

    async def _send_endpoints(self, engines: Mapping[str, ActorHandle[EngineActor]]) -> None:
        await self.envs.set_endpoints(engines, self._stores, self.engines.retired)
        self._on_change()


def _fixed_pools(spec: AgenticRunSpec) -> dict[Role, str]:
    """Return the roles with a number of actors that cannot change while they run, and why."""
    if spec.pipeline.deterministic:
        return dict.fromkeys(ELASTIC, "a deterministic run has one set of processes from its start")
    if spec.pipeline.weight_sync.transport == Transport.BROADCAST.value:
        return {Role.INFERENCE: "engines of weightSync.transport Broadcast form one group"}
    return {}
