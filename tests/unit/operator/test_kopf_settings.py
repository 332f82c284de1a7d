"""kopf starts and stops the operator; it must not end it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import kopf

from agenticrun_operator import handlers


def test_kopf_never_gives_up_a_request_of_its_own() -> None:
    settings = kopf.OperatorSettings()
    handlers.configure(settings)
    backoffs = settings.networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    for _ in ("the first request", "the second request"):
        assert sum(islice(backoffs, 10_000)) > 24 * 3600
