"""Progress for users, on stderr: stdout is for scripts (kubeconfig path, JSON, exports)."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LIVE_SECONDS = 0.5  # refresh of the live line on a terminal
_LOG_SECONDS = 20.0  # between lines where output goes to a file

_started = time.monotonic()
_lock = threading.Lock()


def say(message: str) -> None:
    """Print one line with the seconds since the program started."""
    with _lock:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(
            f"{clear}[{time.monotonic() - _started:6.1f}s] {message}", file=sys.stderr, flush=True
        )


@contextmanager
def progress(title: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Show that `title` is under way, with its elapsed time and `detail()`, during the block.

    On a terminal it rewrites one line. Elsewhere it adds a line now and then: logs stay short.
    """
    begun = time.monotonic()
    done = threading.Event()

    def show() -> None:
        terminal = sys.stderr.isatty()
        while not done.wait(_LIVE_SECONDS if terminal else _LOG_SECONDS):
            line = f"{title}: {time.monotonic() - begun:.0f} s {detail()}".rstrip()
            if terminal:
                with _lock:
                    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            else:
                say(line)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    say(f"{title}: done in {time.monotonic() - begun:.1f} s")
