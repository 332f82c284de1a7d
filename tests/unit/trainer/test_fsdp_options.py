"""Options of fsdp2: which are taken, which are refused, and what they do on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.models.pretrained import load_model
from agenticrun_workers.trainer.fsdp2 import Fsdp2Strategy, fsdp2_policy
from agenticrun_workers.trainer.optimizer import OptimizerSpec
from agenticrun_workers.trainer.reference import ReferencePolicy
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import EXPENSIVE, FsdpOptions
from agenticrun_workers.trainer.varlen import attention
from ragged_samples import LOSSES, VOCABULARY, batch, largest_difference

SPEC = OptimizerSpec(1e-2)
LOSS = LOSSES["ppo"]

Load = Callable[[], PreTrainedModel]


@pytest.fixture
def samples(load: Load) -> list[Sample]:
    return batch(load(), LOSS)


def test_options_are_taken_under_their_names() -> None:
    config = {
        "gradient_checkpointing": True,
        "ulysses_sequence_parallel_size": 2,
        "reshard_after_forward": False,
    }
    assert FsdpOptions.parse(config) == FsdpOptions(
        gradient_checkpointing=True, ulysses_sequence_parallel_size=2, reshard_after_forward=False
    )
    assert FsdpOptions.parse({}) == FsdpOptions() == FsdpOptions.parse({"fsdp_size": -1})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"gradient_checkpoint": True},
            r"fsdp2 has no option gradient_checkpoint; "
            r"it has reshard_after_forward, gradient_checkpointing",
        ),
        (
            {"param_dtype": "bfloat16"},
            r"the option param_dtype of fsdp2 is decided by spec\.model\.dtype",
        ),
        ({"ep_size": 2}, r"ep_size: fsdp2 calls it expert_parallel_size"),
        ({"expert_parallel_size": 0}, r"expert_parallel_size .* of at least 1, not 0"),
        ({"reduce_dtype": "bfloat16"}, r"reduce_dtype .* summed in float32"),
        ({"fsdp_size": 0}, r"fsdp_size .* must be a whole number of at least 1, not 0"),
        (
            {"max_grad_norm": 1.0},
            r"max_grad_norm .* spec\.pipeline\.actorTrain\.training\.maxGradNorm",
        ),
        (
            {"offload_policy": "yes"},
            r"the option offload_policy of fsdp2 must be true or false, not 'yes'",
        ),
        ({"offload_policy": 1}, r"offload_policy .* must be true or false, not 1"),
        (
            {"recompute_granularity": "partial"},
            r"recompute_granularity .* must be full or selective, not 'partial'",
        ),
        (
            {"ulysses_sequence_parallel_size": 0},
            r"ulysses_sequence_parallel_size .* must be a whole number of at least 1, not 0",
        ),
        (
            {"logits_chunk_elements": True},
            r"logits_chunk_elements .* must be a whole number of at least 1, not True",
        ),
    ],
)
def test_what_is_unknown_wrong_or_decided_elsewhere_is_refused_by_name(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FsdpOptions.parse(config)


def test_numbers_of_ranks_can_be_left_out() -> None:
    options = FsdpOptions(
        gradient_checkpointing=True,
        ulysses_sequence_parallel_size=4,
        fsdp_size=8,
        expert_parallel_size=2,
    )
    assert options.on_other_ranks() == FsdpOptions(gradient_checkpointing=True)


def test_copies_that_do_not_fit_the_ranks_are_refused() -> None:
    assert FsdpOptions(fsdp_size=2).copies(6) == 3
    with pytest.raises(ValueError, match="fsdp_size 4 does not divide the 6 trainer ranks"):
        FsdpOptions(fsdp_size=4).copies(6)


def test_a_group_larger_than_the_ranks_is_refused(load: Load) -> None:
    with pytest.raises(
        ValueError, match="ulysses_sequence_parallel_size 2 does not divide the 1 trainer ranks"
    ):
        fsdp2_policy(load, SPEC, options=FsdpOptions(ulysses_sequence_parallel_size=2))


def test_experts_that_a_model_lacks_are_not_divided(load: Load) -> None:
    with pytest.raises(ValueError, match="size is 2, but the model has no experts: leave it out"):
        fsdp2_policy(load, SPEC, options=FsdpOptions(expert_parallel_size=2))


def test_a_model_that_does_not_hand_its_sequences_down_to_its_attention_is_found_out() -> None:
    with pytest.raises(
        UnsupportedModel, match="does not learn from its model how sequences are cut"
    ):
        attention(
            torch.nn.Identity(),
            torch.zeros(1, 2, 3, 4),
            torch.zeros(1, 2, 3, 4),
            torch.zeros(1, 2, 3, 4),
            None,
        )


@pytest.mark.usefixtures("_one_rank")
def test_one_rank_computes_in_bfloat16_on_float32_masters(
    folder: Path, load_float32: Load, samples: list[Sample]
) -> None:
    policy = fsdp2_policy(load_float32, SPEC, dtype=torch.bfloat16)
    rounded = ReferencePolicy(lambda: load_model(str(folder), torch.bfloat16))
    for a, b in zip(
        policy.compute_log_probs(samples), rounded.compute_log_probs(samples), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    exact = fsdp2_policy(load_float32, SPEC).gradients(samples, LOSS)
    found = policy.gradients(samples, LOSS)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert 1e-4 < largest_difference(found, exact) < 0.15


@pytest.mark.usefixtures("_one_rank")
def test_gradients_of_micro_batches_are_summed_in_float32(
    load_float32: Load, samples: list[Sample]
) -> None:
    """A 32nd of the same gradient 32 times, which is exact in bfloat16; the sum would not be."""
    policy = fsdp2_policy(load_float32, SPEC, dtype=torch.bfloat16, max_tokens=1)
    assert (
        largest_difference(
            policy.gradients(samples[:1] * 32, LOSS), policy.gradients(samples[:1], LOSS)
        )
        < 1e-6
    )


@pytest.mark.usefixtures("_one_rank")
def test_one_rank_keeps_parameters_and_optimizer_on_the_host(
    load: Load, samples: list[Sample]
) -> None:
    offloaded, plain = (
        fsdp2_policy(load, SPEC, options=FsdpOptions(offload_policy=True)),
        fsdp2_policy(load, SPEC),
    )
    assert isinstance(offloaded.strategy, Fsdp2Strategy)
    assert isinstance(offloaded.strategy.model.module, FSDPModule)
    for policy in (offloaded, plain):
        policy.train_step(samples, LOSS)
    for (name, a), (_, b) in zip(offloaded.export_weights(), plain.export_weights(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_recomputed_layers_change_no_gradient(load: Load, samples: list[Sample]) -> None:
    calls = {"plain": 0, "recomputing": 0}

    def counted(name: str) -> PreTrainedModel:
        model = load()

        def count(*_: object) -> None:
            calls[name] += 1

        model.get_decoder().layers[0].mlp.register_forward_pre_hook(count)
        return model

    expected = fsdp2_policy(lambda: counted("plain"), SPEC).gradients(samples, LOSS)
    found = fsdp2_policy(
        lambda: counted("recomputing"), SPEC, options=FsdpOptions(gradient_checkpointing=True)
    ).gradients(samples, LOSS)
    assert largest_difference(found, expected) == 0
    assert calls["recomputing"] == calls["plain"] + 1


class Products(TorchDispatchMode):
    """Counts matrix products and attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += func in EXPENSIVE
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_repeats_no_matrix_product(samples: list[Sample]) -> None:
    gradients, products = {}, {}
    for name, options in {
        "none": FsdpOptions(),
        "full": FsdpOptions(gradient_checkpointing=True),
        "selective": FsdpOptions(gradient_checkpointing=True, recompute_granularity="selective"),
    }.items():
        torch.manual_seed(0)
        policy = fsdp2_policy(lambda: qwen3(tied=False), SPEC, options=options)
        with Products() as counted:
            gradients[name] = policy.gradients(samples, LOSS)
        products[name] = counted.calls
    assert largest_difference(gradients["selective"], gradients["none"]) == 0
    assert products["selective"] == products["none"] < products["full"]


