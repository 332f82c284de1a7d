"""docs/messages.md lists every message of the code, each with what to do."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from agenticrun_api import Reason
from docs import messages

ROOT = Path(__file__).parents[3]


@cache
def found() -> messages.Catalogue:
    """Return all messages. Not at import: collection would read them in each process."""
    return messages.catalogue()


def test_the_committed_page_is_what_the_generator_writes() -> None:
    assert (ROOT / "docs/messages.md").read_text() == messages.page(found()), "run: make generate"


def test_every_message_has_a_section() -> None:
    assert found().unplaced == [], (
        "name them in tools/docs/messages.yaml: in a section, or internal"
    )


def test_every_message_says_what_to_do() -> None:
    assert found().silent == [], (
        "say it in the message, or in tools/docs/messages.yaml under advice"
    )


def test_there_is_no_advice_on_a_message_that_no_code_prints() -> None:
    assert found().stale == [], "remove it from tools/docs/messages.yaml"


def test_every_reason_is_in_troubleshooting() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    missing = [reason for reason in Reason if not re.search(rf"\b{reason}\b", page)]
    assert missing == []


@pytest.mark.parametrize(
    "text",
    [
        "metadata.name: must be at most 45",
        "KubeRayMissing: the Kubernetes cluster does not serve RayClusters",
        "trainEnvs.groupFilter … refused … groups for one batch",
        "there is no AgenticRun … in this namespace",
        "the API key is not the token of this episode",
        "spec.suspend: a suspended run does not train",
        "raise the quota, or use another namespace",
        "entropy: the policy has collapsed",
        "CodeUnavailable: cannot install spec.code.pip",
        "cannot fetch … from …: user or password in the Secret are wrong",
    ],
)
def test_messages_of_all_kinds_are_found(text: str) -> None:
    page = messages.page(found()).replace("`: `", ": ")
    assert text in page


def test_states_of_a_healthy_run_are_not_among_the_faults() -> None:
    faults, _, healthy = messages.page(found()).partition(
        "### Conditions and events: nothing is wrong"
    )
    for text in ("DriverRunning: attempt … runs as Ray job", "PodsReady: all … pods are ready"):
        assert (text in faults, text in healthy) == (False, True)


MODULE = '''
"""A module."""
LIMIT = 8
WORDS = {"403": "give the token the right", "404": "correct the name"}


def choose(size):
    if size > LIMIT:
        return f"size is {size}: lower it"
    return "size is missing: set it"


def check(size, name):
    advice = "leave it out, or name another"
    raise Invalid("spec.size", f"must be at most {LIMIT}, not {size}; {advice}")
    raise Invalid("spec.name", f"{name} {'ends' if size else 'begins'} with a dash: rename it")
    raise ValueError(choose(size))
    raise ValueError(str(name))
    if cause := WORDS.get(name):
        raise ValueError(f"{cause}: {name}")
    hint = next((f": {said}" for word, said in WORDS.items() if word in name), "")
    raise ValueError(f"cannot fetch {name}{hint} ({size})")
    log.warning("nobody reads this line")
    draft.event(Reason.NODE_LOST, f"node {name!r} is gone")
'''


def test_texts_are_followed_through_variables_constants_and_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "ROOT", tmp_path)
    (tmp_path / "module.py").write_text(MODULE)
    arguments: dict[str, list[int | str]] = {"Invalid": [0, 1], "event": [0, 1], "warning": [0]}
    printed = messages.printed_in(tmp_path / "module.py", arguments)
    assert sorted(text for item in printed for text in item.texts) == [
        "NodeLost: node … is gone",
        "cannot fetch … (…)",
        "cannot fetch …: correct the name (…)",
        "cannot fetch …: give the token the right (…)",
        "correct the name: …",
        "give the token the right: …",
        "size is missing: set it",
        "size is …: lower it",
        "spec.name: … begins with a dash: rename it",
        "spec.name: … ends with a dash: rename it",
        "spec.size: must be at most 8, not …; leave it out, or name another",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rows must be at least 2, not …", True),
        ("no worker image is configured: set images.worker", True),
        ("the engine has failed", False),
        ("the server returned tokens without a version", False),
    ],
)
def test_a_message_says_what_to_do(text: str, says: bool) -> None:
    assert messages.Message(text).says_what_to_do is says
