"""Inference engines: token ids in, token ids and log-probs out.

It imports neither torch nor an engine: driver and env workers need only the actor and the client.
"""

from agenticrun_workers.inference.engine import (
    EngineError,
    EngineStartError,
    EngineStats,
    InferenceEngine,
    InvalidRequest,
    SupportsBroadcast,
    UnusableModel,
)

__all__ = [
    "EngineError",
    "EngineStartError",
    "EngineStats",
    "InferenceEngine",
    "InvalidRequest",
    "SupportsBroadcast",
    "UnusableModel",
]
