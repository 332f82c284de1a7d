"""The plan of a run: what each GPU and pod must hold, what it offers, and changes that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

from agenticrun_api import AgenticRun, AgenticRunSpec, InvalidRun, Role, parse_run
from agenticrun_api.overrides import with_overrides
from agenticrun_api.quantities import quantity
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.shape import ModelShape
from agenticrun_workers.sizing.gpus import GIB, Gpu
from agenticrun_workers.sizing.memory import (
    CONTEXT,
    CPU_PROCESS,
    MASTER,
    PROCESS,
    RECOMPUTE,
    Item,
    ModelMemory,
    checkpoint_bytes,
    engine_memory,
    in_host_memory,
    peak,
    policy_layout,
    scorer_memory,
    shared_memory,
    total,
    trainer_memory,
)
from agenticrun_workers.sizing.step_time import StepTime, step_time

GPU_MARGIN = 0.08
"""Part of a GPU's need by which estimates of activations may be wrong."""
RAY_SHARE = 0.3
"""Part of /dev/shm that Ray's object store may take."""
SUGGESTIONS = 4
POD_GPUS = 8
"""GPUs of a pod that a suggestion asks for: those of a node."""
MAX_PODS = 16

Shapes = Mapping[Role, ModelShape]


class Kind(StrEnum):
    GPU = "GPU"
    MEMORY = "memory"
    SHM = "/dev/shm"


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    """It fits, but not with the usual margin."""
    TOO_LARGE = "does not fit"


