"""The embedded engine: any causal language model of transformers, inside the actor's process."""
