"""Language models: tiny ones made from a config, and ones loaded from a folder."""

from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.loading import ModelLoadError, load_model, load_tokenizer
from agenticrun_workers.models.task_tokenizer import build_task_tokenizer, words_of

__all__ = [
    "InitializeSpec",
    "ModelLoadError",
    "build_task_tokenizer",
    "initialize_model",
    "load_model",
    "load_tokenizer",
    "words_of",
]
