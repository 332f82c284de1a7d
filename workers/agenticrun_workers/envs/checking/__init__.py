"""`check_env` checks that an environment keeps the promises of the protocol.

For tests of environments, and for `agenticrun check-env`.
"""

from agenticrun_workers.envs.checking.checklist import Finding, Verdict
from agenticrun_workers.envs.checking.run_checks import Report, check_env

__all__ = ["Finding", "Report", "Verdict", "check_env"]
