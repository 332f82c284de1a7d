"""Bytes of each process of a run: the arithmetic, item by item.

Parameters, gradients and optimizer state of fsdp2 are exact: the local sizes that FSDP2 gives the
first rank. Activations are the tensors that PyTorch keeps of a Llama-like layer (`layer_bytes`).
Everything is in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from agenticrun_api import AgenticRunSpec, Role
from agenticrun_api.training import Training
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.shape import ModelShape, Weight, check_experts
from agenticrun_workers.sizing.gpus import GIB

MASTER = 4
"""Bytes of a trained weight, and of its gradient: float32."""
MOMENTS = 8
"""Bytes of AdamW's two moments of a weight."""
LOAD_PEAK = 1.3
"""Memory at the load of a rank's shard, as a multiple of the shard."""
CONTEXT = 2 * GIB
"""CUDA context, NCCL's buffers and fragments of the allocator, on each GPU."""
GRAPHS = 2 * GIB
"""An engine's CUDA graphs and workspaces, outside the share that its options set."""
PROCESS = 4 * GIB
"""Host memory of a process with CUDA, beside tensors."""
CPU_PROCESS = GIB // 2
"""Host memory of a process without CUDA, beside tensors."""
CHECKPOINT = 12
"""Bytes of a trained weight in a checkpoint: the weight and both moments."""
LIVE = 1_000_000_000
"""Parameters that DeepSpeed gathers at a time, and the size of its buckets."""
SESSIONS = 256
"""Responses that an engine computes at once, if nothing else limits them."""
FRACTIONS = {"sglang": ("mem_fraction_static", 0.85), "vllm": ("gpu_memory_utilization", 0.9)}
"""The option that limits an engine's share of a GPU, and its default."""

OPTIONS = "spec.pipeline.actorTrain.strategy.config"

RECOMPUTE = "gradient_checkpointing"
"""The option of fsdp2 and deepspeed that recomputes layers in the backward pass."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a memory."""

    name: str
    bytes: float
    arithmetic: str = ""


def total(items: Iterable[Item]) -> float:
    """Return the sum of all items."""
    return sum(item.bytes for item in items)


def billions(count: float) -> str:
    """Format a number of parameters: 8.19 B, 494 M."""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a model and its computation over the ranks of a strategy."""

    strategy: Literal["fsdp2", "deepspeed", "megatron"]
    ranks: int
    compute: int
    """Bytes of an element in the computation."""
    tokens: int
    """Tokens of a micro-batch on one rank."""
    chunk: int = 2**27
    """Logits that exist at a time."""
    recompute: bool = False
    selective: bool = False
    """Recomputation keeps the results of matrix products and attention."""
    offload: bool = False
    """Parameters, gradients and optimizer state are in host memory."""
    offload_optimizer: bool = False
    reshard: bool = True
    """A layer's gathered parameters are freed after its forward pass."""
    stage: int = 3
    """Stage of ZeRO."""
    model_ranks: int = 1
    """Ranks that share one copy of the model: Megatron's tensor times pipeline size."""
    tensor: int = 1
    """Ranks that share each layer."""
    distributed_optimizer: bool = True
    copies: int = 1
    """Copies of the model that fsdp2 shards (HSDP)."""
    expert_parallel: int = 1
    """Ranks that divide the experts of fsdp2."""

    @property
    def plain(self) -> bool:
        """True for plain PyTorch: one rank that converts nothing and offloads nothing."""
        single = self.strategy == "fsdp2" and self.ranks == 1
        return single and self.compute == MASTER and not self.offload

    @property
    def shards(self) -> tuple[int, int, int]:
        """Ranks over which parameters, gradients and optimizer state are divided."""
        if self.strategy == "megatron":
            data = self.ranks // self.model_ranks if self.distributed_optimizer else 1
            return self.model_ranks, self.model_ranks, self.model_ranks * data
        if self.strategy == "deepspeed":
            n = self.ranks
            return n if self.stage == 3 else 1, n if self.stage >= 2 else 1, n
        shards = self.ranks // self.copies
        return shards, shards, shards


