"""Functions that a config names without a file of their own."""

import sys
from typing import Any

import pytest

HERE = "outside_test_agent"


@pytest.fixture
def agent_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a function known as `run: module:function`."""

    def known(function: Any, name: str = "run") -> str:
        module = sys.modules.get(HERE) or type(sys)(HERE)
        monkeypatch.setitem(sys.modules, HERE, module)
        setattr(module, name, function)
        return f"{HERE}:{name}"

    return known
