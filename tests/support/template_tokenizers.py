"""The chat templates of TRL's wheel, each with a byte-level tokenizer of its special tokens.

TRL is not imported: only the files of its package are read.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agenticrun_workers.types import ChatSettings

BAR = "\N{FULLWIDTH VERTICAL LINE}"
SPECIAL = re.compile(
    rf"<[|{BAR}][^<>{{}}\n]*?[|{BAR}]>|</?[a-z_]+>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]"
    r"|<\|\"\|>|<\w+_of_turn>"
)
"""Special tokens as they are written in templates."""
STARTS = ("<bos>", "<|begin_of_text|>", f"<{BAR}begin▁of▁sentence{BAR}>", "<BOS_TOKEN>", "<s>")
ENDS = (
    "<|return|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eot|>",
    "<|END_OF_TURN_TOKEN|>", f"<{BAR}end▁of▁sentence{BAR}>", "<|end|>", "<end_of_utterance>",
    "<|user|>", "</s>",
)  # fmt: skip
"""Ends of a sequence: a tokenizer has the first one that its template writes."""


def templates() -> dict[str, str]:
    """Return the chat templates by name, without those that TRL has changed for its training."""
    found = find_spec("trl")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = [file for folder in folders for file in Path(folder).glob("chat_templates/*.jinja")]
    assert files, "trl 1.16 is missing: run make setup"
    return {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted(files)
        if not file.stem.endswith("_training")
    }


def template_tokenizer(name: str, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of the template's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    written = set(SPECIAL.findall(template))
    start = next((token for token in STARTS if token in written), STARTS[-1])
    end = next((token for token in ENDS if token in written), ENDS[-1])
    core.add_special_tokens(sorted({*written, start, end}))
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=start, eos_token=end, chat_template=template
    )
    made.chat_settings = ChatSettings(model=name)
    return made
