"""Math problems with one right answer, and the verifier that compares answers."""

from agenticrun_workers.envs.math.math_env import MathEnv, MathSingleStep
from agenticrun_workers.envs.math.verifier import (
    MathVerifier,
    Verdict,
    math_verify,
    reference_answer,
    shared_verifier,
)

__all__ = [
    "MathEnv",
    "MathSingleStep",
    "MathVerifier",
    "Verdict",
    "math_verify",
    "reference_answer",
    "shared_verifier",
]
