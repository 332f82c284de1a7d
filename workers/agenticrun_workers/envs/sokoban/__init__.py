"""Sokoban: push every box onto a target, as text."""

from agenticrun_workers.envs.sokoban.sokoban import Sokoban

__all__ = ["Sokoban"]
