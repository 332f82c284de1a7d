"""Write sums.jsonl: every sum of two numbers up to five, with solutions in GSM8K's format.

python examples/math/make_sums.py > examples/math/sums.jsonl
"""

import json
from collections.abc import Iterator

DIGITS = range(6)


def sums() -> Iterator[dict[str, str]]:
    """Yield one item for each sum."""
    for a in DIGITS:
        for b in DIGITS:
            yield {"question": f"{a}+{b}=", "answer": f"{a} and {b} make {a + b}.\n#### {a + b}"}


if __name__ == "__main__":
    for item in sums():
        print(json.dumps(item))
