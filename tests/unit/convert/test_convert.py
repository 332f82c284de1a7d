"""ROLL's values are converted with the meaning that they have in ROLL."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from agenticrun_api import parse_run
from agenticrun_api.names import ExitCode
from agenticrun_workers.agents import AgentLimits, make_agent
from agenticrun_workers.cli import app
from agenticrun_workers.convert import Conversion, ConvertError, Fate, as_yaml, compose, convert
from agenticrun_workers.convert.converter import Composition
from agenticrun_workers.convert.models import KEPT, ZERO_KEPT
from agenticrun_workers.models.tokenizer import build_task_tokenizer
from agenticrun_workers.trainer.deepspeed.options import OFFLOADED, ZERO_PASSED, DeepSpeedOptions
from agenticrun_workers.trainer.megatron.options import (
    DATA_PARALLEL,
    SIZES,
    TRANSFORMER,
    MegatronOptions,
)
from agenticrun_workers.trainer.sharded_module import FsdpOptions

EXAMPLES = sorted((Path(__file__).parents[2] / "data/roll/agentic").glob("*.yaml"))

BASE: dict[str, Any] = {
    "pretrain": "Qwen/Qwen2.5-0.5B-Instruct",
    "max_steps": 10,
    "rollout_batch_size": 32,
    "sequence_length": 1024,
    "adv_estimator": "reinforce",
    "custom_envs": {
        "Lake": {
            "env_type": "frozen_lake",
            "env_config": {"is_slippery": False, "action_pattern": "(.*)"},
        }
    },
    "train_env_manager": {
        "num_env_groups": 8,
        "group_size": 4,
        "tags": ["Lake"],
        "num_groups_partition": [8],
    },
    "actor_infer": {
        "generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0},
        "strategy_args": {"strategy_name": "hf_infer"},
    },
}
"""A small configuration of which every field is supported."""


def converted(**changes: Any) -> Conversion:
    return convert(Composition({**BASE, **changes}, frozenset()), "base")


def pipeline(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = converted(**changes).document["spec"]["pipeline"]
    return found


def cannot(conversion: Conversion) -> list[str]:
    return [line.field for line in conversion.lines if line.fate is Fate.DECISION]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_become_valid_runs_that_yaml_keeps(example: Path) -> None:
    conversion = convert(compose(example), example.stem)
    assert "(result)" not in cannot(conversion)
    run = parse_run(yaml.safe_load(as_yaml(conversion.document)))
    assert run == parse_run(conversion.document)


def test_texts_that_kubectl_would_take_for_something_else_are_quoted() -> None:
    assert as_yaml({"words": ["y", "N", "1e3", "0o7", "yes", "a"]}) == (
        "words: ['y', 'N', '1e3', '0o7', 'yes', a]\n"
    )


def test_the_base_asks_for_nothing_that_we_cannot_do() -> None:
    assert cannot(converted()) == []
    parse_run(converted().document)


def test_a_result_that_is_refused_is_told() -> None:
    conversion = converted(rollout_batch_size=33)
    assert "(result)" in cannot(conversion)
    assert any("spec.pipeline.rolloutBatchSize" in line.note for line in conversion.lines)


@pytest.mark.parametrize(
    ("normalization", "changes", "name", "expected"),
    [
        ({"grouping": "traj_group_id", "method": "mean_std"}, {}, "grpo", {"normStdType": "group"}),
        (
            {"grouping": "traj_group_id", "norm_mean_type": "group", "norm_std_type": "batch"},
            {},
            "grpo",
            {"normStdType": "batch"},
        ),
        ({"grouping": "traj_group_id", "method": "mean"}, {}, "grpo", {"normStdType": "none"}),
        (
            {"grouping": "traj_group_id", "method": "mean_std"},
            {"gamma": 0.9},
            "reinforce",
            {"gamma": 0.9},
        ),
        (
            {"grouping": "traj_group_id", "method": "mean_std"},
            {"whiten_rewards": True},
            "reinforce",
            {"whitenRewards": True},
        ),
        ({"grouping": "batch", "method": "mean_std"}, {}, "reinforce", {}),
        ({}, {}, "reinforce", {}),
    ],
)
def test_roll_s_grpo_is_ours_only_where_the_formulas_agree(
    normalization: dict[str, Any], changes: dict[str, Any], name: str, expected: dict[str, Any]
) -> None:
    found = pipeline(adv_estimator="grpo", reward_normalization=normalization, **changes)
    assert found["algorithm"]["name"] == name
    assert found["algorithm"] == {**found["algorithm"], **expected}
    if name == "grpo" or not normalization:
        assert "rewardNormalization" not in found
    else:
        assert (
            found["rewardNormalization"]["grouping"]
            == {"traj_group_id": "group", "batch": "batch"}[normalization["grouping"]]
        )


@pytest.mark.parametrize(
    ("estimator", "changes", "name"),
    [
        ("reinforce", {}, "step_reinforce"),
        ("grpo", {}, "step_reinforce"),
        ("agentic_reinforce", {}, "step_reinforce"),
        ("grpo", {"whiten_rewards": True}, "reinforce"),
        ("gae", {}, "gae"),
        ("step_reinforce", {}, "step_reinforce"),
    ],
)
def test_turns_of_a_step_manager_are_scored_one_by_one_and_that_is_told(
    estimator: str, changes: dict[str, Any], name: str
) -> None:
    manager = "roll.pipeline.agentic.env_manager.step_env_manager.StepEnvManager"
    lake = {**BASE["custom_envs"]["Lake"], "env_manager_cls": manager}
    normalization = {"grouping": "traj_group_id", "method": "mean_std"}
    conversion = converted(
        adv_estimator=estimator,
        custom_envs={"Lake": lake},
        reward_normalization=normalization,
        **changes,
    )
    found = conversion.document["spec"]["pipeline"]
    told = [
        line.note
        for line in conversion.lines
        if line.field == "adv_estimator" and line.fate is Fate.CHANGED and "C24" in line.note
    ]
    assert found["algorithm"]["name"] == name
    assert bool(told) == (estimator != "step_reinforce")
    if name == "step_reinforce":
        gamma = 0.95 if estimator == "step_reinforce" else 0.0
        assert found["algorithm"]["stepRewardGamma"] == gamma
        assert found["rewardNormalization"]["grouping"] == "group"


def test_token_kl_keeps_grpo_a_reinforce() -> None:
    found = pipeline(
        adv_estimator="grpo",
        reward_normalization={"grouping": "traj_group_id", "method": "mean_std"},
        add_token_level_kl=True,
    )
    assert found["algorithm"]["name"] == "reinforce"
    assert found["algorithm"]["rewardKl"] == {"kind": "k1", "coef": 0.2}


@pytest.mark.parametrize(
    ("kind", "ours"), [("kl", "k1"), ("mse", "k2"), ("k3", "k3"), ("abs", "abs"), ("full", "k1")]
)
def test_kl_kinds_have_other_names(kind: str, ours: str) -> None:
    conversion = converted(add_token_level_kl=True, kl_penalty=kind)
    assert conversion.document["spec"]["pipeline"]["algorithm"]["rewardKl"]["kind"] == ours
    assert cannot(conversion) == (["kl_penalty"] if kind == "full" else [])


def test_a_kl_coefficient_without_a_penalty_does_nothing() -> None:
    found = pipeline(init_kl_coef=0.5)["algorithm"]
    assert "rewardKl" not in found
    assert "lossKl" not in found


def test_dual_clip_is_one_plus_twice_the_clip() -> None:
    found = pipeline(pg_clip=0.3, dual_clip_loss=True)["algorithm"]
    assert (found["pgClipLow"], found["pgClipHigh"], found["dualClip"]) == (0.3, 0.3, 1.6)


@pytest.mark.parametrize(
    ("worker", "variant"),
    [
        ({"pg_variant": "tis"}, "ppo"),  # ignored without the worker class that reads it
        (
            {
                "pg_variant": "tis",
                "worker_cls": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
            },
            "tis",
        ),
        ({"worker_cls": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"}, "ppo"),
    ],
)
def test_the_loss_variant_counts_with_its_worker_class_only(
    worker: dict[str, Any], variant: str
) -> None:
    assert pipeline(actor_train=worker)["algorithm"]["pgVariant"] == variant


def test_sampling_defaults_are_roll_s_and_cut_the_distribution() -> None:
    conversion = converted(actor_infer={})
    sampling = conversion.document["spec"]["pipeline"]["actorInfer"]
    assert sampling["generating"] == {
        "temperature": 0.95,
        "topP": 0.7,
        "topK": 50,
        "allowTruncatedSampling": True,
    }
    assert sampling["validationGenerating"] == {"temperature": 0.95, "topP": 0.7, "topK": 50}


def test_a_correction_needs_the_whole_distribution() -> None:
    found = pipeline(
        actor_infer={}, train_infer_correction={"is_weight": {"enabled": True, "upper_bound": None}}
    )
    assert found["actorInfer"]["generating"] == {"temperature": 0.95}
    assert found["trainInferCorrection"] == {"isWeight": {"level": "token", "upperBound": 1e6}}


@pytest.mark.parametrize(
    ("ahead", "frequency", "expected"),
    [
        (0, 1, None),
        (2, 1, {"max": 2, "partialRollout": False, "offPolicy": "Ignore"}),
        (
            0.5,
            1,
            {"max": 0.5, "partialRollout": False, "offPolicy": "Ignore"},
        ),  # crashed in ROLL (C8)
        (0, 4, {"max": 3, "partialRollout": False, "offPolicy": "Ignore"}),
    ],
)
def test_rollout_that_runs_ahead_is_said_openly(
    ahead: float, frequency: int, expected: dict[str, Any] | None
) -> None:
    conversion = converted(
        async_generation_ratio=ahead, actor_train={"model_update_frequency": frequency}
    )
    assert conversion.document["spec"]["pipeline"].get("staleness") == expected
    parse_run(conversion.document)


@pytest.mark.parametrize(
    ("mapping", "pods"),
    [
        ("list(range(0,16))", {"gpus": 8, "replicas": 2}),
        ("[0, 1] + list(range(2, 6))", {"gpus": 6, "replicas": 1}),
        ([0, 1, 2], {"gpus": 3, "replicas": 1}),
        ("list(range(0, 24, 2))", {"gpus": 6, "replicas": 2}),
    ],
)
def test_devices_become_pods_of_equal_size(mapping: Any, pods: dict[str, int]) -> None:
    trainer = converted(actor_train={"device_mapping": mapping}).document["spec"]["roles"][
        "trainer"
    ]
    assert {key: trainer[key] for key in pods} == pods


@pytest.mark.parametrize(("devices", "mode"), [(8, None), (16, "ReadWriteMany")])
def test_the_claim_reaches_as_many_nodes_as_the_trainers_need(
    devices: int, mode: str | None
) -> None:
    mapping = {"device_mapping": f"list(range(0,{devices}))"}
    claim = converted(actor_train=mapping).document["spec"]["checkpoint"]["volumeClaim"]
    assert claim.get("accessMode") == mode


def test_device_mappings_are_read_not_run() -> None:
    with pytest.raises(ConvertError, match=r"actor_train\.device_mapping"):
        converted(actor_train={"device_mapping": "__import__('os').getpid()"})


def test_a_reference_with_gpus_of_its_own_gets_pods() -> None:
    roles = {"actor_train": {"device_mapping": [0, 1]}, "reference": {"device_mapping": [2]}}
    pods = converted(use_kl_loss=True, kl_loss_coef=0.1, **roles).document["spec"]["roles"]
    assert (pods["reference"]["gpus"], pods["reference"]["replicas"]) == (1, 1)
    assert "reference" not in converted(**roles).document["spec"]["roles"]  # nothing reads it


@pytest.mark.parametrize(
    ("per_device", "accumulation", "devices", "expected"),
    [(2, 2, 2, 8), (1, 3, 1, 4), (8, 4, 1, None), (16, 16, 8, None)],
)
def test_optimizer_batches_are_whole_groups(
    per_device: int, accumulation: int, devices: int, expected: int | None
) -> None:
    training = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
    }
    found = pipeline(
        actor_train={"training_args": training, "device_mapping": list(range(devices))}
    )["actorTrain"]["training"]
    assert found.get("miniBatchSize") == expected


def test_model_parallel_ranks_are_no_data_parallel_ranks() -> None:
    conversion = converted(
        actor_train={
            "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            "device_mapping": "list(range(0, 8))",
            "strategy_args": {
                "strategy_name": "megatron_train",
                "strategy_config": {"tensor_model_parallel_size": 4},
            },
        }
    )
    assert conversion.document["spec"]["pipeline"]["actorTrain"]["training"]["miniBatchSize"] == 8
    assert cannot(conversion) == []
    strategy = conversion.document["spec"]["pipeline"]["actorTrain"]["strategy"]
    assert strategy == {"name": "megatron", "config": {"tensor_model_parallel_size": 4}}


ZERO = {
    "stage": 3,
    "reduce_bucket_size": "auto",
    "overlap_comm": True,
    "stage3_gather_16bit_weights_on_model_save": True,
}


@pytest.mark.parametrize(
    ("trainer", "options", "model_args", "expected"),
    [
        (
            "fsdp2_train",
            {"offload_policy": True, "param_dtype": "bf16"},
            {},
            {"offload_policy": True, "gradient_checkpointing": True},
        ),
        (
            "fsdp2_train",
            None,
            {"ulysses_size": 2, "disable_gradient_checkpointing": True},
            {"ulysses_sequence_parallel_size": 2},
        ),
        (
            "megatron_train",
            {
                "recompute_granularity": "full",
                "sequence_parallel": True,
                "expert_model_parallel_size": 1,
            },
            {},
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        (
            "deepspeed_train",
            {"zero_optimization": ZERO, "train_batch_size": "auto", "bf16": {"enabled": "auto"}},
            {},
            {
                "zero_optimization": {"stage": 3, "overlap_comm": True},
                "gradient_checkpointing": True,
            },
        ),
    ],
)
def test_trainers_keep_the_options_that_ours_have(
    trainer: str, options: Any, model_args: dict[str, Any], expected: dict[str, Any]
) -> None:
    arguments = {"strategy_name": trainer, "strategy_config": options}
    conversion = converted(actor_train={"strategy_args": arguments, "model_args": model_args})
    assert cannot(conversion) == []
    strategy = parse_run(conversion.document).spec.pipeline.actor_train.strategy
    assert strategy.name == trainer.removesuffix("_train")
    assert strategy.config == expected
    match strategy.name:
        case "fsdp2":
            FsdpOptions.parse(strategy.config)
        case "megatron":
            MegatronOptions.parse(strategy.config)
        case "deepspeed":
            DeepSpeedOptions.parse(strategy.config, torch.bfloat16)


def test_a_mixture_of_experts_that_megatron_trained_is_trained_by_fsdp2() -> None:
    options = {"expert_model_parallel_size": 8, "tensor_model_parallel_size": 2}
    arguments = {"strategy_name": "megatron_train", "strategy_config": options}
    conversion = converted(pretrain="Qwen/Qwen3-30B-A3B", actor_train={"strategy_args": arguments})
    assert cannot(conversion) == []
    strategy = parse_run(conversion.document).spec.pipeline.actor_train.strategy
    assert (strategy.name, strategy.config) == ("fsdp2", {"gradient_checkpointing": True})


@pytest.mark.parametrize(
    ("path", "switched"),
    [
        ("Qwen/Qwen3-8B", True),
        ("/models/Qwen3-30B-A3B", True),
        ("Qwen/Qwen3-4B-Instruct-2507", False),
        ("Qwen/Qwen3-1.7B-Base", False),
        ("Qwen/Qwen2.5-7B-Instruct", False),
    ],
)
def test_a_model_that_can_think_does_not_as_in_roll(path: str, switched: bool) -> None:
    spec = parse_run(converted(pretrain=path).document).spec
    assert spec.model.chat_template_args == ({"enable_thinking": False} if switched else {})


def test_the_options_that_are_kept_are_options_of_ours() -> None:
    assert KEPT["megatron"] <= {*SIZES, *TRANSFORMER, *DATA_PARALLEL}
    assert KEPT["fsdp2"] <= {field.name for field in fields(FsdpOptions)}
    assert {*ZERO_PASSED, *OFFLOADED} >= ZERO_KEPT


def test_parallelism_that_we_do_not_have_is_told() -> None:
    options = {
        "virtual_pipeline_model_parallel_size": 2,
        "optimizer_cpu_offload": True,
    }
    conversion = converted(
        actor_train={
            "strategy_args": {"strategy_name": "megatron_train", "strategy_config": options}
        }
    )
    assert sorted(cannot(conversion)) == [
        f"actor_train.strategy_args.strategy_config.{name}" for name in sorted(options)
    ]


def infer(name: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **BASE["actor_infer"],
        "strategy_args": {"strategy_name": name, "strategy_config": options},
        **more,
    }


@pytest.mark.parametrize(
    ("engine", "options", "gpus", "expected"),
    [
        (
            "vllm",
            {"gpu_memory_utilization": 0.8, "load_format": "auto", "max_model_len": 9},
            1,
            {"gpu_memory_utilization": 0.8},
        ),
        ("vllm", {"tensor_parallel_size": 1}, 2, {"tensor_parallel_size": 2}),
        ("vllm", {"tensor_parallel_size": 4}, 4, {"tensor_parallel_size": 4}),
        ("sglang", {"mem_fraction_static": 0.7}, 1, {"mem_fraction_static": 0.7}),
        (
            "sglang",
            {"mem_fraction_static": 0.7},
            8,
            {"mem_fraction_static": 0.7, "tensor_parallel_size": 8},
        ),
        ("hf_infer", {"whatever": 1}, 1, {}),
    ],
)
def test_engines_keep_their_own_options(
    engine: str, options: dict[str, Any], gpus: int, expected: dict[str, Any]
) -> None:
    conversion = converted(actor_infer=infer(engine, options, num_gpus_per_worker=gpus))
    assert cannot(conversion) == []
    strategy = parse_run(conversion.document).spec.pipeline.actor_infer.strategy
    assert (strategy.name, strategy.config, strategy.gpus) == (
        {"hf_infer": "transformers"}.get(engine, engine),
        expected,
        gpus,
    )


@pytest.mark.parametrize(
    ("model_args", "expected"),
    [
        ({"lora_rank": 16}, None),  # ROLL trains adapters exactly with lora_target
        ({"lora_target": "all-linear"}, {"rank": 8, "alpha": 16.0}),
        (
            {"lora_target": "q_proj, v_proj", "lora_rank": 32, "lora_alpha": 32},
            {"rank": 32, "alpha": 32.0, "targetModules": ["q_proj", "v_proj"]},
        ),
    ],
)
def test_adapters(model_args: dict[str, Any], expected: dict[str, Any] | None) -> None:
    conversion = converted(actor_train={"model_args": model_args})
    assert cannot(conversion) == []
    assert conversion.document["spec"]["pipeline"]["actorTrain"].get("lora") == expected
    parse_run(conversion.document)


def test_dropout_of_adapters_is_told() -> None:
    adapters = {"model_args": {"lora_target": "all-linear", "lora_dropout": 0.1}}
    assert "actor_train.model_args.lora_dropout" in cannot(converted(actor_train=adapters))


def test_adapters_of_megatron_are_trained_by_fsdp2() -> None:
    conversion = converted(
        actor_train={
            "model_args": {"lora_target": "all-linear"},
            "device_mapping": "list(range(0, 8))",
            "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1},
            "strategy_args": {
                "strategy_name": "megatron_train",
                "strategy_config": {"tensor_model_parallel_size": 4},
            },
        },
        actor_infer={
            **BASE["actor_infer"],
            "model_args": {"lora_target": "q_proj", "lora_rank": 4},
        },
    )
    assert cannot(conversion) == []
    actor = parse_run(conversion.document).spec.pipeline.actor_train
    assert actor.strategy.name == "fsdp2"
    assert actor.strategy.config == {"gradient_checkpointing": True}
    assert actor.lora is not None
    assert actor.training.mini_batch_size == 8  # all ranks are data-parallel


@pytest.mark.parametrize(
    ("engines", "ahead", "placement"),
    [
        ("list(range(0, 8))", 0, "Colocated"),
        ("list(range(0, 4))", 0, None),
        ("list(range(0, 8))", 1, None),
        ("list(range(8, 16))", 0, None),
    ],
)
def test_engines_on_exactly_the_trainers_gpus_take_turns_with_them(
    engines: str, ahead: float, placement: str | None
) -> None:
    conversion = converted(
        actor_train={"device_mapping": "list(range(0, 8))"},
        actor_infer=infer("vllm", {}, device_mapping=engines),
        async_generation_ratio=ahead,
    )
    spec = conversion.document["spec"]
    assert spec.get("placement") == placement
    assert ("inference" in spec["roles"]) is (placement is None)
    parse_run(conversion.document)


def test_a_missing_validation_is_none() -> None:
    assert pipeline()["evalSteps"] == 0
    assert "valEnvs" not in pipeline()


def test_a_batch_without_end_becomes_one_of_all_episodes_side_by_side() -> None:
    conversion = converted(rollout_batch_size=-1)
    assert conversion.document["spec"]["pipeline"]["rolloutBatchSize"] == 32
    assert cannot(conversion) == ["rollout_batch_size"]


def test_a_validation_without_end_plays_one_episode_per_environment() -> None:
    managers = {"num_env_groups": 6, "group_size": 3, "tags": ["Lake"]}
    conversion = converted(
        eval_steps=5, val_batch_size=-1, val_env_manager={**managers, "num_groups_partition": [6]}
    )
    assert conversion.document["spec"]["pipeline"]["valBatchSize"] == 18
    assert any("val_batch_size" in line for line in cannot(conversion))


def test_what_is_no_configuration_is_told(tmp_path: Path) -> None:
    file = tmp_path / "roll.yaml"
    for text, message in (
        ("a: ${missing}\n", "missing"),
        ("defaults: [nowhere]\n", "nowhere"),
        ("a: [1\n", "roll.yaml"),
        ("", "holds no settings"),
    ):
        file.write_text(text)
        with pytest.raises(ConvertError, match=message):
            compose(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": "abc"}, "max_steps: must be a number, not 'abc'"),
        ({"sequence_length": "long"}, "sequence_length: must be a whole number"),
        ({"custom_envs": [1]}, "custom_envs: must be a mapping"),
        ({"custom_envs": {"Lake": 1}}, "custom_envs.Lake: must be a mapping"),
        (
            {"custom_envs": {"Lake": {"max_steps": "many"}}},
            "custom_envs.Lake.max_steps: must be a number",
        ),
        ({"actor_train": 3}, "actor_train: must be a mapping"),
        (
            {"actor_infer": {"generating_args": {"top_p": "half"}}},
            "actor_infer.generating_args.top_p: must be a number",
        ),
        ({"train_env_manager": {"tags": "Lake"}}, "train_env_manager.tags: must be a list"),
        ({"whiten_advantages": 1}, "whiten_advantages: must be a switch"),
        (
            {"train_env_manager": {"group_size": 0.5}},
            "train_env_manager.group_size: must be a whole number",
        ),
        (
            {"checkpoint_config": {"output_dir": 20241101}},
            "checkpoint_config.output_dir: must be a text",
        ),
    ],
)
def test_values_that_roll_would_refuse_are_named_with_their_path(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError) as raised:
        converted(**changes)
    assert str(raised.value).startswith(message)


def test_a_file_s_own_values_win_over_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "shared.yaml").write_text("seed: 1\nmax_steps: 7\n")
    file = tmp_path / "nested" / "roll.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [/shared@_here_]\nseed: 2\nhydra: {output_subdir: null}\n")
    assert compose(file, tmp_path).config == {"seed": 2, "max_steps": 7}


def test_the_command_writes_the_run_and_tells_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "run.yaml"
    result = CliRunner().invoke(app, ["convert", str(EXAMPLES[0]), "-o", str(out)])
    assert result.exit_code == 0
    assert "means something else here" in result.stderr
    assert len(result.stderr.splitlines()) < 40
    assert CliRunner().invoke(app, ["validate", "-f", str(out)]).exit_code == 0
    printed = CliRunner().invoke(app, ["convert", str(EXAMPLES[0])])
    assert printed.stdout == out.read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: ${b}\n")
    assert CliRunner().invoke(app, ["convert", str(bad)]).exit_code == ExitCode.INVALID_CONFIG


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_agents_take_the_converted_templates(example: Path) -> None:
    run = parse_run(convert(compose(example), example.stem).document)
    tokenizer = build_task_tokenizer(("a",), 256)
    for env in run.spec.pipeline.envs:
        limits = AgentLimits(
            max_turns=env.max_steps,
            max_tokens_per_step=env.max_tokens_per_step,
            sequence_length=256,
        )
        make_agent(env.agent.type, env.agent.config, tokenizer=tokenizer, limits=limits)
