"""The tokenizer of the policy, loaded without torch: an env worker starts fast and stays small."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agenticrun_workers.errors import InvalidConfig


@dataclass(frozen=True)
class TokenizerSource:
    """A model folder or hub name that this pod can read, or the files of one that the run made itself."""

    path: str | None = None
    files: dict[str, bytes] | None = None
    trust_remote_code: bool = False


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """The tokenizer. Raises `InvalidConfig` if there is none or it has no chat template."""
    if source.path is None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in (source.files or {}).items():
                (Path(folder) / name).write_bytes(content)
            return _fast(Path(folder))
    try:
        tokenizer = _from_path(source.path, source.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise InvalidConfig(
            "spec.model.path", f"no tokenizer could be loaded from {source.path}: {error}"
        ) from error
    if not tokenizer.chat_template:
        raise InvalidConfig(
            "spec.model.path",
            f"the tokenizer of {source.path} has no chat template: use an instruction-tuned model",
        )
    return tokenizer


def _from_path(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Through AutoTokenizer (which imports torch) only where the plain fast tokenizer will not do."""
    if (Path(path) / "tokenizer.json").exists() and not trust_remote_code:
        return _fast(Path(path))
    from transformers import AutoTokenizer

    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, trust_remote_code=trust_remote_code
    )
    return loaded


def _fast(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer
