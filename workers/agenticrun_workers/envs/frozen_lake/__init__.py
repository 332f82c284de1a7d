"""FrozenLake: find the way over the ice to the goal, as text."""

from agenticrun_workers.envs.frozen_lake.frozen_lake import FrozenLake

__all__ = ["FrozenLake"]
