"""Pure maths of the algorithms: NumPy on the driver, torch in the trainer."""

from agenticrun_workers.algorithms.batch_advantages import Advantages, AdvantageSpec, batch_advantages

__all__ = ["AdvantageSpec", "Advantages", "batch_advantages"]
