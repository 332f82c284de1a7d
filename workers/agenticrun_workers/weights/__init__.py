"""Weights on their way from trainers to engines: buckets in shared memory, their checksums, and what changed between two versions.

A bucket is a safetensors file with some whole parameters. Its place in the file system and its layout stay for the whole attempt;
each sync overwrites it. torch is imported where tensors are written and read only: the driver imports the rest.
"""
