"""Assertions of the shared suite show their values, as those of test modules do."""

import pytest

pytest.register_assert_rewrite(
    "engine_checks",
    "outside_agents",
    "sampling_conformance",
    "request_conformance",
    "update_conformance",
    "engine_conformance",
)
