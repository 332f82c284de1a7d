"""Findings of `agenticrun check-env` and `agenticrun doctor`, with the advice for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but not as well as it could."""
    FAILED = "FAILED"
    NOT_CHECKED = "-"
    """Does not apply, or an earlier check failed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    verdict: Verdict
    found: str = ""
    advice: str = ""
    """Advice on how to fix it."""


def ok(found: str = "") -> Finding:
    return Finding(Verdict.OK, found)


def warning(found: str, advice: str) -> Finding:
    return Finding(Verdict.WARNING, found, advice)


def failed(found: str, advice: str) -> Finding:
    return Finding(Verdict.FAILED, found, advice)


def not_checked(why: str) -> Finding:
    return Finding(Verdict.NOT_CHECKED, why)


@dataclass(frozen=True)
class Report:
    """The findings of all checks, by name and in order."""

    findings: Mapping[str, Finding]

    @property
    def failed(self) -> bool:
        return any(finding.verdict is Verdict.FAILED for finding in self.findings.values())

    def of(self, verdict: Verdict) -> dict[str, Finding]:
        """Return the findings with this verdict."""
        return {
            name: finding for name, finding in self.findings.items() if finding.verdict is verdict
        }

    def assert_ok(self, *, warnings: bool = True) -> None:
        """Raise `AssertionError` with every failure; `warnings=False` forbids warnings too."""
        bad = self.of(Verdict.FAILED) | ({} if warnings else self.of(Verdict.WARNING))
        lines = [f"{name}: {finding.found}. {finding.advice}" for name, finding in bad.items()]
        assert not lines, "\n".join(lines)
