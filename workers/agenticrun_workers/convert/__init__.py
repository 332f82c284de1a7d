"""Conversion of a ROLL AgenticConfig YAML to an AgenticRun, with a report about every field.

It imports nothing of ROLL.
"""

from agenticrun_workers.convert.converter import Conversion, as_yaml, compose, convert
from agenticrun_workers.convert.fields import ConvertError, Fate, Line

__all__ = ["Conversion", "ConvertError", "Fate", "Line", "as_yaml", "compose", "convert"]
