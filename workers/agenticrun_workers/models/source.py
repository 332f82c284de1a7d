"""Sources of a run's models: a folder, a name on the hub, or files that the run made itself.

Imports neither torch nor transformers: the driver and the actors of engine servers import it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agenticrun_api import Pipeline
from agenticrun_api.spec import ModelSpec
from agenticrun_workers.errors import InvalidConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class ChatSource:
    """Fields of `spec.model` about the chat template."""

    template: str | None = None
    """Text of the template that replaces the model's."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    format: str = "auto"
    earlier_reasoning: Literal["Keep", "Template"] = "Keep"

    @classmethod
    def of(cls, model: ModelSpec) -> ChatSource:
        """Read the source from the spec. Raises `InvalidConfig` if its template cannot be read."""
        template = model.chat_template
        if template is not None and not re.search(r"\{[{%]", template):
            template = _read_template(template)
        return cls(template, model.chat_template_args, model.chat_format, model.earlier_reasoning)


@dataclass(frozen=True)
class TokenizerSource:
    """A model folder or hub name that this pod can read, or files of a model made by the run."""

    path: str | None = None
    files: dict[str, bytes] | None = None
    trust_remote_code: bool = False
    chat: ChatSource = ChatSource()


@dataclass(frozen=True, slots=True)
class TokenizerCorpus:
    """Text that a task tokenizer must cover."""

    vocabulary: tuple[str, ...]
    """Words that the environments declare; each becomes one token."""
    texts: tuple[str, ...]
    """Texts to cut into words (`words_of`)."""


@dataclass(frozen=True)
class ModelSource:
    """A folder or hub name that every pod can read, or the files of a model made by the run.

    Files travel to the pods as bytes: all pods have the same model, whatever versions of libraries
    they have.
    """

    path: str | None = None
    files: dict[str, bytes] | None = None
    dtype: str = "float32"
    attn_implementation: str = "sdpa"
    """The trainer's."""
    trust_remote_code: bool = False
    chat: ChatSource = ChatSource()

    @classmethod
    def of(cls, model: ModelSpec) -> ModelSource:
        """Read the source from the spec. Files of a model to be made are added by `with_files`.

        Raises:
            InvalidConfig: `chatTemplate` is neither a template nor a file here.
        """
        return cls(
            expand_home(model.path),
            None,
            model.dtype,
            model.attn_implementation,
            model.trust_remote_code,
            ChatSource.of(model),
        )

    @contextmanager
    def folder(self) -> Iterator[str]:
        """Provide the path to load from: the model's own, or a scratch folder with the files."""
        if self.path is not None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="agenticrun-model-") as folder:
            self.write(Path(folder))
            yield folder

    def write(self, folder: Path) -> None:
        """Write the files of a model made by the run into `folder`."""
        for name, content in (self.files or {}).items():
            (folder / name).write_bytes(content)

    def with_files(self, files: dict[str, bytes]) -> ModelSource:
        return replace(self, files=files)

    def tokenizer(self) -> TokenizerSource:
        """Return the source of the tokenizer alone, which is what an env worker needs."""
        files = self.files and {
            name: data for name, data in self.files.items() if not name.endswith(WEIGHT_SUFFIXES)
        }
        return TokenizerSource(self.path, files, self.trust_remote_code, self.chat)


@dataclass(frozen=True)
class ModelSources:
    """The source of each model of a run."""

    policy: ModelSource
    reference: ModelSource
    critic: ModelSource

    @classmethod
    def of(cls, policy: ModelSource, pipeline: Pipeline) -> ModelSources:
        """Start reference and critic from the policy, unless the run names other models."""

        def other(path: str | None) -> ModelSource:
            return policy if path is None else replace(policy, path=expand_home(path), files=None)

        return cls(
            policy,
            other(pipeline.reference.path if pipeline.reference else None),
            other(pipeline.critic.path if pipeline.critic else None),
        )


def _read_template(path: str) -> str:
    """Return the text of a file, relative to here or to PYTHONPATH (`spec.code`)."""
    folders = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for folder in folders:
        file = Path(folder, os.path.expanduser(path))
        try:
            if file.is_file():
                return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidConfig(
                "spec.model.chatTemplate", f"{file} cannot be read: {error}"
            ) from error
    raise InvalidConfig(
        "spec.model.chatTemplate",
        f"{path[:200]!r} is no file here and no template (without {{{{ or {{%): write the text of "
        "a Jinja template, or the path of a file that the driver can read",
    )


def expand_home(path: str | None) -> str | None:
    """Replace a `~` at the beginning by the home folder, as a shell does for an argument."""
    return path and os.path.expanduser(path)


def local_folder(folder: str) -> Path:
    """Return a local folder of the model, downloading it from the hub if it is not cached.

    Raises:
        InvalidConfig: it is neither a folder here nor available from the hub.
    """
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
            "spec.model.path",
            f"{folder} is no folder here and cannot be downloaded from the hub (a gated model "
            f"needs spec.huggingFace.secretName): {error}",
        ) from error
