"""A process that compares answers by mathematics; it imports nothing of this package.

It reads one JSON line [gold, answer] and writes one JSON line [verdict, readable]: whether they are
equal, and whether an answer was found. A comparison that computes for too long ends the process by
a signal, in whatever code it is: sympy's loops and C code react to nothing else. The process ends
when its input ends, as it does with its parent.

    python -P checker.py SECONDS BYTES
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys


def main() -> None:
    """Answer line by line, each within SECONDS of computing time and all within BYTES of memory."""
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits are off
    from math_verify import parse, verify

    verify(
        parse("1/2", parsing_timeout=None), parse("0.5", parsing_timeout=None), timeout_seconds=None
    )  # loads what it needs
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            found = parse(answer, parsing_timeout=None)
            right = verify(
                parse(f"\\boxed{{{gold}}}", parsing_timeout=None), found, timeout_seconds=None
            )
            said = [bool(right), bool(found)]
        except Exception:  # what a policy writes may break any parser: it is a wrong answer
            said = [False, False]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
