"""Prompt templates with {placeholders}."""

from __future__ import annotations

import re
from collections.abc import Sequence

NUMBERS = ("turn", "turns_left", "max_tokens", "step_count", "history_length")
"""Placeholders that become digits."""


def check_template(template: str, fields: Sequence[str]) -> None:
    """Raise `ValueError` if a template asks for anything but these fields."""
    try:
        template.format_map(dict.fromkeys(fields, ""))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"template {template!r}: {error!r}; known fields are {', '.join(fields)}"
        ) from error


def fixed_text(template: str) -> list[str]:
    """What a template writes itself: its text without the placeholders, and digits if it writes numbers."""
    text = re.sub(r"\{(\w*)\}", "", template)
    writes_numbers = any(f"{{{name}}}" in template for name in NUMBERS)
    return [text, *"0123456789"] if writes_numbers else [text]
