"""Types of models at tiny size: what engine and trainer compute, against transformers' own forward.

Every causal language model of transformers is tried. `CASES` lists the types that need options of
their own, and the variants; all others are made from their config class with the sizes of `SIZES`.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agenticrun_workers.inference import UnusableModel
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.models.heads import UnsupportedModel
from agenticrun_workers.models.pretrained import MAKING, ModelLoadError, load_config, load_model
from agenticrun_workers.trainer.modules import PolicyModule
from agenticrun_workers.trainer.samples import Sample
from agenticrun_workers.trainer.sharded_module import ShardedModule
from agenticrun_workers.types import FloatArray, GenerationRequest, IntArray, SamplingParams
from tiny_model import plain_logprobs

EQUAL = 2e-6
"""Largest difference of a log-prob that counts as equal, in nats. Weights are float32. Models that
amplify rounding (Gemma 4) may differ by twice as much as transformers' own implementations of
attention do."""
VOCABULARY = 61
WINDOW = 16
"""Prompts and samples are longer."""
LENGTHS = (90, 50, 37, 20, 9)
"""Tokens of the trainer's samples."""
PROMPTS = (60, 37, 9)
"""Tokens of the engine's prompts, which are served together."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    # width
    "hidden_size": 32,
    "embedding_size": 32,
    "lru_width": 32,
    "intermediate_size": 48,
    "shared_intermediate_size": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    # layers
    "num_hidden_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    # heads
    "num_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_head_dim": 8,
    "kv_channels": 8,
    "rotary_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    # windows
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    # recurrent layers
    "state_size": 8,
    "time_step_rank": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "n_groups": 1,
    # parts of a few types
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
}
EXPERTS: dict[str, int] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes of mixtures of experts, where the type's own are larger."""


@dataclass(frozen=True)
class Case:
    """A type of model, or a variant of one."""

    model_type: str
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the config, over `SIZES`."""
    without: frozenset[str] = frozenset()
    """Fields of `SIZES` that the type does not take."""
    reference: str = "eager"
    """Attention of transformers' forward."""

    @property
    def name(self) -> str:
        return f"{self.model_type}, {self.variant}" if self.variant else self.model_type


