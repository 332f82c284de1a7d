"""`agenticrun check-model`: test a model's chat template, tokenizer, config and files."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agenticrun_api.spec import ModelSpec
from agenticrun_workers.cli.check_env import table
from agenticrun_workers.cli.common import Changes, give_up, load, look_in
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.findings import Finding, Report, failed, not_checked, ok, warning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agenticrun_workers.models.source import ModelSource


def check_model(
    path: Annotated[
        str | None,
        typer.Argument(help="Folder of a Hugging Face model, or its name on the Hub."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            help="Check the model of this run instead, with its chat template and arguments.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    changes: Changes = None,
) -> None:
    """Check a model: chat template, tool calls, reasoning, tokens, files, engines and trainers.

    Config and tokenizer suffice. Exit codes: 0 no check failed, 1 a check failed, 64 the run cannot
    be used.
    """
    if (path is None) == (file is None):
        raise typer.BadParameter("name a model, or a run with --file")
    if file is None:
        if not path:
            raise typer.BadParameter("the path of the model is empty")
        model = ModelSpec(path=path)
    else:
        look_in(file.parent)
        model = load(file, changes).spec.model
        if model.path is None:
            give_up(f"{file}: the run makes its model (spec.model.initialize): nothing to check")
    from agenticrun_workers.models.source import ModelSource

    try:
        source = ModelSource.of(model)
    except InvalidConfig as error:
        give_up(str(error))
    report = findings(source)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table(report, str(model.path)))
    raise typer.Exit(int(report.failed))


def findings(source: ModelSource) -> Report:
    """Return one finding per property of a model."""
    from agenticrun_workers.agents import ChatFormat
    from agenticrun_workers.agents.chat_checks import check_chat
    from agenticrun_workers.models.tokenizer import load_tokenizer

    found: dict[str, Finding] = {}
    try:
        tokenizer = load_tokenizer(source.tokenizer())
        found["vocabulary"] = _vocabulary(source, tokenizer)
        chat = ChatFormat(tokenizer)
    except InvalidConfig as error:
        found["chat template" if found else "tokenizer"] = failed(error.message, error.path)
    else:
        found |= check_chat(chat).findings
    found["weights"] = _weights(source)
    found["tied embeddings"] = _tied_embeddings(source)
    found |= _acceptance(source)
    return Report(found)


def _vocabulary(source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Return the sizes; `load_tokenizer` refuses tokens that the model does not know."""
    known = _config_file(source).get("vocab_size")
    tokens = f"{len(tokenizer)} tokens"
    return ok(f"{tokens}; the model knows {known}" if isinstance(known, int) else tokens)


def _weights(source: ModelSource) -> Finding:
    from agenticrun_workers.models.folder import ModelLoadError, check_weights

    folder = Path(str(source.path))
    if not folder.is_dir():
        return not_checked("the model is on the Hub")
    if not [*folder.glob("*.safetensors*"), *folder.glob("*.bin*")]:
        return not_checked("no weights here: config and tokenizer are checked")
    try:
        check_weights(str(folder))
    except ModelLoadError as error:
        return failed(str(error), "correct the folder")
    return ok("complete")


def _tied_embeddings(source: ModelSource) -> Finding:
    """Compare `tie_word_embeddings` with the weights that are listed."""
    config = _config_file(source)
    tied = config.get("tie_word_embeddings")
    index = Path(str(source.path), "model.safetensors.index.json")
    names: set[str] = set()
    if index.exists():
        names = set(json.loads(index.read_bytes()).get("weight_map", {}))
    found = "not named in config.json" if tied is None else ("tied" if tied else "not tied")
    if tied and "lm_head.weight" in names:
        return warning(
            "tied, but the weights hold lm_head.weight, which is not loaded",
            "set tie_word_embeddings: false in config.json if it differs from the embedding",
        )
    return ok(found)


def _config_file(source: ModelSource) -> dict[str, Any]:
    file = Path(str(source.path), "config.json")
    try:
        described = json.loads(file.read_bytes())
    except (OSError, ValueError):  # `load_config` says what is wrong with it
        return {}
    return described if isinstance(described, dict) else {}


def _acceptance(source: ModelSource) -> dict[str, Finding]:
    """Return which engines and trainers accept the model, by its config."""
    import torch
    from transformers import AutoModelForCausalLM

    from agenticrun_workers.inference.transformers.parity import OTHER_ENGINES, refuse_states
    from agenticrun_workers.models.folder import ModelLoadError
    from agenticrun_workers.models.heads import UnsupportedModel
    from agenticrun_workers.models.pretrained import MAKING, load_config
    from agenticrun_workers.trainer.megatron.architecture import Architecture

    trust = source.trust_remote_code
    try:
        config = load_config(str(source.path), trust_remote_code=trust)
    except ModelLoadError as error:
        refusal = failed(str(error), "train another model")
        return {"engines": refusal, "trainers": refusal}
    try:
        with MAKING, torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust)
        refuse_states(model)
    except UnsupportedModel as error:
        others = OTHER_ENGINES.get(config.model_type, ("vllm", "sglang"))
        engines = (
            ok(f"{' and '.join(others)}; not transformers: {error}")
            if others
            else failed(str(error), "train another model")
        )
    except Exception as error:  # of a model's own code, too
        refusal = failed(f"no model can be made from config.json: {error}", "correct it")
        return {"engines": refusal, "trainers": refusal}
    else:
        engines = ok(f"transformers; vllm and sglang if they know the type {config.model_type}")
    trainers = _accepted("megatron", lambda: Architecture.of(config), UnsupportedModel)
    return {"engines": engines, "trainers": ok(f"fsdp2, deepspeed, {trainers}")}


def _accepted(name: str, check: Callable[[], object], refusal: type[Exception]) -> str:
    try:
        check()
    except refusal as error:
        return f"not {name}: {error}"
    return name
