"""YAML values, and how kubectl reads them."""

from __future__ import annotations

READ_BY_KUBECTL: list[tuple[str, object]] = [
    *((text, 1000) for text in ("1e3", "1.0e3", "1e+3", "1E3", "1_000", "1000.0", "1.e3")),
    *((text, text) for text in ("2026-01-04", "2026-01-04T10:00:00Z", "1:30", "12:30:45")),
    *((text, text) for text in ("=", "1e999", "0o9", "_1", "tRue", ".", "._5", ".inf2", "1,5")),
    *((text, True) for text in ("y", "Y", "yes", "on", "TRUE")),
    *((text, False) for text in ("n", "NO", "Off", "false")),
    *((text, None) for text in ("~", "null", "NULL", "")),
    ("0o14", 12),
    ("017", 15),
    ("08", 8),
    ("0b101", 5),
    ("-0x1F", -31),
    ("+12", 12),
    ("1.", 1),
    ("-0.0", 0),
    ("1e18", 10**18),
    ("1e21", 1e21),
    (".5", 0.5),
    ("-.5", -0.5),
    ("01.5", 1.5),
    ("1_0.5", 10.5),
    ("9223372036854775807", 2**63 - 1),
    ("-9223372036854775808", -(2**63)),
    ("'1e3'", "1e3"),
    ("!!str 12", "12"),
    ("!!float 12", 12),
    ("{y: 1, 2: 2, 007: 3, x: 4}", {"true": 1, "2": 2, "7": 3, "x": 4}),
]
"""Output of `kubectl annotate --local -f FILE a=b -o json` (v1.32)."""
