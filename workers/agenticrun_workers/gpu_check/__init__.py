"""`make gpu-check`: what only a GPU can prove, with the functions that runs use.

Each stage runs in a process of its own and writes one JSON file; `stages.py` says how a stage
reports, `__main__.py` is the command. Nothing here imports Ray, so it also runs on a machine that
has only PyTorch, transformers and a few small wheels (docs/gpus.md).
"""
