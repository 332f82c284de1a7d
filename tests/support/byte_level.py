"""A tokenizer as real models have, trained on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level_tokenizer(corpus: str, chat_template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with ChatML's special tokens.

    The tokens of a text depend on the text beside it.
    """
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [corpus * 3], BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
    )
