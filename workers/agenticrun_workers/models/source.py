"""Where the policy's first weights and its tokenizer come from."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agenticrun_api import Pipeline
from agenticrun_api.spec import ModelSpec
from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.tokenizer import TokenizerSource

WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class ModelSource:
    """A folder or hub name that every pod can read, or the files of a model that the run made itself.

    Files travel to the pods as bytes, so that all pods have the same model whatever their libraries' versions.
    """

    path: str | None = None
    files: dict[str, bytes] | None = None
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    """The trainer's."""
    trust_remote_code: bool = False

    @classmethod
    def of(cls, model: ModelSpec) -> ModelSource:
        """As the run says; without the files of a model that is still to be made."""
        return cls(
            model.path, None, model.dtype, model.attn_implementation, model.trust_remote_code
        )

    @contextmanager
    def folder(self) -> Iterator[str]:
        """What to load from: the path, or a scratch folder with the files in it."""
        if self.path is not None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="agenticrun-model-") as folder:
            self.write(Path(folder))
            yield folder

    def write(self, folder: Path) -> None:
        """Put the files there, of a model that the run made itself."""
        for name, content in (self.files or {}).items():
            (folder / name).write_bytes(content)

    def with_files(self, files: dict[str, bytes]) -> ModelSource:
        return replace(self, files=files)

    def tokenizer(self) -> TokenizerSource:
        """What an env worker needs of it."""
        files = self.files and {
            name: data for name, data in self.files.items() if not name.endswith(WEIGHT_SUFFIXES)
        }
        return TokenizerSource(self.path, files, self.trust_remote_code)


@dataclass(frozen=True)
class ModelSources:
    """Where each model of a run comes from."""

    policy: ModelSource
    reference: ModelSource
    critic: ModelSource

    @classmethod
    def of(cls, policy: ModelSource, pipeline: Pipeline) -> ModelSources:
        """Reference and critic begin as the policy, unless the run names others."""

        def other(path: str | None) -> ModelSource:
            return policy if path is None else replace(policy, path=path, files=None)

        return cls(
            policy,
            other(pipeline.reference.path if pipeline.reference else None),
            other(pipeline.critic.path if pipeline.critic else None),
        )


def local_folder(folder: str) -> Path:
    """The folder itself, or that of a model on the hub, downloaded where it is not in the cache yet. Raises `InvalidConfig`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if Path(folder).is_dir():
        return Path(folder)
    try:
        return Path(
            snapshot_download(
                folder,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.py", "*.jinja"],
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
        raise InvalidConfig(
            "spec.model.path", f"{folder} is no folder here and cannot be had from the hub: {error}"
        ) from error
