"""Prepare a release: the version in the chart, the release notes, the chart's image names.

The version stands in `crds/agenticrun_api/version.py`. Everything else that shows one is written or
checked by this program: `make generate` runs `chart`, the release workflow runs the rest.
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
    found = re.search(r'^__version__ = "(.+)"$', VERSION_FILE.read_text(), re.MULTILINE)
    if found is None:
        raise NotReady(f'{VERSION_FILE}: no line __version__ = "..."')
    return found.group(1)


def with_version(chart: str, version: str) -> str:
    """Return Chart.yaml's text with this version of the chart and of what it installs."""
    return re.sub(r"^(version|appVersion): .*$", rf"\1: {version}", chart, flags=re.MULTILINE)


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


def with_registry(values: str, registry: str, version: str) -> str:
    """Return values.yaml's text with the image names of a registry as defaults.

    Args:
        values: The chart's values.yaml.
        registry: Host and path of the release's images, such as `ghcr.io/owner/agenticrun`.
        version: Tag of the images.

    Raises:
        NotReady: values.yaml has no longer the lines that this function replaces.
    """
    changes = {
        "  repository: agenticrun/operator\n": f"  repository: {registry}/operator\n",
        '  worker: ""\n': f'  worker: "{registry}/worker:{version}"\n',
        '    sglang: ""\n': f'    sglang: "{registry}/worker-sglang:{version}"\n',
        '    vllm: ""\n': f'    vllm: "{registry}/worker-vllm:{version}"\n',
    }
    for old, new in changes.items():
        if values.count(old) != 1:
            raise NotReady(f"values.yaml: the line {old.strip()!r} should occur once")
        values = values.replace(old, new)
    return values


def main() -> int:
    """Run one command; 1 when the repository is not ready."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    commands.add_parser("chart", help="write the version into Chart.yaml")
    commands.add_parser("notes", help="print the changelog's section of the version")
    check = commands.add_parser(
        "check", help="refuse a tag that is not the version or has no notes"
    )
    check.add_argument("tag")
    values = commands.add_parser("values", help="write a registry's image names into values.yaml")
    values.add_argument("registry")
    arguments = parser.parse_args()
    try:
        if arguments.command == "version":
            print(version())
        elif arguments.command == "chart":
            CHART.write_text(with_version(CHART.read_text(), version()))
        elif arguments.command == "notes":
            print(notes(CHANGELOG.read_text(), version()), end="")
        elif arguments.command == "check":
            if arguments.tag != f"v{version()}":
                raise NotReady(
                    f"tag {arguments.tag} is not v{version()}, the version of {VERSION_FILE.name}"
                )
            notes(CHANGELOG.read_text(), version())
        else:
            VALUES.write_text(with_registry(VALUES.read_text(), arguments.registry, version()))
    except NotReady as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
