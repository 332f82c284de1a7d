"""A lower bound of the time of a training step: a roofline of compute, memory and links.

No kernel reaches the peaks of a data sheet. Trained models reach 30 to 50 % of the peak of a GPU,
so that a step takes two to three times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agenticrun_api import AgenticRunSpec, Role
from agenticrun_workers.models.shape import ModelShape
from agenticrun_workers.sizing.gpus import Gpu
from agenticrun_workers.sizing.memory import (
    MASTER,
    SESSIONS,
    Layout,
    element,
    engine_memory,
    policy_layout,
    scoring_layout,
    trainer_memory,
)

BACKWARD = 2
"""Work of a backward pass, in forward passes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step that cannot be faster."""

    name: str
    seconds: float
    limit: str
    """Resource that takes the longest: compute, memory, links."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Shortest times of the parts of a step."""

    phases: tuple[Phase, ...]
    seconds: float
    """The whole step; with staleness, rollout and training overlap."""
    tokens: int
    """Assumed tokens of a trajectory."""
    sampled: int
    """Those of them that the engines sample."""


def step_time(
    spec: AgenticRunSpec, shapes: Mapping[Role, ModelShape], gpu: Gpu, tokens: int | None = None
) -> StepTime | None:
    """Return the shortest time of a step; None if policy or engines compute on CPUs.

    Args:
        spec: the run's.
        shapes: of the policy (`Role.TRAINER`), the reference and the critic.
        gpu: of all roles.
        tokens: of a trajectory. Default: `sequenceLength`, the longest.
    """
    pipeline = spec.pipeline
    if not (spec.roles.of(Role.TRAINER).gpus and spec.roles.of(spec.engine_role).gpus):
        return None
    if not gpu.flops:
        return None
    length = min(tokens or pipeline.sequence_length, pipeline.sequence_length)
    asked = max(env.max_steps * env.max_tokens_per_step for env in pipeline.envs)
    sampled = min(length, asked)
    policy = shapes[Role.TRAINER]
    rollout = _rollout(spec, policy, gpu, length, sampled)
    learning = [
        _pass("old log-probs", policy, policy_layout(spec), spec, gpu, length, passes=1),
        _train("training", policy, policy_layout(spec), spec, gpu, length),
    ]
    if pipeline.uses_reference:
        layout = scoring_layout(spec, Role.REFERENCE)
        shape = shapes[Role.REFERENCE]
        learning.insert(1, _pass("reference", shape, layout, spec, gpu, length, passes=1))
    if pipeline.uses_critic:
        layout = scoring_layout(spec, Role.CRITIC)
        learning.append(_train("critic", shapes[Role.CRITIC], layout, spec, gpu, length))
    sync = Phase("weights to the engines", 2 * element(spec) * policy.parameters / gpu.pcie, "PCIe")
    others = [sync]
    if spec.colocated:
        state = sum(item.bytes for item in trainer_memory(spec, shapes).device)
        others.append(Phase("handover of the GPUs", 2 * state / gpu.pcie, "PCIe"))
    learn = sum(phase.seconds for phase in learning)
    overlap = pipeline.staleness.max > 0
    work = max(rollout.seconds, learn) if overlap else rollout.seconds + learn
    phases = (rollout, *learning, *others)
    return StepTime(phases, work + sum(phase.seconds for phase in others), length, sampled)


def _longest(name: str, **seconds: float) -> Phase:
    limit = max(seconds, key=lambda key: seconds[key])
    return Phase(name, seconds[limit], limit)


def forward_flops(shape: ModelShape, length: int) -> float:
    """Return the operations of one token in a forward pass: matrices and causal attention."""
    return 2.0 * shape.multiplied + 2.0 * shape.layers * shape.query * length


def _train(
    name: str, shape: ModelShape, layout: Layout, spec: AgenticRunSpec, gpu: Gpu, length: int
) -> Phase:
    passes = 1 + BACKWARD + (layout.recompute and not layout.selective)
    return _pass(name, shape, layout, spec, gpu, length, passes=passes, trains=True)


def _pass(
    name: str,
    shape: ModelShape,
    layout: Layout,
    spec: AgenticRunSpec,
    gpu: Gpu,
    length: int,
    *,
    passes: int,
    trains: bool = False,
) -> Phase:
    """Return the time of so many forward passes over the batch."""
    tokens = spec.pipeline.rollout_batch_size * length / layout.ranks
    compute = passes * tokens * forward_flops(shape, length) / gpu.flops
    if layout.strategy != "fsdp2" or layout.ranks == 1:
        return _longest(name, compute=compute)
    # Each micro-batch gathers all units, when it trains twice, and then reduces the gradients.
    sent = layout.compute * (1 + trains) + (MASTER if trains else 0)
    divided = shape.divided(layout.expert_parallel)
    experts = sum(weight.numel for weight in divided.weights if weight.of_experts)
    units = (divided.parameters - experts) * (1 - 1 / layout.ranks)
    units += experts * (1 - layout.expert_parallel / layout.ranks)
    # Divided experts get their tokens from other ranks, and send the results back.
    hops = 2 * passes * shape.layers * shape.experts_used * (1 - 1 / layout.expert_parallel)
    exchanged = tokens * hops * shape.hidden * layout.compute
    one_node = spec.roles.replicas(Role.TRAINER) == 1
    batches = max(1.0, tokens / layout.tokens)
    links = (batches * sent * units + exchanged) / (gpu.link if one_node else gpu.network)
    return _longest(name, compute=compute, links=links)


def _rollout(spec: AgenticRunSpec, shape: ModelShape, gpu: Gpu, length: int, sampled: int) -> Phase:
    """Return the time to sample a batch: prompts are read once, tokens are decoded together."""
    strategy = spec.pipeline.actor_infer.strategy
    engine = engine_memory(spec, shape, gpu.memory)
    episodes = -(-spec.pipeline.rollout_batch_size // spec.actors(Role.INFERENCE))
    asked = strategy.config.get("max_num_seqs", strategy.config.get("max_running_requests"))
    most = int(asked) if isinstance(asked, int) else SESSIONS
    together = max(1, min(episodes, most, engine.cache_tokens // length))
    waves = -(-episodes // together)
    size = element(spec)
    read = size * min(shape.parameters, together * shape.active_parameters)
    cached = size * shape.kv_elements * together * length / 2  # on average, they are half as long
    decode = {
        "memory": (read + cached) / (strategy.gpus * gpu.bandwidth),
        "compute": together * forward_flops(shape, length) / (strategy.gpus * gpu.flops),
    }
    limit = max(decode, key=lambda key: decode[key])
    prefill = episodes * (length - sampled) * forward_flops(shape, length)
    seconds = waves * sampled * decode[limit] + prefill / (strategy.gpus * gpu.flops)
    return Phase("rollout", seconds, limit)