HALF = ["sliding_attention", "full_attention"] * 2
CONV = ["conv", "full_attention"] * 2
PART: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCABULARY}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CONTEXT = frozenset({"max_position_embeddings"})
GEMMA_4: dict[str, Any] = {"layer_types": HALF, "global_head_dim": 8}
CASES = (
    Case("cohere", "logit scale 1", {"logit_scale": 1.0}),
    Case("cohere2", "logit scale 1", {"logit_scale": 1.0, "layer_types": HALF}),
    *(Case(name, options={"head_dim": 4, "num_key_value_heads": 4}) for name in (
        "axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")),
    Case("deepseek_v2", options={
        "head_dim": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1}),
    Case("bamba", options={"attn_layer_indices": [1, 3]}),
    Case("blt", options={
        "patcher_config": {**PART, "max_position_embeddings": 512}, "global_config": PART,
        "encoder_config": {**PART, "cross_attn_k": 1, "hidden_size_global": 32},
        "decoder_config": {**PART, "cross_attn_k": 1, "hidden_size_global": 32},
        "encoder_hash_byte_group_size": [3], "encoder_hash_byte_group_vocab": 50,
        "cross_attn_k": 1}),
    Case("cohere_compass_text", options={
        "layer_types": HALF, "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}
    }),
    Case("cpmant", options={"dim_head": 8, "dim_ff": 48, "prompt_length": 2}),
    Case("ctrl", options={"dff": 48}),
    Case("doge", "mixture of experts", {"is_moe": True}),
    Case("dots1", options={
        "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    Case("dots3_note_text", options={
        "num_key_value_heads": 4, "head_dim": 4, "index_head_dim": 8, "index_n_heads": 2,
        "shared_experts_intermediate_size": 24, "layer_types": ["indexed_attention"] * 4}),
    Case("falcon", "ALiBi", {"alibi": True}, reference="sdpa"),
    Case("falcon", "grouped heads", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Case("falcon_h1", options={"mamba_d_ssm": 64}),
    Case("gemma4_assistant", options={"text_config": {
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}),
    Case("gemma4_text", options=GEMMA_4),
    Case("gemma4_text", "shared keys and values", {**GEMMA_4, "num_kv_shared_layers": 2}),
    Case("gemma4_unified_text", options=GEMMA_4),
    Case("gpt_neo", options={"attention_types": [[["global", "local"], 2]], "window_size": WINDOW}),
    Case("granite", "scaled logits", {"logits_scaling": 8.0}),
    Case("granitemoehybrid", "dense, attention only", {
        "num_local_experts": 0, "layer_types": ["full_attention"] * 4}),
    Case("granitemoehybrid", "dense, hybrid", {
        "num_local_experts": 0, "layer_types": ["linear_attention", "full_attention"] * 2}),
    Case("jamba", "one expert", {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    Case("kimi_linear", options={"linear_head_dim": 8, "linear_num_heads": 4}),
    Case("lfm2", "attention only", {"layer_types": ["full_attention"] * 4}),
    Case("lfm2", "with convolution", {"layer_types": CONV}),
    Case("lfm2_moe", options={"layer_types": CONV}),
    Case("llama", "unused window", {"sliding_window": WINDOW, "attention_chunk_size": WINDOW}),
    Case("llama", "tied", {"tie_word_embeddings": True}),
    Case("llama", "llama3 rope", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    Case("llama4_text", "dense", {"num_local_experts": 1, "moe_layers": [],
         "layer_types": ["chunked_attention", "full_attention"] * 2, "intermediate_size_mlp": 48}),
    Case("mamba2", options={"num_heads": 4, "head_dim": 16}),
    Case("minicpm3", options={"head_dim": 4}),
    Case("mistral", "no window", {"sliding_window": None}),
    Case("moshi", options={"ffn_dim": 48}),
    Case("nemotron_h", "dense", {"layers_block_type": ["mamba", "attention", "mamba", "mlp"]}),
    Case("phi3", "no window", {"sliding_window": None}),
    Case("qwen2", "sliding window", {"use_sliding_window": True, "max_window_layers": 2}),
    Case("qwen2_moe", "sliding window", {"use_sliding_window": True}),
    Case("qwen3", "sliding window", {"use_sliding_window": True, "max_window_layers": 2}),
    Case("reformer", options={"is_decoder": True, "axial_pos_embds": False}),
    Case("rembert", options={"input_embedding_size": 32, "output_embedding_size": 32}),
    Case("roc_bert", options={"pronunciation_vocab_size": 30, "shape_vocab_size": 30}),
    Case("xlnet", options={"d_head": 8, "d_inner": 48}, without=CONTEXT),
    Case("xglm", options={"ffn_dim": 48}),
    Case("xmod", options={"languages": ["en_XX"], "default_language": "en_XX"}),
    Case("youtu", options={"head_dim": 4, "num_key_value_heads": 4}),
    Case("zamba", options={"num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 2}),
    Case("zamba2", options={"layers_block_type": ["mamba", "hybrid"] * 2, "mamba_headdim": 8,
         "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3]}),
)  # fmt: skip


def all_cases() -> list[Case]:
    """Return every type that transformers offers, and variants, in the order of their names."""
    special = {case.model_type for case in CASES if not case.variant}
    plain = [Case(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in special]
    return sorted([*plain, *CASES], key=lambda case: case.name)


@dataclass(frozen=True)
class Measured:
    """The result for one model. Differences are the largest of a log-prob, in nats."""

    case: Case
    attention: str = "sdpa"
    """The implementation that works: `spec.model.attnImplementation`."""
    engine: float | str = ""
    """Difference, or the reason of a refusal."""
    padded: float | str = ""
    packed: float | str = ""
    packs: bool = False
    """The trainer puts several sequences of this type in a row."""
    refused: str = ""
    """Reason why neither engine nor trainer loads it."""
    rounding: float = 0.0
    """Difference between transformers' implementations of attention, where that is large."""

    @property
    def differs(self) -> bool:
        """Return True if something is computed wrongly: it neither equals nor is refused."""
        allowed = max(EQUAL, 2 * self.rounding)
        values = (self.engine, self.padded, self.packed)
        return any(isinstance(value, float) and not value <= allowed for value in values)


def measure(case: Case) -> Measured:
    """Compute with engine and trainer what transformers computes.

    Raises:
        Exception: no tiny model could be made, or something fails that should be refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = tiny_config(case)
        except Exception:
            config = CONFIG_MAPPING[case.model_type]()  # load_config may refuse the type as it is
        config.save_pretrained(folder)
        try:
            load_config(folder)
        except ModelLoadError as error:
            return Measured(case, refused=_text(error, folder))
        try:
            make_without_memory(config)
        except Exception as error:
            return Measured(case, refused=f"transformers cannot make a model: {error}")
        write_random(Path(folder), config)
        attention = "sdpa"
        try:
            load_model(folder)
        except ModelLoadError as error:
            if "set spec.model.attnImplementation: eager" not in str(error):
                return Measured(case, refused=_text(error, folder))
            attention = "eager"
        layouts: list[bool] = []
        measured = Measured(
            case,
            attention,
            _or_refusal(lambda: engine_difference(case, folder, attention), folder),
            _or_refusal(lambda: trainer_difference(case, folder, attention, layouts), folder),
            _or_refusal(lambda: trainer_difference(case, folder, attention, layouts), folder),
            packs=any(layouts),
        )
        if measured.differs and attention != case.reference:
            measured = replace(measured, rounding=own_difference(case, folder, attention))
        return measured


def tiny_config(case: Case) -> PretrainedConfig:
    """Return the config of a tiny model."""
    config_class = CONFIG_MAPPING[case.model_type]
    known = {each.name for each in fields(config_class)} | config_class.attribute_map.keys()

    def fixed(name: str) -> bool:
        given = getattr(config_class, name, None)
        return isinstance(given, property) and given.fset is None

    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in known - case.without and not fixed(name)
    }
    experts = {
        name: size
        for name, size in EXPERTS.items()
        if isinstance(usual := getattr(config_class, name, None), int) and usual > size
    }
    return config_class(**sizes | experts | case.options)


def write_random(folder: Path, config: PretrainedConfig) -> None:
    """Write the files of `random_model`."""
    size = sum(weight.numel() for weight in make_without_memory(config).parameters())
    assert size < 1_000_000, f"{config.model_type} has {size:,} weights: it lacks sizes in CASES"
    random_model(config).save_pretrained(folder)


def make_without_memory(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return make(config)


def random_model(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """Return a model whose predictions depend on all tokens that it sees."""
    model = make(config, attention)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.08, generator)
    return model.eval()


def make(config: PretrainedConfig, attention: str | None = None) -> PreTrainedModel:
    with MAKING:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        )
    return model


def reference(case: Case, folder: str, attention: str = "") -> PreTrainedModel:
    """Return transformers' own model."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention or case.reference
    )
    model.config.use_cache = False
    return model.eval()


def engine_difference(case: Case, folder: str, attention: str) -> float:
    """Return the largest difference of three sessions that play two turns together."""
    plain = reference(case, folder)
    random = np.random.default_rng(0)
    gaps: list[float] = []

    async def turn(engine: TransformersEngine, name: int, prompt_T: IntArray) -> IntArray:
        request = GenerationRequest(
            f"{name}-{len(prompt_T)}", str(name), prompt_T, SamplingParams(6, 1.0), name
        )
        answer = await engine.generate(request)
        expected_T = plain_logprobs(plain, prompt_T, answer.tokens_T)
        gaps.extend(np.abs(answer.logprobs_T - expected_T))
        return np.concatenate([prompt_T, answer.tokens_T, tokens(random, 20)])

    async def two_turns() -> None:
        engine = TransformersEngine(
            lambda: load_model(folder, attn_implementation=attention), max_length=128
        )
        try:
            await engine.start()
            prompts = [tokens(random, size) for size in PROMPTS]
            for _ in range(2):
                prompts = await asyncio.gather(
                    *(turn(engine, name, prompt_T) for name, prompt_T in enumerate(prompts))
                )
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(two_turns(), 120))
    return float(np.max(gaps))


def trainer_difference(case: Case, folder: str, attention: str, layouts: list[bool]) -> float:
    """Return the largest difference of the module that trains, on one batch of samples.

    Args:
        case: the type.
        folder: of the model.
        attention: implementation of the trainer.
        layouts: gets an entry: True if the samples were packed. The first call pads.
    """
    plain = reference(case, folder)
    random = np.random.default_rng(1)
    model = ShardedModule(
        lambda: load_model(folder, attn_implementation=attention),
        PolicyModule,
        max_tokens=4096,
        packing=bool(layouts),
    )
    layouts.append(model.batcher.packed)
    samples: list[Sample] = []
    expected: list[FloatArray] = []
    for length in LENGTHS:
        ids_T = tokens(random, length)
        turns_T = np.where(np.arange(length) < 4, -1, 0).astype(np.int32)
        zeros_T = np.zeros(length, np.float32)
        samples.append(Sample(ids_T, zeros_T, zeros_T, turns_T))
        expected.append(np.concatenate([zeros_T[:4], plain_logprobs(plain, ids_T[:4], ids_T[4:])]))
    scored = model.score(samples, 1.0)
    return max(
        float(np.abs(scored_T - expected_T).max())
        for scored_T, expected_T in zip(scored, expected, strict=True)
    )


def own_difference(case: Case, folder: str, attention: str) -> float:
    """Return the largest difference between two implementations of attention of transformers."""
    random = np.random.default_rng(1)
    models = [reference(case, folder, name) for name in (case.reference, attention)]
    gaps: list[float] = []
    for length in LENGTHS:
        ids_T = tokens(random, length)
        one, other = (plain_logprobs(model, ids_T[:1], ids_T[1:]) for model in models)
        gaps.append(float(np.abs(one - other).max()))
    return max(gaps)


def tokens(random: np.random.Generator, count: int) -> IntArray:
    """Return ids without those of the first special tokens."""
    return random.integers(3, VOCABULARY, size=count).astype(np.int32)


def _or_refusal(compute: Callable[[], float], folder: str) -> float | str:
    try:
        return compute()
    except (UnusableModel, UnsupportedModel, ModelLoadError) as error:
        return _text(error, folder)


def _text(error: Exception, folder: str) -> str:
    return str(error).replace(folder, "the folder")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers about odd sizes."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(before)
