"""A folder on a hub on localhost, and what a user reads if the hub does not take it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from agenticrun_workers.models.hub import HubError, create_repository, push
from fake_hub import TOKEN, FakeHub, fake_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with the environment of a user that may write there."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "policy"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "model.safetensors").write_bytes(bytes(range(256)))
    return made


def test_a_folder_becomes_one_commit_of_a_private_repository(hub: FakeHub, folder: Path) -> None:
    create_repository("me/lake", private=True)
    create_repository("me/lake", private=False)  # exists: it stays private
    address = push(folder, "me/lake", "lake: the policy after 5 steps")
    assert address.startswith(f"{hub.url}/me/lake")
    assert hub.private == {"me/lake": True}
    assert hub.messages == ["lake: the policy after 5 steps"]
    assert hub.files["me/lake"] == {file.name: file.read_bytes() for file in folder.iterdir()}


def test_without_a_token_nothing_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="no token for the Hub: create one with write access"):
        create_repository("me/lake", private=True)
    assert hub.private == {}


def test_a_token_that_is_wrong_or_may_not_write_is_named(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match=r"answers 403 for other/lake: .* may not write there"):
        create_repository("other/lake", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(HubError, match=r"answers 401 for me/lake: .*the token is not valid"):
        create_repository("me/lake", private=True)


def test_a_name_that_no_repository_can_have_is_refused(hub: FakeHub) -> None:
    with pytest.raises(HubError, match="write owner/name"):
        create_repository("me/lake/5 steps", private=True)
    assert hub.private == {}


def test_a_hub_that_fails_or_is_away_is_told_apart(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.refuses_commits = 422
    with pytest.raises(HubError, match=r"answers 422 for me/lake: .*not now.*try again later"):
        push(folder, "me/lake", "x")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9 cannot be reached: .*HF_ENDPOINT"):
        create_repository("me/lake", private=True)
