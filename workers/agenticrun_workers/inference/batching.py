"""Which requests are computed in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable

from agenticrun_workers.inference.in_flight import Running


def in_batches(requests: Iterable[Running], max_tokens: int, *, alone: bool) -> list[list[Running]]:
    """Requests in flight, split so that rows of one batch have about the same number of tokens to compute.

    Args:
        max_tokens: most tokens (with padding) of one batch of several requests.
        alone: each request is a batch of its own.
    """
    if alone:
        return [[running] for running in requests]
    batches: list[list[Running]] = []
    for running in sorted(requests, key=lambda r: (r.pending, r.slot)):
        last = batches[-1] if batches else []
        fits = bool(last) and (len(last) + 1) * running.pending <= max_tokens
        if (
            fits
            and running.pending <= 2 * last[0].pending
            and (running.pending == 1) == (last[0].pending == 1)
        ):
            last.append(running)
        else:
            batches.append([running])
    return [sorted(batch, key=lambda r: r.slot) for batch in batches]
