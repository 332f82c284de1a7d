"""The policy's tokenizer: loaded from its model, or built for one task.

No torch is imported, so that an env worker starts fast and stays small.

A task tokenizer has one token for every word of the task's texts, and no unknown token. Text is cut
into the longest known words from left to right. Text that no word covers is an error: a policy that
cannot see a part of its observation would look like one that cannot learn.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agenticrun_workers.errors import InvalidConfig
from agenticrun_workers.models.folder import ModelLoadError, check_tokenizer, check_vocabulary
from agenticrun_workers.models.source import TokenizerSource
from agenticrun_workers.types import ChatSettings

log = logging.getLogger(__name__)

PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}"
    "{{ tool.function.name + '(' }}"
    "{{ ((tool.function.parameters or {}).properties or {}) | join(', ') + ')\n' }}"
    "{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""ChatML with one token per role, without line breaks: `<|user|>...<|end|><|assistant|>...`.

A tool is shown as `add(a, b)`, because every text needs words in the vocabulary.
"""


def load_tokenizer(source: TokenizerSource) -> PreTrainedTokenizerBase:
    """Load a tokenizer with the run's chat template, and note `ChatSettings` on it.

    Raises:
        InvalidConfig: there is none, it has no chat template, or the template does not read an
            argument.
    """
    if source.path is None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in (source.files or {}).items():
                (Path(folder) / name).write_bytes(content)
            return _with_chat(_fast(Path(folder)), source)
    try:
        check_tokenizer(source.path)
        tokenizer = _from_path(source.path, source.trust_remote_code)
        unused = check_vocabulary(
            source.path,
            tokenizer.get_vocab(),
            f"{tokenizer.chat_template}{tokenizer.bos_token}{tokenizer.eos_token}",
            tokenizer.pad_token,
        )
    except ModelLoadError as error:
        raise InvalidConfig("spec.model.path", str(error)) from error
    except Exception as error:  # tokenizers raises plain ones for a broken file
        raise InvalidConfig(
            "spec.model.path",
            f"no tokenizer could be loaded from {source.path}: {type(error).__name__}: {error}",
        ) from error
    if not (tokenizer.chat_template or source.chat.template):
        raise InvalidConfig(
            "spec.model.path",
            f"the tokenizer of {source.path} has no chat template: use an instruction-tuned model, "
            "or set spec.model.chatTemplate",
        )
    if unused:
        log.warning(
            "the model of %s does not know %s: texts with such a token end their episodes",
            source.path,
            ", ".join(unused),
        )
    return _with_chat(tokenizer, source)


def _with_chat(
    tokenizer: PreTrainedTokenizerBase, source: TokenizerSource
) -> PreTrainedTokenizerBase:
    """Give a tokenizer the run's chat template.

    The arguments become part of the template. So all that render it use them: agents of a user, and
    whatever serves an exported checkpoint.
    """
    chat = source.chat
    template: Any = chat.template or tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [str(template)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    for name in chat.args:
        if name not in words:
            snake_case = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
            close = difflib.get_close_matches(snake_case, words, 3, 0.7)
            raise InvalidConfig(
                f"spec.model.chatTemplateArgs.{name}",
                f"the chat template of {source.path or 'the model'} does not read it: "
                + (f"it has {', '.join(close)}" if close else "leave it out"),
            )
    head = "".join(
        f"{{% set {name} = {_jinja_literal(value)} %}}" for name, value in chat.args.items()
    )
    if isinstance(template, dict):
        tokenizer.chat_template = {key: head + text for key, text in template.items()}
    else:
        tokenizer.chat_template = head + template
    settings = ChatSettings(
        chat.format,
        _generation_ends(source),
        source.path or "",
        chat.template is not None,
        head,
        drops_reasoning=chat.earlier_reasoning == "Template",
    )
    setattr(tokenizer, "chat_settings", settings)  # noqa: B010 (no attribute of the class)
    return tokenizer


def _jinja_literal(value: Any) -> str:
    """Return a JSON value as a Jinja expression."""
    if isinstance(value, dict):
        items = (f"{_jinja_literal(key)}: {_jinja_literal(v)}" for key, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_jinja_literal, value))}]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _generation_ends(source: TokenizerSource) -> tuple[int, ...]:
    """Return the tokens that end an answer by the model's generation_config."""
    if source.path is None:
        return ()
    from transformers.utils import cached_file

    # A model on the hub may have none, and a machine without a network may not have it cached.
    file = cached_file(
        source.path,
        "generation_config.json",
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is None:
        return ()
    try:
        ends = json.loads(Path(file).read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidConfig(
            "spec.model.path", f"{file} cannot be read ({error}): download it again"
        ) from error
    return tuple(end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int)


def build_task_tokenizer(words: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer of the special tokens and `words`, in this order and without duplicates.

    `decode(encode(text)) == text` for every text that it accepts. Encoding text with a piece that
    is no word raises an error.
    """
    specials = [PAD, END_OF_TURN, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*specials, *words]))}
    core = Tokenizer(models.WordLevel(vocabulary))
    longest_first = sorted(vocabulary, key=len, reverse=True)
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, longest_first))), behavior="isolated"
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=specials[2:],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def words_of(text: str) -> list[str]:
    """Cut a text into words (with the space before them) and single other characters."""
    return list(dict.fromkeys(re.findall(r" ?[^\W_]+|[\s\S]", text)))


def _from_path(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load by AutoTokenizer, which imports torch, only where the plain fast tokenizer cannot do."""
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
