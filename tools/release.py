"""Prepare a release: the version in the chart, the release notes, the registry of the images.

Version and registry stand in `crds/agenticrun_api/version.py`. Everything else that shows one is
written or checked by this program: `make generate` runs `chart`, the release workflow the rest.
Standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = ROOT / "crds/agenticrun_api/version.py"
CHANGELOG = ROOT / "CHANGELOG.md"
CHART = ROOT / "charts/agenticrun/Chart.yaml"
VALUES = ROOT / "charts/agenticrun/values.yaml"


class NotReady(Exception):
    """The repository does not describe this release."""


def version() -> str:
    """Return the version that every artefact of this source tree carries."""
    return _constant("__version__")


def registry() -> str:
    """Return host and path of the images of this source tree; empty if no registry has them."""
    return _constant("REGISTRY")


def _constant(name: str) -> str:
    found = re.search(rf'^{name} = "(.*)"$', VERSION_FILE.read_text(), re.MULTILINE)
    if found is None:
        raise NotReady(f'{VERSION_FILE}: no line {name} = "..."')
    return found.group(1)


def with_version(chart: str, version: str) -> str:
    """Return Chart.yaml's text with this version of the chart and of what it installs."""
    return re.sub(r"^(version|appVersion): .*$", rf"\1: {version}", chart, flags=re.MULTILINE)


def with_registry(text: str, registry: str) -> str:
    """Return the text of version.py or values.yaml with another registry.

    Args:
        text: The file's text.
        registry: Host and path of the images, such as `ghcr.io/owner/agenticrun`.

    Raises:
        NotReady: The text has no line for the registry.
    """
    changed, lines = re.subn(
        r'^(REGISTRY = |registry: )".*"$', rf'\1"{registry}"', text, flags=re.MULTILINE
    )
    if lines != 1:
        raise NotReady(f"{lines} lines name the registry: there should be one")
    return changed


def notes(changelog: str, version: str) -> str:
    """Return the dated section of one version, without its heading.

    Raises:
        NotReady: the changelog has no such section, or the section is empty.
    """
    section = re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        changelog,
        re.MULTILINE | re.DOTALL,
    )
    if section is None or not section.group(1).strip():
        raise NotReady(f'CHANGELOG.md: write a section "## {version} - <date>"')
    return section.group(1).strip() + "\n"


def write_chart() -> None:
    """Write version and registry into the chart."""
    CHART.write_text(with_version(CHART.read_text(), version()))
    VALUES.write_text(with_registry(VALUES.read_text(), registry()))


def main() -> int:
    """Run one command; 1 when the repository is not ready."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    commands.add_parser("chart", help="write version and registry into the chart")
    commands.add_parser("notes", help="print the changelog's section of the version")
    check = commands.add_parser(
        "check", help="refuse a tag that is not the version or has no notes"
    )
    check.add_argument("tag")
    images = commands.add_parser("registry", help="set the registry of images and chart")
    images.add_argument("registry")
    arguments = parser.parse_args()
    try:
        if arguments.command == "version":
            print(version())
        elif arguments.command == "chart":
            write_chart()
        elif arguments.command == "notes":
            print(notes(CHANGELOG.read_text(), version()), end="")
        elif arguments.command == "check":
            if arguments.tag != f"v{version()}":
                raise NotReady(
                    f"tag {arguments.tag} is not v{version()}, the version of {VERSION_FILE.name}"
                )
            notes(CHANGELOG.read_text(), version())
        else:
            VERSION_FILE.write_text(with_registry(VERSION_FILE.read_text(), arguments.registry))
            write_chart()
    except NotReady as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
