"""GenerationConfig: how an agent with queues asks for responses, inside of what the run allows.

The run owns the sampling distribution, because the recorded log-probs are about it: an agent may name its values, and any other is
refused. The agent owns how many samples it wants and how long they may be, up to `envs[].maxTokensPerStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from agenticrun_workers.agents.agent import AgentLimits
from agenticrun_workers.plugins import camel_case, snake_case

MAX_SAMPLES = 256
"""Responses to one prompt; more would only queue up at the engine."""

OWNED = {
    "temperature": "actorInfer.generating.temperature",
    "top_p": "actorInfer.generating.topP",
    "top_k": "actorInfer.generating.topK",
    "min_p": "actorInfer.generating.minP",
}
"""What the run owns, and where it is set."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """How one prompt is answered. None: as the run says."""

    n: int = 1
    """Responses sampled from the prompt, each with a seed of its own."""
    max_new_tokens: int | None = None
    """Of each response. More than `envs[].maxTokensPerStep`, or than there is room for, is cut to that."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], limits: AgentLimits) -> GenerationConfig:
        """From an agent's `config.gconfig`, camelCase or snake_case, with the run's values filled in. Raises `ValueError`."""
        known = {field.name for field in fields(cls)}
        values = {snake_case(key): value for key, value in config.items()}
        unknown = [key for key in config if snake_case(key) not in known]
        if unknown:
            raise ValueError(
                f"gconfig has no key {unknown[0]!r} (known: {', '.join(map(camel_case, sorted(known)))})"
            )
        return cls(**values).within(limits)

    def new(self, **changes: Any) -> Self:
        """A copy with these values, as in AReaL: `gconfig.new(n=1)`."""
        return replace(self, **changes)

    def within(self, limits: AgentLimits) -> GenerationConfig:
        """With everything filled in that was None. Raises `ValueError` for what the run refuses."""
        for name, value in (("n", self.n), ("maxNewTokens", self.max_new_tokens)):
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ValueError(
                    f"gconfig.{name} must be a whole number of at least 1, not {value!r}"
                )
        if self.n > MAX_SAMPLES:
            raise ValueError(f"gconfig.n must be at most {MAX_SAMPLES}, not {self.n}")
        for name, place in OWNED.items():
            asked, owned = getattr(self, name), getattr(limits, name)
            if asked is not None and asked != owned:
                raise ValueError(
                    f"gconfig.{camel_case(name)} is {asked}, and the run samples with {owned}: leave it out, and set {place}"
                )
        longest = min(self.max_new_tokens or limits.max_tokens_per_step, limits.max_tokens_per_step)
        return replace(
            self, max_new_tokens=longest, **{name: getattr(limits, name) for name in OWNED}
        )
