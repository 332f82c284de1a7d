"""The strategy `megatron`. Only `strategy` and what it imports need Megatron-Core."""
