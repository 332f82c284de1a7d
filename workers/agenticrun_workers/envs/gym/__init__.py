"""Environments of gymnasium, as text."""

from agenticrun_workers.envs.gym.gymnasium_env import GymnasiumEnv

__all__ = ["GymnasiumEnv"]
