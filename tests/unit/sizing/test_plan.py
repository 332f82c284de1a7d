"""Plans of runs: what fits, what is refused, and changes that fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from agenticrun_api import AgenticRun, Role, parse_run
from agenticrun_api.load import read_run
from agenticrun_api.overrides import with_overrides
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.shape import ModelShape
from agenticrun_workers.sizing.gpus import GIB, GPUS, Gpu, of_machine, recognize
from agenticrun_workers.sizing.memory import (
    layout_of,
    model_memory,
    policy_layout,
    total,
    trainer_memory,
)
from agenticrun_workers.sizing.models import run_shapes
from agenticrun_workers.sizing.plan import Fit, Kind, Place, Plan, plan_run
from agenticrun_workers.sizing.step_time import forward_flops
from agenticrun_workers.trainer.sharded_module import FsdpOptions

EXAMPLES = Path(__file__).parents[3] / "examples"
PAIR = EXAMPLES / "gpu/two-plus-two.yaml"
H100 = GPUS["h100"]
LARGE = ("roles.trainer.memory=2000Gi", "roles.trainer.shmSize=500Gi")
ENGINES = ("roles.inference.memory=900Gi", "roles.inference.shmSize=500Gi")


@cache
def shapes_of(path: str, reference: str | None = None) -> dict[Role, ModelShape]:
    del reference
    policy = run_shapes(run_with(f"model.path={path}").spec)[Role.TRAINER]
    return dict.fromkeys((Role.TRAINER, Role.REFERENCE, Role.CRITIC), policy)


def run_with(*changes: str, file: Path = PAIR) -> AgenticRun:
    return parse_run(with_overrides(read_run(file), changes), local=True)


def plan(model: str, *changes: str, gpu: Gpu = H100) -> Plan:
    run = run_with(f"model.path={model}", *changes)
    return plan_run(run, shapes_of(model), gpu)


def place(planned: Plan, role: Role, kind: Kind) -> Place:
    return next(item for item in planned.places if (item.role, item.kind) == (role, kind))


def trainer_gpu(planned: Plan) -> Place:
    return place(planned, Role.TRAINER, Kind.GPU)


def sizes(found: Place) -> dict[str, float]:
    return {item.name: item.bytes for item in found.items}


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ((), 16_384),
        (("roles.trainer.gpus=0",), 2_048),
        (("roles.trainer.gpus=0", "pipeline.actorTrain.training.maxTokensPerMicroBatch=512"), 512),
    ],
)
def test_micro_batches_are_smaller_on_cpus(changes: tuple[str, ...], tokens: int) -> None:
    short = (
        "pipeline.sequenceLength=256",
        "pipeline.rolloutBatchSize=128",
        "pipeline.actorTrain.training={learningRate: 0.001}",
    )
    assert policy_layout(run_with(*short, *changes).spec).tokens == tokens


def test_a_new_option_of_fsdp2_is_planned_for() -> None:
    """Each option of `strategy.config` that changes memory is read by `layout_of`."""
    assert {*get_type_hints(FsdpOptions)} == {
        "reshard_after_forward",
        "gradient_checkpointing",
        "recompute_granularity",
        "fsdp_size",
        "expert_parallel_size",
        "offload_policy",
        "ulysses_sequence_parallel_size",
        "logits_chunk_elements",
    }
    spec = run_with().spec
    train = spec.pipeline.actor_train.strategy
    layout = layout_of(train.name, {}, 8, 2, 1024)
    options = FsdpOptions()
    assert (layout.chunk, layout.reshard, layout.copies, layout.recompute, layout.offload) == (
        options.logits_chunk_elements,
        options.reshard_after_forward,
        options.copies(8),
        options.gradient_checkpointing,
        options.offload_policy,
    )
    assert layout.expert_parallel == options.expert_parallel_size


def test_selective_recomputation_keeps_products_and_does_not_repeat_them() -> None:
    shape = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER]
    kept = {}
    configs: dict[str, dict[str, Any]] = {
        "none": {},
        "full": {"gradient_checkpointing": True},
        "selective": {"gradient_checkpointing": True, "recompute_granularity": "selective"},
    }
    for name, config in configs.items():
        layout = layout_of("fsdp2", config, 8, 2, 1024)
        memory = model_memory(shape, layout, "")
        kept[name] = next(
            item.bytes
            for item in memory.phases["backward pass of a layer"]
            if item.name == "activations"
        )
    assert kept["full"] < kept["selective"] < 0.7 * kept["none"]


def test_weights_gradients_and_optimizer_take_sixteen_bytes_of_each_local_element() -> None:
    ranks = ("roles.trainer.gpus=8",)
    found = sizes(trainer_gpu(plan("Qwen/Qwen3-8B", *ranks)))
    local = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER].local(8)
    state = [found[name] for name in ("weights", "gradients", "AdamW")]
    assert state == [4 * local, 4 * local, 8 * local]


def test_offload_moves_the_state_to_the_memory_of_the_pod() -> None:
    offload = "pipeline.actorTrain.strategy.config.offload_policy=true"
    planned = plan("Qwen/Qwen3-8B", offload)
    shape = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER]
    assert not {"weights", "gradients", "AdamW"} & sizes(trainer_gpu(planned)).keys()
    pod = sizes(place(planned, Role.TRAINER, Kind.MEMORY))
    assert sum(pod[name] for name in ("weights", "gradients", "AdamW")) == 2 * 16 * shape.local(2)


def test_lora_freezes_the_model_in_the_dtype_of_the_computation() -> None:
    found = sizes(trainer_gpu(plan("Qwen/Qwen3-8B", "pipeline.actorTrain.lora.rank=16")))
    shape = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER]
    adapters = sum(weight.local(2) for weight in shape.adapters(16))
    assert found["frozen weights"] == 2 * shape.local(2)
    assert (found["weights"], found["AdamW"]) == (4 * adapters, 8 * adapters)


def test_hsdp_shards_over_fewer_ranks() -> None:
    spec = run_with("roles.trainer.gpus=8").spec
    layout = replace(policy_layout(spec), copies=2)
    shape = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER]
    assert total(model_memory(shape, layout, "").device) == 16 * shape.local(4)


def test_recomputation_keeps_only_the_inputs_of_layers() -> None:
    without = "pipeline.actorTrain.strategy.config.gradient_checkpointing=false"
    kept = sizes(trainer_gpu(plan("Qwen/Qwen3-8B")))["activations"]
    everything = sizes(trainer_gpu(plan("Qwen/Qwen3-8B", without)))["activations"]
    assert kept == 36 * 32_768 * 2 * 4096
    assert everything > 20 * kept


def test_reference_and_critic_live_on_the_trainers_ranks_without_pods_of_their_own() -> None:
    ppo = (
        "pipeline.algorithm={name: gae, pgVariant: decoupled, lossKl: {}}",
        "pipeline.critic={}",
        "roles.trainer.gpus=8",
    )
    found = sizes(trainer_gpu(plan("Qwen/Qwen3-8B", *ppo)))
    local = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER].local(8)
    assert (found["reference: weights"], found["critic: weights"]) == (2 * local, 4 * local)
    own = ("roles.reference={gpus: 8}", "roles.critic={gpus: 8}")
    planned = plan("Qwen/Qwen3-8B", *ppo, *own)
    assert not {"reference: weights", "critic: weights"} & sizes(trainer_gpu(planned)).keys()
    assert sizes(place(planned, Role.REFERENCE, Kind.GPU))["weights"] == 2 * local


def test_a_model_that_cannot_fit_is_refused_with_its_sum() -> None:
    planned = plan("Qwen/Qwen3-32B", *LARGE, *ENGINES)
    assert [(item.role, item.kind) for item in planned.too_large()] == [(Role.TRAINER, Kind.GPU)]
    assert trainer_gpu(planned).sum.startswith(
        "trainer: the GPU of each of 2 ranks needs 290.4 GiB in the backward pass of a layer "
        "(AdamW 122.0 + weights 61.0 + gradients 61.0 + "
    )
    assert trainer_gpu(planned).sum.endswith("and has 79.1 GiB")


MIXTURE = "Qwen/Qwen3-30B-A3B"
DIVIDE = "pipeline.actorTrain.strategy.config.expert_parallel_size"


def test_a_rank_gathers_only_its_part_of_divided_experts() -> None:
    ranks = ("roles.trainer.gpus=8", "roles.trainer.replicas=2")
    spread, divided = (
        sizes(trainer_gpu(plan(MIXTURE, *ranks, f"{DIVIDE}={size}"))) for size in (1, 16)
    )
    shape = shapes_of(MIXTURE)[Role.TRAINER]
    layer = shape.largest_layer
    experts = 128 * 3 * 768 * 2048
    assert spread["weights"] == divided["weights"]
    assert spread["gathered units"] == 2 * (shape.head_units + 2 * layer)
    assert divided["gathered units"] == 2 * (
        shape.head_units + 2 * (layer - experts + experts // 16)
    )


def test_dividing_the_experts_is_suggested_for_a_mixture() -> None:
    planned = plan(MIXTURE, "roles.trainer.gpus=8", *LARGE, *ENGINES)
    assert any("divided experts" in change.why for change in planned.changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("roles.trainer.gpus=8", f"{DIVIDE}=3"),
            "config: expert_parallel_size 3 does not divide the 8 ranks that share a copy of the "
            "model: set expert_parallel_size to 1 or 2 or 4 or 8",
        ),
        (
            ("roles.trainer.gpus=8", "roles.trainer.replicas=24"),
            "config: the 128 experts of a layer cannot be spread over 192 ranks, because one would "
            "hold none: set fsdp_size to 64",
        ),
        (
            ("roles.trainer.gpus=8", "pipeline.actorTrain.strategy.config.fsdp_size=3"),
            "config.fsdp_size: 3 does not divide the 8 trainer ranks",
        ),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(
    changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        plan(MIXTURE, *changes)
    assert message in str(refused.value)


def test_experts_of_a_dense_model_are_not_divided() -> None:
    with pytest.raises(InvalidConfig, match="size is 2, but the model has no experts"):
        plan("Qwen/Qwen3-8B", f"{DIVIDE}=2")


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("Qwen/Qwen3-32B", ()),
        ("Qwen/Qwen3-8B", ("roles.trainer.gpus=1",)),
        (
            "Qwen/Qwen3-8B",
            (
                "roles.trainer.gpus=8",
                "pipeline.actorTrain.strategy.config.gradient_checkpointing=false",
            ),
        ),
        ("Qwen/Qwen3-8B", ("model.dtype=float32",)),
        ("Qwen/Qwen3-30B-A3B", ("roles.trainer.gpus=8",)),
        ("Qwen/Qwen2.5-0.5B-Instruct", ("roles.trainer.shmSize=500Mi",)),
        ("Qwen/Qwen2.5-0.5B-Instruct", ("roles.inference.memory=2Gi",)),
    ],
)
def test_every_suggested_change_fits(model: str, changes: tuple[str, ...]) -> None:
    planned = plan(model, *changes)
    assert planned.too_large()
    assert planned.changes
    for change in planned.changes:
        assert plan(model, *changes, *change.settings).too_large() == [], change


def test_the_nearest_changes_are_of_different_kinds() -> None:
    planned = plan("Qwen/Qwen3-32B", *LARGE, *ENGINES)
    kinds = [change.why for change in planned.changes]
    assert kinds == ["more GPUs", "offload to host memory", "LoRA", *kinds[3:]]
    without = "pipeline.actorTrain.strategy.config.gradient_checkpointing=false"
    eight = plan("Qwen/Qwen3-8B", "roles.trainer.gpus=8", without, *LARGE, *ENGINES)
    assert eight.changes[0].why in {"recomputation", "smaller micro-batches"}
    assert all(len(change.settings) <= 2 for change in eight.changes)


def test_an_engine_whose_weights_do_not_fit_gets_more_gpus() -> None:
    small = (
        "roles.trainer={gpus: 8, replicas: 8}",
        "pipeline.actorTrain.training.maxTokensPerMicroBatch=4096",
    )
    planned = plan("Qwen/Qwen3-32B", *small, *LARGE, *ENGINES, gpu=GPUS["a100-40gb"])
    assert [item.role for item in planned.too_large()] == [Role.INFERENCE]
    option = "pipeline.actorInfer.strategy.config.tp_size=2"
    assert [change.settings for change in planned.changes] == [(option,)]


def test_the_cache_of_an_engine_takes_what_the_weights_leave() -> None:
    found = place(plan("Qwen/Qwen3-8B"), Role.INFERENCE, Kind.GPU)
    weights = 2 * shapes_of("Qwen/Qwen3-8B")[Role.TRAINER].parameters
    assert sizes(found) == {"weights": weights, "KV cache": 0.85 * H100.memory - weights}
    per_token = 2 * 36 * 8 * 128 * 2
    assert f"x {per_token:,} bytes" in found.items[-1].arithmetic


def test_a_sequence_that_does_not_fit_into_the_cache_is_refused() -> None:
    long = ("pipeline.sequenceLength=1000000", "roles.trainer={gpus: 8, replicas: 8}")
    planned = plan("Qwen/Qwen3-8B", *long, *LARGE, *ENGINES)
    assert place(planned, Role.INFERENCE, Kind.GPU).fit is Fit.TOO_LARGE


def test_pods_that_are_too_small_are_refused_by_their_fields() -> None:
    planned = plan("Qwen/Qwen3-8B", "roles.trainer.gpus=8")
    assert [item.field for item in planned.too_large()] == [
        "spec.roles.trainer.memory",
        "spec.roles.trainer.shmSize",
        "spec.roles.inference.shmSize",
    ]


def test_ranks_copy_what_a_checkpoint_holds() -> None:
    shapes = shapes_of("Qwen/Qwen3-8B")
    parameters = shapes[Role.TRAINER].parameters

    def copies(*changes: str) -> dict[str, float]:
        """Bytes of all eight ranks."""
        spec = run_with("roles.trainer.gpus=8", *changes).spec
        return {item.name: 8 * item.bytes for item in trainer_memory(spec, shapes).snapshot}

    whole = pytest.approx(12 * parameters, rel=0.01)
    assert copies() == {"copy for checkpoints": whole}
    assert copies("pipeline.actorTrain.strategy.name=deepspeed") == {"copy for checkpoints": whole}
    assert copies("pipeline.actorTrain.lora.rank=16")["copy for checkpoints"] < 0.1 * parameters
    kl = "pipeline.algorithm.lossKl={}"
    assert [*copies(kl)] == ["copy for checkpoints", "reference: copy for checkpoints"]
    assert [*copies(kl, "pipeline.reference={path: x}")] == ["copy for checkpoints"]


def test_the_copy_for_checkpoints_counts_as_memory_where_there_are_any() -> None:
    def items(*changes: str) -> dict[str, float]:
        planned = plan("Qwen/Qwen3-8B", "roles.trainer.gpus=8", *LARGE, *changes)
        return sizes(place(planned, Role.TRAINER, Kind.MEMORY))

    assert "copy for checkpoints" in items()
    assert "copy for checkpoints" not in items("checkpoint={none: true}")


def all_examples() -> list[Path]:
    files = sorted(EXAMPLES.rglob("*.yaml"))
    return [file for file in files if "kind: AgenticRun\n" in file.read_text()]


@pytest.mark.parametrize("file", all_examples(), ids=lambda file: str(file.relative_to(EXAMPLES)))
def test_every_example_fits(file: Path) -> None:
    documents = [item for item in yaml.safe_load_all(file.read_text()) if item]
    document: dict[str, Any] = next(item for item in documents if item["kind"] == "AgenticRun")
    run = parse_run(document, local=True)
    planned = plan_run(run, run_shapes(run.spec), H100)
    assert planned.too_large() == []


def test_one_gpu_needs_only_the_24_gb_that_its_comment_promises() -> None:
    run = parse_run(yaml.safe_load((EXAMPLES / "gpu/one-gpu.yaml").read_text()))
    for name in ("l4", "a10g", "rtx4090"):
        planned = plan_run(run, run_shapes(run.spec), GPUS[name])
        assert {item.fit for item in planned.places} == {Fit.FITS}, name


def test_a_step_is_bound_by_the_roofline() -> None:
    planned = plan("Qwen/Qwen3-8B", "roles.trainer.gpus=8")
    assert planned.step is not None
    times = {phase.name: phase for phase in planned.step.phases}
    shape = shapes_of("Qwen/Qwen3-8B")[Role.TRAINER]
    flops = 4 * 256 * 4096 * forward_flops(shape, 4096)
    assert times["training"].seconds == pytest.approx(flops / 8 / 989e12)
    assert (times["training"].limit, times["rollout"].limit) == ("compute", "memory")
    half = plan_run(
        run_with("model.path=Qwen/Qwen3-8B", "roles.trainer.gpus=8"),
        shapes_of("Qwen/Qwen3-8B"),
        H100,
        tokens=2048,
    ).step
    assert half is not None
    assert half.seconds < planned.step.seconds / 1.5


def test_on_slow_links_gathers_take_longer_than_the_computation() -> None:
    slow = replace(H100, link=1e9, network=1e9)
    planned = plan("Qwen/Qwen3-8B", "roles.trainer.gpus=8", gpu=slow)
    assert planned.step is not None
    assert {p.name: p.limit for p in planned.step.phases}["training"] == "links"


def test_a_run_on_cpus_has_no_times_and_its_tensors_are_in_the_pods_memory() -> None:
    run = parse_run(yaml.safe_load((EXAMPLES / "frozen-lake.yaml").read_text()), local=True)
    planned = plan_run(run, run_shapes(run.spec), H100)
    assert (planned.step, planned.gpu) == (None, None)
    assert {item.kind for item in planned.places} == {Kind.MEMORY, Kind.SHM}
    assert "logits" in sizes(place(planned, Role.TRAINER, Kind.MEMORY))


@pytest.mark.parametrize(
    ("name", "mib", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 81_559, "h100"),
        ("NVIDIA A100-SXM4-40GB", 40_960, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "a100"),
        ("NVIDIA-L40S", 46_068, "l40s"),
        ("NVIDIA L4", 23_034, "l4"),
        ("NVIDIA GeForce RTX 4090", 24_564, "rtx4090"),
        ("Another Card", 8_192, "Another Card"),
    ],
)
def test_gpus_are_known_by_the_names_that_drivers_give(name: str, mib: int, found: str) -> None:
    gpu = recognize(name, mib * 2**20)
    assert (gpu.name, gpu.memory, bool(gpu.flops)) == (found, mib * 2**20, found in GPUS)


def test_the_smallest_gpu_of_a_machine_counts() -> None:
    cards = ["NVIDIA H100 80GB HBM3, 81559 MiB, 580.1", "NVIDIA L4, 23034 MiB, 580.1", "broken"]
    found = of_machine(cards)
    assert found is not None
    assert (found.name, found.memory) == ("l4", 23_034 * 2**20)
    assert of_machine([]) is None
    assert GPUS["h100"].memory < 80 * GIB
