"""Weights in motion: from the trainers' export to the engines' parameters.

Read `sync` first: it follows one sync from top to bottom. torch is imported only by the modules
that read or write tensors (`export`, `collective`, `lora_merge`); the driver imports the others.
"""