def test_a_trainer_goes_on_after_a_visit_to_host_memory(load: Load, samples: list[Sample]) -> None:
    visiting, straight = fsdp2_policy(load, SPEC), fsdp2_policy(load, SPEC)
    for _ in range(2):
        visiting.train_step(samples, LOSS)
        visiting.offload()
        visiting.onload()
        straight.train_step(samples, LOSS)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(visiting.export_weights(), straight.export_weights(), strict=True)
    )


def qwen3(*, tied: bool) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    ("tied", "gathered_whole_pass"), [(False, 16), (True, (VOCABULARY + 1) * 16)]
)
def test_embedding_layers_and_output_layer_are_gathered_one_at_a_time(
    tied: bool, gathered_whole_pass: int, samples: list[Sample]
) -> None:
    """The root holds the last norm, and weights that are needed at both ends of the pass."""
    policy = fsdp2_policy(lambda: qwen3(tied=tied), SPEC, dtype=torch.bfloat16)
    assert isinstance(policy.strategy, Fsdp2Strategy)
    module = policy.strategy.model.module
    units = {name for name, part in module.named_modules() if name and isinstance(part, FSDPModule)}
    ends = set() if tied else {"model.model.embed_tokens", "model.lm_head"}
    assert units == {f"model.model.layers.{number}" for number in range(3)} | ends
    owned = {id(p) for unit in units for p in module.get_submodule(unit).parameters()}
    rest = [p for p in module.parameters() if id(p) not in owned]
    assert sum(p.numel() for p in rest) == gathered_whole_pass
    policy.train_step(samples, LOSS)
