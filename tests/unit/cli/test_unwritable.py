"""Places that cannot be written are named in one line, without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from agenticrun_workers.cli import main
from agenticrun_workers.cli.common import check_writable

COMMAND = [sys.executable, "-c", "from agenticrun_workers.cli import main; main()"]
EXAMPLE = Path(__file__).parents[3] / "examples/frozen-lake.yaml"


def test_an_output_folder_that_cannot_be_made_is_refused() -> None:
    told = subprocess.run(
        [*COMMAND, "run", "-f", str(EXAMPLE), "-o", "/proc/nope"], capture_output=True, text=True
    )
    assert (told.returncode, told.stderr) == (
        64,
        "--output: /proc/nope cannot be made: No such file or directory\n",
    )


def test_a_folder_below_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(typer.Exit):
        check_writable(tmp_path / "file/run")
    assert capsys.readouterr().err.endswith("file/run cannot be made: Not a directory\n")
    check_writable(tmp_path / "new/run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("known", [True, False])
def test_any_command_names_a_place_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], known: bool
) -> None:
    def write() -> None:
        raise OSError(28 if known else 5, "No space left on device", "/full/report.html")

    monkeypatch.setattr(sys.modules[main.__module__], "app", write)
    with pytest.raises(SystemExit if known else OSError) as caught:
        main()
    if known:
        assert caught.value.args == (64,)
        message = "/full/report.html cannot be written: No space left on device"
        assert capsys.readouterr().err == f"{message}\n"
