"""Export of a checkpoint's policy as a Hugging Face folder.

One process does it, without Ray, no matter how many ranks saved the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from agenticrun_api import AgenticRun
from agenticrun_workers.driver.checkpoints import check_sizes, read_manifest, steps_in
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.models.tokenizer import load_tokenizer
from agenticrun_workers.rollout.env_worker import describe_envs
from agenticrun_workers.storage import DamagedFile, Folder, UnusableStorage
from agenticrun_workers.trainer.rank import ACTOR


def export_checkpoint(run: AgenticRun, checkpoint: str, folder: Path) -> int:
    """Write weights, config and tokenizer of a checkpoint's policy into `folder`.

    Args:
        run: the run that saved the checkpoint; its model and environments define the architecture.
        checkpoint: path or URI of a checkpoint (step-N), or of a folder of checkpoints, of which
            the newest is taken.

    Returns:
        the step of the checkpoint.

    Raises:
        InvalidConfig: there is no complete checkpoint, or it is damaged or of another model.
    """
    from agenticrun_workers.trainer.checkpoint import CheckpointMismatch
    from agenticrun_workers.trainer.strategies import build_policy_to_export

    found, step = _find(checkpoint)
    source = first_model(run)
    strategy = build_policy_to_export(run.spec.pipeline, source)
    try:
        strategy.load(str(found / ACTOR))
    except (CheckpointMismatch, DamagedFile) as error:
        raise InvalidConfig("--checkpoint", f"{found}: {error}") from error
    strategy.export_folder(folder, {})
    load_tokenizer(source.tokenizer()).save_pretrained(folder)
    return step


def first_model(run: AgenticRun) -> ModelSource:
    """Return the initial model of the run; random weights are made here, as a trainer would."""
    from agenticrun_workers.models.initialize import make_model_files

    model, pipeline = run.spec.model, run.spec.pipeline
    source = ModelSource.of(model)
    if model.initialize is None:
        return source
    return source.with_files(
        make_model_files(model.initialize, describe_envs(pipeline), pipeline.sequence_length)
    )


def _find(checkpoint: str) -> tuple[Folder, int]:
    """Return the folder of a complete checkpoint, and its step."""
    try:
        folder = Folder(checkpoint)
        for candidate in [folder, *steps_in(folder)]:
            if (manifest := read_manifest(candidate)) is not None:
                check_sizes(candidate, manifest)
                return candidate, manifest.step
    except (UnusableStorage, DamagedFile) as error:
        raise InvalidConfig("--checkpoint", str(error)) from error
    raise InvalidConfig(
        "--checkpoint", f"{checkpoint} holds no complete checkpoint, and no folder step-N with one"
    )
