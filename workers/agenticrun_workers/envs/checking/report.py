"""What `check_env` finds: one finding per check, and the report of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It trains, but not as well as it could."""
    FAILED = "FAILED"
    NOT_CHECKED = "-"
    """There is nothing of the kind to check, or an earlier failure is in the way."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    verdict: Verdict
    found: str = ""
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True)
class Report:
    """What all checks found, by name and in order."""

    findings: Mapping[str, Finding]

    @property
    def failed(self) -> bool:
        return any(finding.verdict is Verdict.FAILED for finding in self.findings.values())

    def of(self, verdict: Verdict) -> dict[str, Finding]:
        """The findings of one kind."""
        return {
            name: finding for name, finding in self.findings.items() if finding.verdict is verdict
        }

    def assert_ok(self, *, warnings: bool = True) -> None:
        """Raise `AssertionError` with all that failed; `warnings: False` makes warnings failures too."""
        bad = self.of(Verdict.FAILED) | ({} if warnings else self.of(Verdict.WARNING))
        lines = [f"{name}: {finding.found}. {finding.advice}" for name, finding in bad.items()]
        assert not lines, "\n".join(lines)


def ok(found: str = "") -> Finding:
    return Finding(Verdict.OK, found)


def warning(found: str, advice: str) -> Finding:
    return Finding(Verdict.WARNING, found, advice)


def failed(found: str, advice: str) -> Finding:
    return Finding(Verdict.FAILED, found, advice)


def not_checked(why: str) -> Finding:
    return Finding(Verdict.NOT_CHECKED, why)
