"""spec.code.pip with the real uv, and an index of wheels that the test makes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agenticrun_api.spec import PipCode
from agenticrun_workers.code import CodeError
from agenticrun_workers.code.packages import install
from git_server import serving
from wheels import wheel

NO_CACHE = Path("/nowhere")


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        REQUESTS.append(self.path)
        super().do_GET()


REQUESTS: list[str] = []
"""Paths that the index was asked for."""


@pytest.fixture(autouse=True)
def uv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put uv on the PATH, as it is in the worker image."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The folder of a package index, and its address."""
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for name in ("UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "index"
    folder.mkdir()
    handler = partial(_Handler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    REQUESTS.clear()
    with serving(server):
        yield folder, f"http://127.0.0.1:{server.server_port}/"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "packages"
    made.mkdir()
    return made


def imported(target: Path, program: str) -> str:
    """Run a program with the packages as the Ray container has them."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_packages_are_installed_with_what_they_need_and_what_the_image_has_stays(
    index: tuple[Path, str], target: Path, tmp_path: Path
) -> None:
    """The index has no numpy and no PyYAML."""
    folder, url = index
    wheel(folder, "chess_game", "1.2", "board_game>=2", "numpy>=1", "PyYAML")
    wheel(folder, "board_game", "2.0")
    pip = PipCode(requirements=["chess-game"], index_url=url)
    for _ in range(2):  # a second try replaces the first
        (target / "stale").mkdir()
        installed = install(pip, target, tmp_path / "no code", NO_CACHE)
    assert installed == ["board_game==2.0", "chess_game==1.2"]
    names = {path.name for path in target.iterdir()} - {"__pycache__", ".lock"}
    assert names == {
        *("board_game.py", "board_game-2.0.dist-info"),
        *("chess_game.py", "chess_game-1.2.dist-info"),
    }
    shown = "import chess_game, board_game, numpy; print(chess_game.VERSION, numpy.__file__)"
    version, numpy = imported(target, shown).split()
    assert version == "1.2"
    assert not Path(numpy).is_relative_to(target)
    found = "import importlib.metadata as m; print(m.version('chess-game'), m.version('numpy'))"
    assert imported(target, found).startswith("1.2 ")


def test_requirements_come_from_a_file_of_the_code_too(
    index: tuple[Path, str], target: Path, tmp_path: Path
) -> None:
    folder, url = index
    wheel(folder, "chess_game", "1.2")
    wheel(folder, "board_game", "2.0")
    code = tmp_path / "code"
    code.mkdir()
    pip = PipCode(requirements=["board-game"], requirements_file="needs.txt", index_url=url)
    with pytest.raises(CodeError, match=r"the code has no file needs.txt \(spec.code.pip.req"):
        install(pip, target, code, NO_CACHE)
    (code / "needs.txt").write_text("# mine\nchess_game==1.2\n")
    assert install(pip, target, code, NO_CACHE) == ["board_game==2.0", "chess_game==1.2"]


def test_a_path_is_below_the_folder_of_the_code(target: Path, tmp_path: Path) -> None:
    made = wheel(tmp_path / "code", "chess_game", "1.2")
    pip = PipCode(requirements=[f"./chess-game/{made.name}"])
    assert install(pip, target, tmp_path / "code", NO_CACHE) == ["chess_game==1.2"]


def test_hashes_are_checked(index: tuple[Path, str], target: Path, tmp_path: Path) -> None:
    folder, url = index
    made = wheel(folder, "chess_game", "1.2")
    right = hashlib.sha256(made.read_bytes()).hexdigest()
    line = f"chess_game==1.2 --hash=sha256:{right}"
    pip = PipCode(requirements=[line], index_url=url)
    assert install(pip, target, tmp_path, NO_CACHE) == ["chess_game==1.2"]
    wrong = PipCode(requirements=[line.replace(right, "0" * 64)], index_url=url)
    with pytest.raises(CodeError, match=r"`chess[-_]game==1\.2`\s+cause: Hash mismatch"):
        install(wrong, target, tmp_path, NO_CACHE)


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("no-such-game==3", "no-such-game was not found in the package registry"),
        ("board_game==9", "there is no version of board-game==9"),
        ("numpy==1.0", r"you require numpy==1.0 and numpy==\d"),
        ("chess_game>1 >", "chess_game>1 >"),
    ],
)
def test_a_failure_names_the_requirement(
    index: tuple[Path, str], target: Path, tmp_path: Path, requirement: str, message: str
) -> None:
    folder, url = index
    wheel(folder, "board_game", "2.0")
    with pytest.raises(CodeError, match=message):
        install(PipCode(requirements=[requirement], index_url=url), target, tmp_path, NO_CACHE)


def test_a_cache_saves_the_downloads_of_later_pods(
    index: tuple[Path, str], target: Path, tmp_path: Path
) -> None:
    folder, url = index
    wheel(folder, "chess_game", "1.2")
    cache = tmp_path / "cache"
    cache.mkdir()
    pip = PipCode(requirements=["chess_game"], index_url=url)
    downloads = []
    for _ in range(2):
        install(pip, target, tmp_path, cache)
        downloads.append(sum(path.endswith(".whl") for path in REQUESTS))
    assert downloads[0] == downloads[1] > 0
    assert (target / "chess_game.py").exists()


def test_the_password_of_the_index_is_in_no_message(
    index: tuple[Path, str],
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = index[1].replace("http://", "http://me:s3cr3t-t0ken@")
    monkeypatch.setenv("UV_INDEX_URL", url)
    for requirement in ("no-such-game", "numpy==1.0"):
        with pytest.raises(CodeError) as caught:
            install(PipCode(requirements=[requirement]), target, tmp_path, NO_CACHE)
        assert "s3cr3t" not in str(caught.value)
    assert REQUESTS, "that index was asked"
