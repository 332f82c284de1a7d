"""Inference engines: token ids in, token ids and log-probs out."""

from agenticrun_workers.inference.engine import (
    EngineError,
    EngineStartError,
    EngineStats,
    InferenceEngine,
    InvalidRequest,
    TakesBroadcast,
    UnusableModel,
)
from agenticrun_workers.inference.transformers.engine import TransformersEngine

__all__ = [
    "EngineError",
    "EngineStartError",
    "EngineStats",
    "InferenceEngine",
    "InvalidRequest",
    "TakesBroadcast",
    "TransformersEngine",
    "UnusableModel",
]
