"""Language models: where they come from, their tokenizers, adapters and devices.

Nothing is imported here: `source` and `tokenizer` serve processes that never import torch.
"""
