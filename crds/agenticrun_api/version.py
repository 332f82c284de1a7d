"""The version of AgenticRun and the registry of its images, written only here.

The build reads it, `make generate` copies it into the chart, and images, which hold the code
without package metadata, import it. Between two releases it is the next one's with `-dev`.
"""

__version__ = "0.2.0"

REGISTRY = ""
"""Host and path of this version's images and chart. Empty in a source tree, for which no registry
has images; the release workflow sets it (tools/release.py registry)."""


def is_supported(other: str) -> bool:
    """Return True if another part of AgenticRun may have this version: one minor version apart.

    Args:
        other: a version as `<major>.<minor>...`.
    """
    try:
        (major, minor), (our_major, our_minor) = (
            tuple(int(part) for part in version.split(".")[:2]) for version in (other, __version__)
        )
    except ValueError:
        return False
    return major == our_major and abs(minor - our_minor) <= 1
