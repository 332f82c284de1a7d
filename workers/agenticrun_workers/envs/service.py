"""Environments as services: asynchronous, with any action, possibly without state.

Agents with queues use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

from agenticrun_workers.envs.calls import EnvCalls, split_of
from agenticrun_workers.envs.env import EnvFault
from agenticrun_workers.types import StopReason, Stream

ServiceStep = tuple[Any, Any, bool, bool, Mapping[str, Any]]
"""Observation, reward, terminated, truncated, info."""


class ItemById:
    """`id2info` of a service. A service that sets an attribute of this name has its own."""

    def __get__(
        self, service: EnvironmentService | None, owner: type[EnvironmentService]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the episode's item under the id of its prompt."""
        return {} if service is None else {service.qid: service.item}


class EnvironmentService(ABC):
    """An environment for agents with queues (`agents/queued.py`).

    One instance serves one episode at a time. Agent and service agree on actions, observations and
    rewards: a batch of answers and a list of rewards, for example. Both methods are coroutines and
    must
    not block the event loop; slow work belongs in a thread or a process.
    """

    is_service: ClassVar[bool] = True

    instruction: str = ""
    """The system message of the first prompt; empty = none."""
    item: Mapping[str, Any] = MappingProxyType({})
    """The episode's item of `envs[].dataset`."""
    qid: str = ""
    """Id of the episode's prompt: `Prompt.qid`, the first part of AReaL's actions."""
    id2info = ItemById()
    """The item by that id, for code that looks it up as AReaL's environments do."""

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set the item of the next episode. Called before `reset` if there is a data set."""
        self.item = item

    async def reset(  # noqa: B027
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> Any:
        """Begin an episode.

        Args:
            seed: equal for all members of a group.
            options: `split` is train (also in the warm-up) or validation.

        Returns:
            The first user message; if it is not text, the item's column `prompt` is used.
        """

    @abstractmethod
    async def step(self, action: Any) -> ServiceStep:
        """Play an action."""


class ServiceCalls(EnvCalls):
    """Calls services like any environment: every error is an `EnvFault`."""

    async def begin(
        self,
        service: EnvironmentService,
        seed: int,
        stream: Stream,
        item: Mapping[str, Any] | None,
        qid: str = "",
    ) -> str:
        """Begin the episode of the prompt `qid` and return its first user message.

        Raises `EnvFault`.
        """
        service.qid = qid
        if item is not None:
            await self._call(cast(Any, service), service.set_item, item)
        said = await self._call(
            cast(Any, service),
            service.reset,
            seed=seed,
            options={"split": split_of(stream).value},
        )
        text = said[0] if isinstance(said, tuple) and len(said) == 2 else said
        if text is None:
            text = (item or {}).get("prompt")
        if not isinstance(text, str):
            raise EnvFault(
                StopReason.ENV_ERROR,
                f"there is no prompt: {type(service).__name__}.reset returned "
                f"{type(said).__name__} and the item has no text in a "
                "column 'prompt' (rename one with dataset.columns)",
            )
        return text

    async def act(self, service: EnvironmentService, action: Any) -> ServiceStep:
        """Play an action. Raises `EnvFault`."""
        result = await self._call(cast(Any, service), service.step, action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], Mapping):
            raise EnvFault(
                StopReason.ENV_ERROR,
                f"{type(service).__name__}.step returned {type(result).__name__}, not "
                "(observation, reward, terminated, truncated, info)",
            )
        return result
