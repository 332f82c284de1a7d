"""A tokenizer for one task: every word of the task's texts is one token, and there is no unknown token.

Text is cut into the longest known words from left to right. What no word covers is an error, never a silent `unk`: a policy
that cannot see a part of its observation would look like one that cannot learn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""ChatML with one token per role and no line breaks: `<|user|>...<|end|><|assistant|>...<|end|>`."""


def build_task_tokenizer(words: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is the special tokens and these words (duplicates are dropped, order is kept).

    Encoding text with a piece that is no word raises. `decode(encode(text)) == text` for every text it accepts.
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
    """The pieces of a text: letters and digits with the space before them, or single other characters."""
    return list(dict.fromkeys(re.findall(r" ?[^\W_]+|[\s\S]", text)))
