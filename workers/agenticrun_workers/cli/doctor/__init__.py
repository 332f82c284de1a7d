"""`agenticrun doctor`: say what a machine, a cluster or a run lacks, and how to fix it.

`machine` and `cluster` look at a place for runs of any kind; `run_here` of `machine` and
`placement`, `references` at one run.
"""

from agenticrun_workers.cli.doctor.command import doctor

__all__ = ["doctor"]
