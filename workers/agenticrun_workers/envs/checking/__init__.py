"""`check_env` checks that an environment keeps the promises of the protocol.

For tests of environments, and for `agenticrun check-env`.
"""

from agenticrun_workers.envs.checking.run_checks import check_env
from agenticrun_workers.findings import Finding, Report, Verdict

__all__ = ["Finding", "Report", "Verdict", "check_env"]