def layout_of(
    strategy: Literal["fsdp2", "deepspeed", "megatron"],
    config: Mapping[str, Any],
    ranks: int,
    compute: int,
    tokens: int,
) -> Layout:
    """Return the layout of a trained model.

    Args:
        strategy: the training backend.
        config: its options (`strategy.config`).
        ranks: of the trainer.
        compute: bytes of an element in the computation.
        tokens: of a micro-batch, of all ranks that share it.

    Raises:
        InvalidConfig: an option that must be a number is none.
    """
    given = config.get("zero_optimization")
    zero = given if isinstance(given, Mapping) else {}

    def number(name: str, default: int = 1) -> int:
        value = config.get(name, default)
        if type(value) is not int or (value < 1 and value != default):
            raise InvalidConfig(
                f"{OPTIONS}.{name}", f"must be a number of at least 1, not {value!r}"
            )
        return value

    tensor = number("tensor_model_parallel_size")
    shared = number("ulysses_sequence_parallel_size") * number("context_parallel_size")
    shards = number("fsdp_size", -1)
    section = zero.get("offload_optimizer")
    return Layout(
        strategy=strategy,
        ranks=ranks,
        compute=compute,
        tokens=-(-tokens // shared),
        chunk=number("logits_chunk_elements", 2**27),
        recompute=bool(config.get(RECOMPUTE)) or config.get("recompute_granularity") == "full",
        selective=strategy == "fsdp2" and config.get("recompute_granularity") == "selective",
        offload=bool(config.get("offload_policy")),
        offload_optimizer=isinstance(section, Mapping) and section.get("device") == "cpu",
        reshard=bool(config.get("reshard_after_forward", True)),
        stage=zero.get("stage", 3),
        model_ranks=tensor * number("pipeline_model_parallel_size"),
        tensor=tensor,
        distributed_optimizer=bool(config.get("use_distributed_optimizer", True)),
        copies=max(1, ranks // shards) if shards > 0 else 1,
        expert_parallel=number("expert_parallel_size"),
    )


def policy_layout(spec: AgenticRunSpec) -> Layout:
    """Return the layout of the policy on the trainer's ranks.

    Raises:
        InvalidConfig: an option that must be a number is none, or does not divide the ranks.
    """
    train = spec.pipeline.actor_train
    tokens = _micro_batch(spec, train.training, Role.TRAINER)
    ranks = spec.actors(Role.TRAINER)
    name, config = train.strategy.name, train.strategy.config
    layout = layout_of(name, config, ranks, element(spec), tokens)
    shards = config.get("fsdp_size", -1)
    if name == "fsdp2" and shards > 0 and ranks % shards:
        raise InvalidConfig(
            f"{OPTIONS}.fsdp_size", f"{shards} does not divide the {ranks} trainer ranks"
        )
    return layout


def scoring_layout(spec: AgenticRunSpec, role: Role) -> Layout:
    """Return the layout of reference or critic: fsdp2, on their own ranks or the trainer's."""
    policy = policy_layout(spec)
    own = spec.roles.has(role)
    ranks = spec.actors(role) if own else policy.ranks
    layout = Layout("fsdp2", ranks, policy.compute, policy.tokens, chunk=policy.chunk)
    if policy.strategy != "fsdp2":
        return layout
    return replace(
        layout,
        recompute=policy.recompute,
        selective=policy.selective,
        offload=policy.offload,
        reshard=policy.reshard,
        copies=1 if own else policy.copies,
        expert_parallel=1 if own else policy.expert_parallel,
    )


def element(spec: AgenticRunSpec) -> int:
    """Return the bytes of a weight in the computation and in the engines."""
    return 2 if spec.model.dtype == "bfloat16" else 4


def _micro_batch(spec: AgenticRunSpec, training: Training, role: Role) -> int:
    """Return the tokens of the largest micro-batch: a trajectory, whatever its length, has one.

    Args:
        role: whose pods train.
    """
    length = spec.pipeline.sequence_length
    most = training.micro_batch_tokens(on_gpus=spec.roles.of(role).gpus > 0)
    return max(length, min(most, spec.pipeline.rollout_batch_size * length))


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """A model on one rank: what it always holds, and what each phase of a step adds."""

    device: tuple[Item, ...]
    """Always, on the device that computes."""
    host: tuple[Item, ...]
    """Always, in host memory."""
    load: tuple[Item, ...]
    """All that the load of the weights needs, in host memory."""
    load_on_device: tuple[Item, ...]
    """The same, on the device, if it is more than the weights that stay."""
    phases: Mapping[str, tuple[Item, ...]]
    """Additions of each phase of a step to `device`, by the phase's name."""
    snapshot: tuple[Item, ...] = ()
    """The copy of what a checkpoint holds, in host memory. It stays for the next one."""


def model_memory(
    shape: ModelShape, layout: Layout, role: str, *, lora: Iterable[Weight] | None = None
) -> ModelMemory:
    """Return the memory of one rank of a trained model.

    Args:
        shape: the model's.
        layout: of the model.
        role: goes before the name of each item.
        lora: the adapters; the model itself is frozen then.
    """
    adapters = None if lora is None else tuple(lora)
    weights, gradients, optimizer = layout.shards
    trained = shape.weights if adapters is None else adapters
    state: list[Item] = []
    fsdp2 = layout.strategy == "fsdp2"
    if adapters is not None:
        frozen = layout.compute if fsdp2 else MASTER
        state.append(_sharded(f"{role}frozen weights", shape.weights, frozen, weights, layout))
    size = MASTER if fsdp2 else layout.compute
    state.append(_sharded(f"{role}weights", trained, size, weights, layout))
    state.append(_sharded(f"{role}gradients", trained, MASTER, gradients, layout))
    masters = 0 if fsdp2 or layout.compute == MASTER else MASTER
    moments = _sharded(
        f"{role}AdamW{' and master weights' if masters else ''}",
        trained,
        MOMENTS + masters,
        optimizer,
        layout,
    )
    load = _load(shape, layout, role, state[0])
    whole = load if layout.strategy == "deepspeed" else ()
    phases = _phases(shape.divided(layout.expert_parallel), layout, role, adapters)
    saved = weights if fsdp2 else layout.ranks
    copies = (_sharded(f"{role}copy for checkpoints", trained, CHECKPOINT, saved, layout),)
    if layout.offload:
        return ModelMemory((), (*state, moments), load, whole, phases, copies)
    if layout.offload_optimizer:
        return ModelMemory(tuple(state), (moments,), load, whole, phases, copies)
    return ModelMemory((*state, moments), (), load, whole, phases, copies)


def frozen_memory(
    shape: ModelShape, layout: Layout, role: str, *, saved: bool = False
) -> ModelMemory:
    """Return the memory of one rank of a model that only scores.

    Args:
        saved: checkpoints hold it.
    """
    weights = _sharded(f"{role}weights", shape.weights, layout.compute, layout.shards[0], layout)
    part = shape.divided(layout.expert_parallel)
    gathered = () if layout.plain else (_gathered(part, layout, role),)
    size = layout.compute * layout.tokens * (2 * shape.query + 2 * shape.mlp + 6 * shape.hidden)
    forward = Item(f"{role}activations of a layer", size, f"{layout.tokens:,} tokens")
    phases = {"scoring": (*gathered, forward, _logits(shape, layout, role))}
    load = _load(shape, layout, role, weights)
    copies = (replace(weights, name=f"{role}copy for checkpoints"),) if saved else ()
    if layout.offload:
        return ModelMemory((), (weights,), load, (), phases, copies)
    return ModelMemory((weights,), (), load, (), phases, copies)


def _sharded(name: str, weights: Iterable[Weight], size: int, ranks: int, layout: Layout) -> Item:
    """Return an item of so many bytes for each element, divided over ranks."""
    found = tuple(weights)
    count = sum(weight.numel for weight in found)
    parts = layout.expert_parallel
    local = (
        sum(weight.local(ranks, expert_parallel=parts) for weight in found)
        if layout.strategy == "fsdp2"
        else count / ranks
    )
    over = f" / {ranks} ranks" if ranks > 1 else ""
    return Item(name, size * local, f"{billions(count)} x {size} bytes{over}")


def _phases(
    shape: ModelShape, layout: Layout, role: str, adapters: tuple[Weight, ...] | None
) -> dict[str, tuple[Item, ...]]:
    """Return what loading, both halves of the backward pass and the optimizer add."""
    head = shape.vocabulary * shape.hidden // layout.tensor
    both = MASTER + layout.compute
    """Bytes of a gradient on its way from the computation's dtype to the sum of all ranks."""
    trains_all = adapters is None
    kept = _kept(shape, layout, role)
    gathered = _gathered(shape, layout, role)
    layer, embedding = shape.largest_layer, shape.embedding_unit
    reduced, of_embedding = 0, 0
    text = ""
    if layout.strategy == "deepspeed" and layout.ranks > 1:
        reduced = layout.compute * min(shape.parameters, LIVE // 2)
        text = f"a bucket of {billions(LIVE // 2)}"
    elif layout.strategy == "fsdp2" and trains_all and not layout.plain:
        # One buffer is filled while the one before it is reduced.
        reduced, of_embedding = 2 * both * layer, both * embedding
        text = f"2 layers of {billions(layer)} x {both} bytes"
    last = max(head, shape.head_units) if layout.strategy == "fsdp2" else head
    of_head = both * last if trains_all else 0
    return {
        "backward pass of the output layer": _nonzero(
            gathered,
            kept,
            Item(
                f"{role}gradient of the output layer", of_head, f"{billions(last)} x {both} bytes"
            ),
            _logits(shape, layout, role),
        ),
        "backward pass of a layer": _nonzero(
            gathered,
            kept,
            Item(f"{role}reduce buffers", reduced, text),
            _recomputed(shape, layout, role),
        ),
        "backward pass of the embedding": _nonzero(
            gathered,
            Item(
                f"{role}gradient of the embedding",
                of_embedding,
                f"{billions(embedding)} x {both} bytes",
            ),
        ),
    }


def _load(shape: ModelShape, layout: Layout, role: str, weights: Item) -> tuple[Item, ...]:
    """Return the memory of a load: the weights that stay, and what is read beside them."""
    if layout.strategy == "deepspeed":
        size = MASTER * shape.parameters
        text = f"{billions(shape.parameters)} x {MASTER} bytes on every rank"
        return (Item(f"{role}whole model at load", size, text),)
    beside = (LOAD_PEAK - 1) * weights.bytes
    return weights, Item(f"{role}buffers at load", beside, f"{LOAD_PEAK - 1:.1f} x the shard")


def _gathered(shape: ModelShape, layout: Layout, role: str) -> Item:
    """Return the parameters that are whole on a rank at a time."""
    name = f"{role}gathered units"
    if layout.strategy == "megatron" or layout.plain:
        return Item(name, 0)
    if layout.strategy == "deepspeed":
        live = min(shape.parameters, LIVE) if layout.stage == 3 else 0
        return Item(name, layout.compute * live, f"{billions(live)} x {layout.compute} bytes")
    if not layout.reshard:
        count, text = shape.parameters, "all units"
    else:  # one layer computes while the next one is gathered
        count = shape.head_units + 2 * shape.largest_layer
        text = "output layer and 2 layers"
    return Item(name, layout.compute * count, f"{text}: {billions(count)} x {layout.compute} bytes")


def layer_bytes(shape: ModelShape, compute: int) -> int:
    """Return what PyTorch keeps of one token in one layer for the backward pass.

    Two RMSNorms (a float32 copy and the normalised input each), the inputs of the projections,
    queries, keys, values and the output of attention, norms of queries and keys, and the four
    tensors of a gated MLP.
    """
    norms = 2 * (4 + compute) * shape.hidden
    inputs = 2 * compute * shape.hidden
    attention = compute * (2 * shape.query + 2 * shape.key_value)
    qk_norm = (4 + compute) * (shape.query + shape.key_value) if shape.qk_norm else 0
    return norms + inputs + attention + qk_norm + 4 * compute * shape.mlp


def _kept(shape: ModelShape, layout: Layout, role: str) -> Item:
    """Return the activations that live from the forward to the backward pass."""
    layers = -(-shape.layers * layout.tensor // layout.model_ranks)
    if layout.recompute:
        products = 2 * (shape.query + shape.key_value + shape.hidden + shape.mlp)
        size = layout.compute * (shape.hidden + products * layout.selective)
        what = "inputs and products" if layout.selective else "inputs"
        text = f"{what} of {layers} layers x {layout.tokens:,} tokens x {size:,} bytes"
        return Item(f"{role}activations", layers * layout.tokens * size, text)
    size = layer_bytes(shape, layout.compute) // layout.tensor
    text = f"{layers} layers x {layout.tokens:,} tokens x {size:,} bytes"
    return Item(f"{role}activations", layers * layout.tokens * size, text)


def _recomputed(shape: ModelShape, layout: Layout, role: str) -> Item:
    """Return the activations and gradients of the layer that the backward pass is in."""
    temporary = layout.compute * (2 * shape.mlp + 3 * shape.hidden)
    size = (temporary + layer_bytes(shape, layout.compute) * layout.recompute) // layout.tensor
    return Item(
        f"{role}one layer's {'recomputation and ' * layout.recompute}gradients",
        layout.tokens * size,
        f"{layout.tokens:,} tokens x {size:,} bytes",
    )


def _logits(shape: ModelShape, layout: Layout, role: str) -> Item:
    elements = min(layout.chunk, layout.tokens * shape.vocabulary // layout.tensor)
    return Item(
        f"{role}logits", 3 * 4 * elements, f"3 x 4 bytes x {elements / 1e6:.0f} M of a chunk"
    )


def _nonzero(*items: Item) -> tuple[Item, ...]:
    return tuple(item for item in items if item.bytes)


def unite(*models: ModelMemory) -> ModelMemory:
    """Return the memory of a rank with several models, of which one computes at a time."""
    phases: dict[str, tuple[Item, ...]] = {}
    for model in models:
        for name, items in model.phases.items():
            if name not in phases or total(items) > total(phases[name]):
                phases[name] = items
    return ModelMemory(
        tuple(item for model in models for item in model.device),
        tuple(item for model in models for item in model.host),
        tuple(item for model in models for item in model.load),
        tuple(item for model in models for item in model.load_on_device),
        phases,
        tuple(item for model in models for item in model.snapshot),
    )


def in_host_memory(
    memory: ModelMemory, *, on_gpus: bool, colocated: bool, saves: bool
) -> tuple[Item, ...]:
    """Return what a rank has in host memory at most, beside its process.

    Args:
        memory: of the rank.
        on_gpus: it computes on a GPU. Its weights pass through host memory when they are loaded.
        colocated: its state waits in host memory while engines use its GPU.
        saves: the run saves checkpoints.
    """
    copies = memory.snapshot if saves else ()
    if not on_gpus:
        return (*memory.host, *peak(memory)[1], *copies)
    states = (*memory.host, *memory.device) if colocated else memory.host
    return max((*states, *copies), memory.load, key=total)


def peak(memory: ModelMemory) -> tuple[str, tuple[Item, ...]]:
    """Return the phase that needs the most on the device that computes, and all that it needs."""
    phases = {name: (*memory.device, *items) for name, items in memory.phases.items()}
    return max({**phases, "load": memory.load_on_device}.items(), key=lambda phase: total(phase[1]))


def trainer_memory(spec: AgenticRunSpec, shapes: Mapping[Role, ModelShape]) -> ModelMemory:
    """Return the memory of a trainer rank: the policy, and reference and critic without pods.

    Args:
        spec: the run's.
        shapes: of the policy (`Role.TRAINER`), the reference and the critic.

    Raises:
        InvalidConfig: the ranks cannot divide the experts of a model.
    """
    pipeline = spec.pipeline
    lora = pipeline.actor_train.lora
    policy, layout = shapes[Role.TRAINER], policy_layout(spec)
    _require_experts(policy, layout)
    adapters = None if lora is None else policy.adapters(lora.rank, lora.target_modules)
    models = [model_memory(policy, layout, "", lora=adapters)]
    if pipeline.uses_reference and not spec.roles.has(Role.REFERENCE):
        models.append(scorer_memory(spec, shapes, Role.REFERENCE, "reference: "))
    if pipeline.uses_critic and not spec.roles.has(Role.CRITIC):
        models.append(scorer_memory(spec, shapes, Role.CRITIC, "critic: "))
    return unite(*models)


def scorer_memory(
    spec: AgenticRunSpec, shapes: Mapping[Role, ModelShape], role: Role, prefix: str = ""
) -> ModelMemory:
    """Return the memory of a rank of the reference or the critic.

    Raises:
        InvalidConfig: the ranks cannot divide the experts of the model.
    """
    layout = scoring_layout(spec, role)
    _require_experts(shapes[role], layout)
    if role is Role.REFERENCE:
        reference = spec.pipeline.reference
        saved = not (reference and reference.path)
        return frozen_memory(shapes[role], layout, prefix, saved=saved)
    assert spec.pipeline.critic is not None
    own = role if spec.roles.has(role) else Role.TRAINER
    tokens = _micro_batch(spec, spec.pipeline.critic.training, own)
    return model_memory(shapes[role], replace(layout, tokens=tokens), prefix)


def _require_experts(shape: ModelShape, layout: Layout) -> None:
    """Raise `InvalidConfig` if the ranks cannot divide or spread the experts of a layer."""
    if layout.strategy != "fsdp2":
        return
    try:
        for experts in {weight.shape[0] for weight in shape.weights if weight.of_experts} or {0}:
            check_experts(
                experts,
                layout.ranks,
                copies=layout.copies,
                expert_parallel=layout.expert_parallel,
            )
    except ValueError as error:
        raise InvalidConfig(OPTIONS, str(error)) from error


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """One GPU of an engine."""

    items: tuple[Item, ...]
    """All that must fit into `budget`; the KV cache takes what the weights leave."""
    budget: float
    """Bytes that the engine's options allow."""
    outside: float
    """Bytes beside the budget: CUDA graphs, workspaces, context."""
    cache_tokens: int
    """Tokens in the whole KV cache of the engine."""


def engine_memory(spec: AgenticRunSpec, shape: ModelShape, memory: float) -> EngineMemory:
    """Return the memory of each GPU of an engine.

    Args:
        spec: the run's.
        shape: the policy's.
        memory: of one GPU, or of the engine's part of a pod without GPUs.
    """
    strategy = spec.pipeline.actor_infer.strategy
    gpus, size = strategy.gpus, element(spec)
    over = f" / {gpus} GPUs" if gpus > 1 else ""
    weights = Item(
        "weights",
        size * shape.parameters / gpus,
        f"{billions(shape.parameters)} x {size} bytes{over}",
    )
    longest = spec.pipeline.sequence_length
    # Key-value heads are divided over the GPUs; a GPU has at least one.
    token = size * shape.kv_elements / min(gpus, max(1, shape.kv_heads))
    option, default = FRACTIONS.get(strategy.name, ("", 1.0))
    if not option or not spec.roles.of(spec.engine_role).gpus:
        cache = Item("KV cache", token * longest, f"a sequence of {longest:,} tokens")
        return EngineMemory((weights, cache), max(0.0, memory - CONTEXT), CONTEXT, longest)
    config = {name.replace("-", "_"): value for name, value in strategy.config.items()}
    share = config.get(option, default)
    if type(share) not in (int, float) or not 0 < share <= 1:
        field = f"spec.pipeline.actorInfer.strategy.config.{option}"
        raise InvalidConfig(field, f"must be a number above 0 and at most 1, not {share!r}")
    budget = share * memory
    # gpu_memory_utilization of vllm counts graphs and workspaces, mem_fraction_static does not.
    inside = (Item("CUDA graphs, workspaces", GRAPHS),) if strategy.name == "vllm" else ()
    room = budget - weights.bytes - total(inside)
    tokens = max(longest, int(room / token) if token else longest)
    cache = Item("KV cache", max(room, token * longest), f"{tokens:,} tokens x {token:,.0f} bytes")
    return EngineMemory((weights, *inside, cache), budget, 0 if inside else GRAPHS, tokens)


def shared_memory(spec: AgenticRunSpec, shape: ModelShape, role: Role) -> tuple[Item, ...]:
    """Return what a pod of a role holds in /dev/shm."""
    lora = spec.pipeline.actor_train.lora
    carries_engines = role is spec.engine_role
    transport = spec.pipeline.weight_sync.transport
    if role not in (Role.TRAINER, spec.engine_role) or transport == "Broadcast":
        return ()
    if lora is not None and not carries_engines:
        count = sum(weight.numel for weight in shape.adapters(lora.rank, lora.target_modules))
        return (Item("adapters", 4 * count, f"{billions(count)} x 4 bytes"),)
    size = element(spec)
    return (
        Item(
            "weights for the engines",
            size * shape.parameters,
            f"{billions(shape.parameters)} x {size} bytes",
        ),
    )


def checkpoint_bytes(spec: AgenticRunSpec, shapes: Mapping[Role, ModelShape]) -> float:
    """Return the bytes of one checkpoint."""
    pipeline = spec.pipeline
    lora, policy = pipeline.actor_train.lora, shapes[Role.TRAINER]
    count = (
        policy.parameters
        if lora is None
        else sum(weight.numel for weight in policy.adapters(lora.rank, lora.target_modules))
    )
    size = float(CHECKPOINT * count)
    if pipeline.uses_critic:
        size += CHECKPOINT * shapes[Role.CRITIC].parameters
    if pipeline.uses_reference:
        size += element(spec) * shapes[Role.REFERENCE].parameters
    return size
