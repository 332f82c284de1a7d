"""Load causal language models from Hugging Face folders, and write them.

Writing does not use `PreTrainedModel.save_pretrained`, which imports every wrapper that the model
might be in (DeepSpeed, if it is installed).
"""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from agenticrun_workers.models.devices import compute_device
from agenticrun_workers.models.folder import ModelLoadError as ModelLoadError  # noqa: PLC0414  # of load_model
from agenticrun_workers.models.folder import check_config, check_weights, stored_shapes
from agenticrun_workers.models.lora import hidden_adapters
from agenticrun_workers.models.shape import float32_parts
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.models.stored_names import has_stored_names

log = logging.getLogger(__name__)

disable_progress_bar()
"""Pods write to logs, where a bar is noise."""

EXPERTS = re.compile(r"(^|\.)(router|router_gate|\w*experts?)(\.|$)")
"""Names of layers that only a mixture of experts has. The counts in a config say nothing: many
classes of dense models have a default for them."""

OTHER_MODALITIES = {"vision_config", "audio_config"}
"""Parts of configs of models that read more than text, although they are language models."""

FINITE_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Quantised weights are not checked: torch cannot compare them."""


Distribute = Callable[[PreTrainedModel], None]
"""Shards a model whose parameters are on the meta device."""


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the config of a text-only causal language model.

    Raises:
        ModelLoadError: there is no such model, or it is of another kind.
    """
    check_config(path, trust_remote_code=trust_remote_code)
    with _naming(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelLoadError(
            f"{path} has an encoder besides its decoder ({config.model_type}), which is not "
            "offered: train a model that has only a decoder"
        )
    if text is not config or OTHER_MODALITIES & config.sub_configs.keys():
        raise ModelLoadError(
            f"{path} is a model of several modalities ({config.model_type}), which is not offered "
            "yet: train a text-only model, such as the language model that it was built from"
        )
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ModelLoadError(
            f"the weights of {path} are quantised ({method or 'by quantization_config'}), which is "
            "not trained: take a copy of the model in bfloat16"
        )
    if reason := _why_no_mixture(config, trust_remote_code=trust_remote_code):
        raise ModelLoadError(
            f"{path} is a mixture of experts ({config.model_type}) that is not offered, because "
            f"{reason}: train a model of another type (docs/model-types.md lists them)"
        )
    return config


def _why_no_mixture(config: PretrainedConfig, *, trust_remote_code: bool) -> str:
    """Return why a model of this config cannot be trained or exported as a mixture of experts.

    Empty for a model that can, and for dense models.
    """
    try:
        model = make_without_data(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # of a model's own code, too; a load of the weights names the cause
        log.debug("no model can be made from the config alone: %r", error)
        return ""
    modules = dict(model.named_modules())
    if not any(EXPERTS.search(name) for name in modules):
        return ""
    # FSDP needs a gradient of each parameter on all ranks, so the experts of a layer, of which a
    # batch may use a few only, must share their parameters.
    layers = [part for name, part in modules.items() if name.rpartition(".")[2] == "experts"]
    if not layers or not all(map(_is_fused, layers)):
        return "its experts are not the rows of weights that a layer has for all of them"
    # Engines must be able to load what is exported.
    if not has_stored_names(model):
        return "transformers does not write its weights one by one under the names of its files"
    # FSDP computes a module in one dtype.
    if wide := float32_parts(model)[1]:
        return f"{wide[0]} must stay in float32 in a module that computes in bfloat16"
    return ""


def _is_fused(experts: torch.nn.Module) -> bool:
    """Return True if all parameters have the expert as their first dimension."""
    own = list(experts.parameters(recurse=False))
    return (
        bool(own)
        and len(own) == len(list(experts.parameters()))
        and len({len(parameter) for parameter in own}) == 1
    )


def count_parameters(path: str, *, trust_remote_code: bool = False) -> int:
    """Return the number of parameters of a model, of which nothing but the config is read.

    Raises:
        ModelLoadError: see `load_config`.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    with _naming(path):
        model = make_without_data(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def make_without_data(config: PretrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    with MAKING, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code
        )
    return model


def has_attention(config: PretrainedConfig) -> bool:
    """Return False for models whose layers are all recurrent, such as Mamba, RWKV and xLSTM."""
    name = "num_attention_heads"
    parts = [config, *(getattr(config, part) for part in config.sub_configs)]
    return any(name in part.to_dict() or name in part.attribute_map for part in parts)


MAKING = threading.Lock()
"""Held while transformers makes a model.

While it runs, torch's default dtype and torch.nn.init differ for the whole process,
and actors may share a process.
"""


def load_model(
    path: str,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    attn_implementation: str = "sdpa",
    trust_remote_code: bool = False,
    output_layer: bool = True,
    check_values: bool = True,
    distribute: Distribute | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode.

    Args:
        path: a folder or a name on the hub.
        device: default: the one that the calling actor has claimed, else the CPU.
        output_layer: the caller uses it. A critic does not, so its folder need not hold one.
        check_values: look for NaN and infinity.
        distribute: shards the model before its weights are read. This process then reads only its
            shards, into host memory whatever `device` is.

    Raises:
        ModelLoadError: see `load_config`; weights are missing, damaged, of other shapes or not
            finite.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    check_weights(path)
    if not has_attention(config):
        attn_implementation = "eager"  # the only name that transformers accepts then
    arguments: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "ignore_mismatched_sizes": True,  # they are in the report, which names them
        "output_loading_info": True,
    }
    model: PreTrainedModel
    if distribute is None:
        with _naming(path), MAKING:
            model, report = AutoModelForCausalLM.from_pretrained(path, **arguments)
        # Biases of routers, which transformers makes trainable when it loads them.
        made = make_without_data(config, trust_remote_code=trust_remote_code)
        for name, parameter in made.named_parameters():
            if not parameter.requires_grad:
                model.get_parameter(name).requires_grad = False
    else:
        model, report = _read_shards(path, arguments, distribute, output_layer)
    if getattr(model, "_hf_peft_config_loaded", False):  # of a model on the hub
        raise ModelLoadError(f"{path} holds a LoRA adapter: merge it into the model first")
    made_new = "" if output_layer else _name_of(model, model.get_output_embeddings())
    check_report(path, report, made_new)
    if distribute is None:
        model.to(device or compute_device())
    for name, weight in model.named_parameters() if check_values else ():
        check_finite(path, name, weight)
    return model.eval()


def _read_shards(
    path: str, arguments: dict[str, Any], distribute: Distribute, output_layer: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load with transformers' distributed loading, but with a sharding of our own.

    transformers reads of each `DTensor` only the part that this process holds. Its own plans shard
    only some families, know no adapters and no value heads, and leave everything that is not a
    layer in one unit; so `distribute` takes the place of its method that applies them.

    Returns:
        The model, and the report of the load.
    """
    plain = type(
        make_without_data(arguments["config"], trust_remote_code=arguments["trust_remote_code"])
    )
    failed: list[Exception] = []
    shared: dict[str, str] = {}

    def prepare_distribute_model(
        _cls: type, config: object, device_map: object = None
    ) -> tuple[object, object, None]:
        return config, device_map, None

    def maybe_distribute_model(_cls: type, model: PreTrainedModel, *_: object) -> PreTrainedModel:
        _check_shapes(path, model, output_layer)
        model.tie_weights()  # otherwise done after the load, too late for the sharding to see it
        shared.update(_shared(model))
        try:
            distribute(model)
        except Exception as error:
            failed.append(error)
            raise
        return model

    sharded = type(
        plain.__name__,
        (plain,),
        {
            "__module__": plain.__module__,
            "prepare_distribute_model": classmethod(prepare_distribute_model),
            "maybe_distribute_model": classmethod(maybe_distribute_model),
        },
    )
    try:
        with _naming(path), MAKING:
            model, report = sharded.from_pretrained(  # type: ignore[attr-defined]
                path, distributed_config={}, **arguments
            )
    except ModelLoadError:
        if failed:  # an error of the sharding, which `_naming` takes for one of the load
            raise failed[0]  # noqa: B904
        raise
    model.__class__ = plain
    del model.config.distributed_config
    found = _shared(model)
    for name, first in shared.items():
        if found.get(name, first) != first:
            raise ModelLoadError(
                f"{path} holds {name} and {first} with different values, config.json ties them: "
                "set tie_word_embeddings: false in config.json"
            )
    return model, report


def _shared(model: PreTrainedModel) -> dict[str, str]:
    """Return the first name of the tensor that each parameter is, by the parameter's name."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _check_shapes(path: str, model: PreTrainedModel, output_layer: bool) -> None:
    """Compare whole shapes with those in the files: a shard does not show the whole.

    Names that transformers translates are left to its report.
    """
    stored = stored_shapes(path)
    unused = None if output_layer else model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        found = stored.get(name)
        if found is None or (unused is not None and unused.weight is parameter):
            continue
        if found != tuple(parameter.shape):
            raise _wrong_shape(path, name, found, tuple(parameter.shape))


def _wrong_shape(
    path: str, name: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> ModelLoadError:
    return ModelLoadError(
        f"the weight {name} of {path} has shape {found}, config.json asks for {expected}: take the "
        "config.json that belongs to the weights"
    )


def check_report(path: str, report: Mapping[str, Any], made_new: str = "") -> None:
    """Check what transformers reports of a load: it fills what a folder lacks with random numbers.

    Args:
        path: of the model.
        report: from `from_pretrained(output_loading_info=True)`: without tied weights and those
            that the model's class computes.
        made_new: name of a layer that the caller makes new or does not use.

    Raises:
        ModelLoadError: weights are missing or have other shapes than config.json says.
    """
    prefix = f"{made_new}."
    for name, found, expected in sorted(report["mismatched_keys"]):
        if not name.startswith(prefix):
            raise _wrong_shape(path, name, tuple(found), tuple(expected))
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(prefix))
    if missing:
        raise ModelLoadError(
            f"{path} lacks {len(missing)} of its weights, {missing[0]} among them: "
            "download it again"
        )
    if surplus := sorted(report["unexpected_keys"]):
        log.warning(
            "%s holds %d weights that its model does not use, %s among them",
            path,
            len(surplus),
            surplus[0],
        )


def check_finite(path: str, name: str, weight: Tensor) -> None:
    """Raise `ModelLoadError` if a weight, or this process's shard of it, holds NaN or infinity.

    It costs one pass over the memory: smallest and largest value are NaN if any value is.
    """
    if isinstance(weight, DTensor):
        weight = weight.to_local()
    if weight.dtype not in FINITE_DTYPES or not weight.numel() or weight.is_meta:
        return
    extremes = torch.stack(torch.aminmax(weight.detach()))
    if not extremes.isfinite().all():
        kind = "NaN" if extremes.isnan().any() else "infinity"
        raise ModelLoadError(
            f"the weights of {path} hold {kind} ({name}): the training that wrote them has "
            "diverged, or the file is damaged; take an earlier checkpoint, or download it again"
        )


def load_source(
    source: ModelSource,
    dtype: torch.dtype | None = None,
    *,
    output_layer: bool = True,
    distribute: Distribute | None = None,
) -> PreTrainedModel:
    """Load the model of a run, in `dtype` (default: the source's). Raises `ModelLoadError`.

    All ranks of a trainer load the same files. If each loads them whole, the first one looks for
    NaN.

    Args:
        output_layer, distribute: see `load_model`.
    """
    alone = not torch.distributed.is_initialized() or not torch.distributed.get_rank()
    with source.folder() as folder:
        return load_model(
            folder,
            dtype or getattr(torch, source.dtype),
            attn_implementation=source.attn_implementation,
            trust_remote_code=source.trust_remote_code,
            output_layer=output_layer,
            check_values=alone or distribute is not None,
            distribute=distribute,
        )


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads a run's model on a rank: whole when called, or only this rank's shards."""

    source: ModelSource
    dtype: torch.dtype | None = None
    """Dtype of the parameters; default: the source's."""
    output_layer: bool = True
    """True if the caller uses it. A critic does not, so its folder need not hold one."""
    adapt: Callable[[PreTrainedModel], object] | None = None
    """Puts adapters into the model, in place."""

    def __call__(self) -> PreTrainedModel:
        model = load_source(self.source, self.dtype, output_layer=self.output_layer)
        if self.adapt is not None:
            self.adapt(model)
        return model

    def load_shards(self, distribute: Distribute) -> PreTrainedModel:
        """Load what is left of the model on this rank after `distribute`, into host memory."""
        with ExitStack() as stack:

            def prepare(model: PreTrainedModel) -> None:
                if self.adapt is not None:
                    self.adapt(model)
                distribute(model)
                stack.enter_context(hidden_adapters(model))

            return load_source(
                self.source, self.dtype, output_layer=self.output_layer, distribute=prepare
            )


def write_model(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Write weights (sharded safetensors), config and generation config into a new folder.

    Args:
        weights: whole tensors, on any device, each with memory of its own, by the names of
            `stored_weights`. Tied ones are listed once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        {name: weight.detach().contiguous() for name, weight in weights.items()}, folder
    )
    elements: Counter[torch.dtype] = Counter()
    for weight in weights.values():
        elements[weight.dtype] += weight.numel()
    config = type(model.config)(**model.config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = elements.most_common(1)[0][0]  # biases of routers are wider
    config.save_pretrained(folder)
    # Published configs have other names for some fields, such as num_experts: transformers writes
    # only those to which it maps them, which other readers do not know.
    file = folder / "config.json"
    described = json.loads(file.read_bytes())
    for field in fields(config):
        if field.name in config.attribute_map:
            described[field.name] = getattr(config, field.name)
    file.write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn errors of a load into `ModelLoadError`, but not a lack of memory, which may pass.

    A damaged file, or the model's own code, can raise any exception.
    """
    try:
        yield
    except (ModelLoadError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error)
        if "can't allocate memory" in text:
            raise
        if "trust_remote_code" in text:
            text = (
                "it has code of its own: read the code, then set spec.model.trustRemoteCode: true"
            )
        elif "attn_implementation" in text:
            text = (
                "its attention is not implemented as asked for: set "
                f"spec.model.attnImplementation: eager ({text.splitlines()[0]})"
            )
        elif not isinstance(error, OSError | ValueError | ImportError):
            text = f"{type(error).__name__}: {text}"
        raise ModelLoadError(
            f"no causal language model could be loaded from {path}: {text}"
        ) from error


def _name_of(model: PreTrainedModel, layer: torch.nn.Module | None) -> str:
    return next((name for name, module in model.named_modules() if module is layer), "")
