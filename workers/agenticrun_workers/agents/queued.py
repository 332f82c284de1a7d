"""Agents with queues: coroutines that put prompts into one queue and get sampled responses from another, as AReaL's do.

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        await obs_queue.put((prompt.qid, prompt.token_ids, self.gconfig))
        act = await act_queue.get()
        _, rewards, *_ = await env.step((prompt.qid, texts))
        return [ScoredSequence(seq, reward) for seq, reward in zip(act.seqs, rewards)]

`QueuedAgent` plays such an agent behind the `Agent` protocol. Requests may be put before earlier ones are answered; answers come
in the order of the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from agenticrun_workers.agents.agent import AgentLimits, Episode, Generate
from agenticrun_workers.agents.chat import ChatFormat
from agenticrun_workers.agents.generation_config import GenerationConfig
from agenticrun_workers.agents.queued_episode import QueuedEpisode
from agenticrun_workers.agents.queued_types import BundledGenerationOutputs, Prompt, ScoredSequence
from agenticrun_workers.agents.service_view import view_of
from agenticrun_workers.envs import Env
from agenticrun_workers.envs.service import EnvironmentService, ServiceCalls
from agenticrun_workers.types import Trajectory

Request = tuple[str, list[int], GenerationConfig]
"""qid, token_ids, gconfig."""


class CollectsThroughQueues(Protocol):
    """What a user writes. One instance serves many episodes at once, so it keeps no state of an episode."""

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: EnvironmentService,
        obs_queue: asyncio.Queue[Request],
        act_queue: asyncio.Queue[BundledGenerationOutputs],
    ) -> ScoredSequence | Sequence[ScoredSequence]:
        """Play one episode and return its trajectories, at least one.

        Whatever it raises costs this episode. It must not block: all episodes of an env worker share its event loop.
        """
        ...


class QueuedAgent:
    """Plays a user's agent as an `Agent`."""

    def __init__(
        self,
        user: CollectsThroughQueues,
        *,
        tokenizer: PreTrainedTokenizerBase,
        limits: AgentLimits,
    ) -> None:
        self.user = user
        self._chat = ChatFormat(tokenizer)
        self._vocabulary = len(tokenizer)
        self._limits = limits
        self._calls = ServiceCalls(limits.step_timeout)

    async def collect_trajectory(
        self, episode: Episode, env: Env | EnvironmentService, generate: Generate
    ) -> list[Trajectory]:
        """See `Agent`."""
        view = view_of(env, episode, self._calls)
        return await QueuedEpisode(
            self.user.collect_trajectory,
            self._chat,
            self._vocabulary,
            self._limits,
            episode,
            view,
            generate,
        ).play()