@dataclass(frozen=True, slots=True)
class Place:
    """A memory of one process or pod."""

    role: Role
    kind: Kind
    title: str
    field: str
    """The field of the run that decides what is offered."""
    items: tuple[Item, ...]
    offered: float
    """In bytes."""
    margin: float = 0.0
    """Bytes without which the memory is tight."""
    phase: str = ""
    """The phase of a step with the largest need, which `items` describe."""

    @property
    def needed(self) -> float:
        return total(self.items)

    @property
    def fit(self) -> Fit:
        if self.needed > self.offered:
            return Fit.TOO_LARGE
        return Fit.TIGHT if self.needed + self.margin > self.offered else Fit.FITS

    @property
    def sum(self) -> str:
        """Need and offer in one line, with the largest items first."""
        items = sorted(self.items, key=lambda item: -item.bytes)
        parts = " + ".join(f"{item.name} {item.bytes / GIB:.1f}" for item in items if item.bytes)
        during = f" in the {self.phase}" if self.phase else ""
        return (
            f"{self.title} needs {self.needed / GIB:.1f} GiB{during} ({parts}), and has "
            f"{self.offered / GIB:.1f} GiB"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Fields to set so that a run fits."""

    why: str
    settings: tuple[str, ...]
    """As `--set` takes them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory and time of a run."""

    run: str
    model: ModelShape
    gpu: Gpu | None
    places: tuple[Place, ...]
    step: StepTime | None
    checkpoint: float
    """Bytes of one checkpoint."""
    changes: tuple[Change, ...] = ()
    """The nearest changes with which the run fits, if it does not."""

    @property
    def estimate(self) -> str:
        """Need and offer of each GPU, and the shortest time of a step, in one line."""
        parts = [
            f"{place.title} needs {place.needed / GIB:.1f} of {place.offered / GIB:.1f} GiB"
            for place in self.places
            if place.kind is Kind.GPU
        ]
        if self.step is not None:
            parts.append(f"a step takes {self.step.seconds:.1f} s at least")
        return "; ".join(parts)

    def too_large(self, *kinds: Kind) -> list[Place]:
        """Return the places of these kinds (default: all) that cannot hold what they must."""
        return [
            place
            for place in self.places
            if place.fit is Fit.TOO_LARGE and place.kind in (kinds or Kind)
        ]


def plan_run(run: AgenticRun, shapes: Shapes, gpu: Gpu, *, tokens: int | None = None) -> Plan:
    """Plan a run, and look for changes that fit if it does not.

    Args:
        run: the run.
        shapes: of the policy (`Role.TRAINER`), and of reference and critic if the run has them.
        gpu: the GPU of all roles with GPUs.
        tokens: assumed tokens of a trajectory. Default: `sequenceLength`.
    """
    spec = run.spec
    places = tuple(_places(spec, shapes, gpu))
    asks = any(spec.roles.of(role).gpus for role in spec.roles.workers)
    plan = Plan(
        run.metadata.name,
        shapes[Role.TRAINER],
        gpu if asks else None,
        places,
        step_time(spec, shapes, gpu, tokens),
        checkpoint_bytes(spec, shapes),
    )
    # The search for changes plans dozens of runs, so it is left out if everything fits.
    if not plan.too_large():
        return plan
    changes = tuple(_changes(run, plan, shapes, gpu))
    return Plan(
        run.metadata.name, plan.model, plan.gpu, places, plan.step, plan.checkpoint, changes
    )


def _places(spec: AgenticRunSpec, shapes: Shapes, gpu: Gpu) -> Iterator[Place]:
    """Return all memories of a run's pods, trainers first."""
    trainer = trainer_memory(spec, shapes)
    yield from _ranks(spec, shapes, Role.TRAINER, trainer, gpu)
    for role in (Role.REFERENCE, Role.CRITIC):
        if spec.roles.has(role):
            yield from _ranks(spec, shapes, role, scorer_memory(spec, shapes, role), gpu)
    yield from _engines(spec, shapes, gpu)


def _ranks(
    spec: AgenticRunSpec, shapes: Shapes, role: Role, memory: ModelMemory, gpu: Gpu
) -> Iterator[Place]:
    """Return GPU, memory and shared memory of the pods with the ranks of a role."""
    settings, name = spec.roles.of(role), role.value
    # Without GPUs a pod has one rank.
    here, pods = max(1, settings.gpus), spec.roles.replicas(role)
    phase, held = peak(memory)
    colocated = spec.colocated and role is Role.TRAINER
    # Colocated engines are processes of the trainer's pods.
    processes = here + (spec.actors_per_pod(role).get(Role.INFERENCE, 0) if colocated else 0)
    if settings.gpus:
        context = [Item("CUDA context, NCCL", CONTEXT)]
        # A sleeping engine gives its memory back, but not its CUDA context.
        if colocated:
            context.append(Item("context of the sleeping engine", CONTEXT))
        items = (*held, *context)
        yield Place(
            role,
            Kind.GPU,
            f"{name}: the GPU of {_of(here * pods, 'rank')}",
            f"spec.roles.{name}.gpus",
            items,
            gpu.memory,
            GPU_MARGIN * total(items),
            phase,
        )
    saves = spec.checkpoint is None or not spec.checkpoint.none
    in_host = in_host_memory(memory, on_gpus=bool(settings.gpus), colocated=colocated, saves=saves)
    yield from _pod(spec, shapes, role, [_times(here, item) for item in in_host], processes)


def _of(count: int, what: str) -> str:
    return f"the {what}" if count == 1 else f"each of {count} {what}s"


def _times(count: int, item: Item) -> Item:
    """Return an item of several processes of a pod."""
    # The arithmetic is shown to the user: `1 x (...)` would say nothing.
    if count == 1 or not item.arithmetic:
        return replace(item, bytes=count * item.bytes)
    return Item(item.name, count * item.bytes, f"{count} x ({item.arithmetic})")


def _pod(
    spec: AgenticRunSpec, shapes: Shapes, role: Role, held: list[Item], processes: int
) -> Iterator[Place]:
    """Return memory and shared memory of a pod."""
    settings, name = spec.roles.of(role), role.value
    shared = shared_memory(spec, shapes[Role.TRAINER], role)
    ours = Item("process" if processes == 1 else f"{processes} processes", processes * CPU_PROCESS)
    margin = processes * (PROCESS - CPU_PROCESS) if settings.gpus else 0
    on_shm = [Item(f"/dev/shm: {item.name}", item.bytes, item.arithmetic) for item in shared]
    memory, shm = quantity(settings.memory), quantity(settings.shm_size)
    field_name = f"spec.roles.{name}"
    title = f"{name}: the memory of a pod"
    items = (ours, *held, *on_shm)
    yield Place(role, Kind.MEMORY, title, f"{field_name}.memory", items, memory, margin)
    if shared:
        title = f"{name}: the /dev/shm of a pod"
        # Ray's object store takes its share of /dev/shm when it is used.
        ray = RAY_SHARE * shm
        yield Place(role, Kind.SHM, title, f"{field_name}.shmSize", shared, shm, ray)


def _engines(spec: AgenticRunSpec, shapes: Shapes, gpu: Gpu) -> Iterator[Place]:
    """Return the GPU of an engine, and the pods of engines that have their own."""
    role, shape = spec.engine_role, shapes[Role.TRAINER]
    settings, strategy = spec.roles.of(role), spec.pipeline.actor_infer.strategy
    engine = engine_memory(spec, shape, gpu.memory)
    count = spec.actors(Role.INFERENCE)
    if settings.gpus:
        outside = engine.outside + (CONTEXT if spec.colocated else 0)
        which = "the GPU" if strategy.gpus == 1 else f"each of {strategy.gpus} GPUs"
        yield Place(
            Role.INFERENCE,
            Kind.GPU,
            f"inference: {which} of {_of(count, f'{strategy.name} engine')}",
            f"spec.roles.{role.value}.gpus",
            engine.items,
            engine.budget,
            max(0.0, engine.budget + outside - gpu.memory),
        )
    # Their memory is counted with the trainer's pods.
    if spec.colocated:
        return
    here = spec.actors_per_pod(role)[Role.INFERENCE]
    if settings.gpus:  # read from mapped files, one engine after the other
        weights = engine.items[0]
        held = [_times(strategy.gpus, replace(weights, name="weights at load"))]
    else:
        held = [_times(here, item) for item in engine.items]
    yield from _pod(spec, shapes, role, held, here)


def _changes(run: AgenticRun, plan: Plan, shapes: Shapes, gpu: Gpu) -> Iterator[Change]:
    """Return the nearest changes with which a run fits, one of each kind."""
    document = run.document()

    def changed(settings: tuple[str, ...]) -> AgenticRun | None:
        try:
            return parse_run(with_overrides(document, settings), local=True)
        # A change may break another rule of the run, and is then no suggestion.
        except InvalidRun:
            return None

    def too_large(settings: tuple[str, ...], *kinds: Kind) -> list[Place] | None:
        other = changed(settings)
        if other is None:
            return None
        try:
            places = tuple(_places(other.spec, shapes, gpu))
        except InvalidConfig:  # more ranks than experts
            return None
        return [
            place
            for place in places
            if place.kind in kinds
            and (place.fit is Fit.TOO_LARGE or (place.fit is Fit.TIGHT and _is_of_ranks(place)))
        ]

    engine: tuple[str, ...] = ()
    if any(place.role is Role.INFERENCE for place in plan.too_large(Kind.GPU)):
        for engine in _engine_candidates(run.spec):
            left = too_large(engine, Kind.GPU)
            if left is not None and all(place.role is not Role.INFERENCE for place in left):
                break
        else:
            return
    ranks = any(place.role is not Role.INFERENCE for place in plan.too_large(Kind.GPU))
    found: list[tuple[set[str], int]] = []
    candidates: Iterable[tuple[str, tuple[str, ...]]] = [("", ())]
    if ranks:
        candidates = _rank_candidates(run.spec, shapes[Role.TRAINER])
    for why, settings in candidates:
        both = (*settings, *engine)
        if ranks and too_large(both, Kind.GPU) != []:
            continue
        for kind in (Kind.SHM, Kind.MEMORY):  # in this order: shmSize counts as memory
            for place in too_large(both, kind) or ():
                both = (*both, f"{place.field.removeprefix('spec.')}={_enough(place)}")
        other = changed(both)
        if other is None or too_large(both, *Kind):
            continue
        parts, gpus = set(why.split(" and ")), other.spec.roles.total_gpus(Role.TRAINER)
        if any(fewer <= parts and count <= gpus for fewer, count in found):
            continue
        found.append((parts, gpus))
        yield Change(why or ("engines on more GPUs" if engine else "larger pods"), both)
        if len(found) == SUGGESTIONS:
            return


def _enough(place: Place) -> str:
    """Return a quantity with which a pod's memory holds what it must, with its margin."""
    if place.kind is Kind.SHM:
        return f"{ceil(2 * place.needed / GIB) + 1}Gi"
    return f"{ceil((place.needed + place.margin) / GIB) + 1}Gi"


def _is_of_ranks(place: Place) -> bool:
    """Return True for the GPU of a rank, which no suggestion leaves without its margin."""
    return place.kind is Kind.GPU and place.role is not Role.INFERENCE


def _engine_candidates(spec: AgenticRunSpec) -> Iterator[tuple[str, ...]]:
    """Return settings that give an engine more memory, the nearest first."""
    strategy, role = spec.pipeline.actor_infer.strategy, spec.engine_role
    option = {"sglang": "tp_size", "vllm": "tensor_parallel_size"}.get(strategy.name)
    gpus = spec.roles.of(role).gpus
    if option is None:
        return
    for size in (2, 4, 8):
        if size > strategy.gpus:
            more = () if gpus % size == 0 else (f"roles.{role.value}.gpus={size}",)
            yield (f"pipeline.actorInfer.strategy.config.{option}={size}", *more)


def _rank_candidates(
    spec: AgenticRunSpec, policy: ModelShape
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return settings with which ranks need less, and what they do; the nearest first."""
    train = spec.pipeline.actor_train
    layout = policy_layout(spec)
    config = "pipeline.actorTrain.strategy.config"
    smaller: list[tuple[str, ...]] = []
    gpus = spec.roles.of(Role.TRAINER).gpus
    size = train.training.micro_batch_tokens(on_gpus=gpus > 0)
    while (size := size // 2) >= spec.pipeline.sequence_length:
        smaller.append((f"pipeline.actorTrain.training.maxTokensPerMicroBatch={size}",))
    # Each may be combined with all that follow it.
    first: list[tuple[str, tuple[str, ...]]] = [("", ())]
    if not layout.recompute and train.strategy.name != "megatron":
        first.append(("recomputation", (f"{config}.{RECOMPUTE}=true",)))
    if train.strategy.name == "fsdp2" and policy.experts > 1 and layout.expert_parallel == 1 < gpus:
        divide = f"{config}.expert_parallel_size={gpus}"
        first += [
            (" and ".join(filter(None, (why, "divided experts"))), (*settings, divide))
            for why, settings in first
        ]
    if layout.compute == MASTER:
        first += [
            (" and ".join(filter(None, ("bfloat16", why))), ("model.dtype=bfloat16", *settings))
            for why, settings in first
        ]
    first += [
        (" and ".join(filter(None, (why, "smaller micro-batches"))), (*settings, *tokens))
        for why, settings in first
        for tokens in smaller
    ]
    for why, prefix in first:
        join = f"{why} and " if why else ""
        if why:
            yield why, prefix
        for settings in _more_gpus(spec):
            yield f"{join}more GPUs", (*prefix, *settings)
        if train.strategy.name == "fsdp2" and not layout.offload:
            yield f"{join}offload to host memory", (*prefix, f"{config}.offload_policy=true")
        if train.strategy.name == "deepspeed" and not layout.offload_optimizer:
            name = f"{config}.zero_optimization.offload_optimizer.device"
            yield f"{join}offload to host memory", (*prefix, f"{name}=cpu")
        if train.lora is None and train.strategy.name != "megatron":
            yield f"{join}LoRA", (*prefix, "pipeline.actorTrain.lora.rank=16")


def _more_gpus(spec: AgenticRunSpec) -> Iterator[tuple[str, ...]]:
    """Return settings of more trainer GPUs: first larger pods, then more of them."""
    gpus, pods = spec.roles.of(Role.TRAINER).gpus, spec.roles.replicas(Role.TRAINER)
    while gpus and gpus * 2 <= POD_GPUS:
        gpus *= 2
        yield (f"roles.trainer.gpus={gpus}",)
    larger = (f"roles.trainer.gpus={gpus}",) if gpus != spec.roles.of(Role.TRAINER).gpus else ()
    while gpus and pods * 2 <= MAX_PODS:
        pods *= 2
        yield (*larger, f"roles.trainer.replicas={pods}")
