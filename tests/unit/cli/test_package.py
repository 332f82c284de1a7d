"""`agenticrun package`, as a user types it; what it finds, refuses and writes."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agenticrun_api import load_run
from agenticrun_api.names import IMAGE_CODE_DIR, ExitCode
from agenticrun_workers.cli import app
from agenticrun_workers.cli.local_code import PackagingError, find_local_code
from agenticrun_workers.cli.package import (
    HEADER,
    LIMIT,
    config_map,
    dockerfile,
    manifest_text,
    required_names,
    size,
)

ROOT = Path(__file__).parents[3]

ENV = """
from agenticrun_workers.envs import StepResult
from words import WORDS


class Own:
    instruction = "Say the word."

    def reset(self, seed, split):
        self.word = WORDS[seed % len(WORDS)]
        return f"{self.word} {split} {seed}"

    def step(self, action):
        metrics = {"action_is_valid": float(action in WORDS)}
        return StepResult("over", float(action == self.word), True, metrics=metrics)

    def valid_actions(self):
        return list(WORDS)
"""

RUN = """
apiVersion: agenticrun.dev/v1alpha1
kind: AgenticRun
metadata: {name: own}
spec:
  model: {initialize: {}}
  pipeline:
    maxSteps: 1
    rolloutBatchSize: 8
    evalSteps: 0
    envs:
      - {tag: A, type: "own_env:Own"}
    trainEnvs: {groups: 4, groupSize: 2, tags: [A]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a run, beside the current folder."""
    made = tmp_path / "own"
    made.mkdir()
    (made / "own_env.py").write_text(ENV)
    (made / "words.py").write_text('WORDS = ["hot", "cold", "up"]\n')
    (made / "run.yaml").write_text(RUN)
    current = tmp_path / "current"
    current.mkdir()
    monkeypatch.chdir(current)
    return made


def package(folder: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app,
        [
            *("package", "-f", str(folder / "run.yaml")),
            *("--seeds", "3", "--timeout", "120", *arguments),
        ],
    )
    return result.exit_code, result.output


CHECK = "agenticrun_workers.cli.package.check_copy"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check of the copy, which starts three programs, where it is not the subject."""
    monkeypatch.setattr(CHECK, lambda *_: iter(()))


def found(folder: Path, **changes: Any) -> dict[str, str]:
    """Files of the run in `folder`, with another pipeline, and who needs them."""
    run = yaml.safe_load(RUN)
    run["spec"]["pipeline"].update(changes)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return find_local_code(load_run(folder / "run.yaml"), folder).files


def envs(**fields: Any) -> list[dict[str, Any]]:
    return [{"tag": "A", "type": "own_env:Own", **fields}]


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(PackagingError) as caught:
        found(folder, **changes)
    return str(caught.value)


def test_a_config_map_has_the_modules_that_the_run_needs_and_nothing_else(folder: Path) -> None:
    (folder / "unused.py").write_text("1 / 0")
    (folder / "notes.txt").write_text("not for the cluster")
    code, output = package(folder)
    assert code == 0, output
    written = Path("own-code.yaml").read_text()
    assert yaml.safe_load(written) == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "own-code"},
        "data": {name: (folder / name).read_text() for name in ("own_env.py", "words.py")},
    }
    assert "  words.py: |" in written
    for line in (
        "own_env.py (spec.pipeline.envs[0].type)",
        "words.py (own_env.py:3)",
        "A: check-env passed",
        "    code: {configMap: own-code}",
        "  kubectl apply --server-side -f own-code.yaml",
    ):
        assert line in output


@pytest.mark.usefixtures("unchecked")
def test_a_run_that_names_a_config_map_gets_that_one_in_its_namespace(folder: Path) -> None:
    named = RUN.replace("{name: own}", "{name: own, namespace: lab}")
    (folder / "run.yaml").write_text(named + "  code: {configMap: mine}\n")
    code, output = package(folder, "-o", "mine.yaml")
    assert (code, "now write" in output) == (0, False), output
    written = yaml.safe_load(Path("mine.yaml").read_text())
    assert written["metadata"] == {"name": "mine", "namespace": "lab"}


def test_an_image_context_has_packages_with_subfolders_and_requirements(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "words.py").unlink()
    (folder / "words" / "more").mkdir(parents=True)
    (folder / "words" / "__init__.py").write_text("from words.more.all import WORDS\n")
    (folder / "words" / "more" / "all.py").write_text('WORDS = ["hot", "cold"]\n')
    (folder / "requirements.txt").write_text("emoji==2.15.0\n")
    code, output = package(folder)
    assert code == ExitCode.INVALID_CONFIG
    assert "words/__init__.py, words/more/all.py: a ConfigMap has no subfolders. Use --image" in (
        output
    )
    for checked in (True, False):  # the second time in place of the first
        if not checked:
            monkeypatch.setattr(CHECK, lambda *_: iter(()))
        (folder / "own_env.py").chmod(0o600)
        code, output = package(folder, "--image", "context", "--base", "registry/worker:1")
        assert code == 0, output
        (Path("context") / "code" / "stale.py").write_text("")
    (Path("context") / "code" / "stale.py").unlink()
    files = {
        path.relative_to("context").as_posix(): path
        for path in Path("context").rglob("*")
        if path.is_file()
    }
    assert sorted(files) == [
        "Dockerfile",
        "code/own_env.py",
        "code/words/__init__.py",
        "code/words/more/all.py",
        "requirements.txt",
    ]
    assert files["code/own_env.py"].stat().st_mode & 0o777 == 0o644
    assert files["Dockerfile"].read_text() == dockerfile("registry/worker:1", packages=True)
    assert "image: REGISTRY/own-code:1" in output
    assert "docker build -t REGISTRY/own-code:1 context" in output


def test_the_dockerfile_has_two_lines_without_packages() -> None:
    assert dockerfile("worker:1", packages=False) == (
        f"{HEADER}FROM worker:1\nCOPY code/ {IMAGE_CODE_DIR}/\n"
    )


def test_the_worker_image_has_what_the_dockerfile_uses() -> None:
    worker = (ROOT / "images/worker/Dockerfile").read_text()
    assert f"PYTHONPATH={IMAGE_CODE_DIR} " in worker
    assert "cp /tmp/uv/bin/uv /usr/local/bin/uv" in worker
    assert "locks/workers.txt uv.toml /opt/agenticrun/" in worker
    assert "\nUSER 1000:1000\n" in worker
    assert "\nopenai==" in (ROOT / "locks/workers.txt").read_text()


@pytest.mark.usefixtures("unchecked")
def test_the_image_begins_with_the_releases_worker_of_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agenticrun_workers.cli.package.REGISTRY", "ghcr.io/us")
    change = ("--set", "pipeline.actorInfer.strategy.name=vllm")
    assert package(folder, "--image", "context", *change)[0] == 0
    assert "\nFROM ghcr.io/us/worker-vllm:" in Path("context/Dockerfile").read_text()


def test_without_a_release_the_image_must_be_named(folder: Path) -> None:
    code, output = package(folder, "--image", "context")
    assert (code, Path("context").exists()) == (64, False)
    assert "--base registry.example.org/agenticrun/worker:" in " ".join(output.split())


def test_a_file_that_the_copy_lacks_is_found_here(folder: Path) -> None:
    (folder / "words.txt").write_text("hot cold")
    (folder / "words.py").write_text(
        "from pathlib import Path\n"
        "WORDS = (Path(__file__).parent / 'words.txt').read_text().split()\n"
    )
    code, output = package(folder)
    assert code == ExitCode.FAILED
    assert "own_env:Own: importing own_env failed: FileNotFoundError" in output
    assert "The packaged copy fails, alone in an empty folder" in output
    assert not Path("own-code.yaml").exists()


def test_a_module_imported_by_a_computed_name_is_missed_here_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    (folder / "own_env.py").write_text(
        ENV.replace(
            "from words import WORDS",
            "import importlib\nWORDS = importlib.import_module('wo' + 'rds').WORDS",
        )
    )
    code, output = package(folder)
    assert (code, "No module named 'words'" in output) == (1, True), output


def test_a_check_that_fails_leaves_nothing_written(folder: Path) -> None:
    (folder / "own_env.py").write_text(ENV.replace("list(WORDS)", "['other']"))
    code, output = package(folder)
    assert (code, "FAILED" in output) == (1, True), output
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("option", "name"), [("-o", "file.yaml"), ("--image", "folder"), ("--image", "image")]
)
def test_files_of_others_are_left_alone(folder: Path, option: str, name: str) -> None:
    (Path("folder")).mkdir()
    (Path("image")).mkdir()
    for file in ("file.yaml", "folder/file.txt", "image/Dockerfile"):
        Path(file).write_text("FROM mine")
    code, output = package(folder, option, name)
    assert (code, f"{name} is not from agenticrun package" in output) == (2, True)
    assert Path("folder/file.txt").read_text() == "FROM mine"


@pytest.mark.parametrize(
    "arguments", [("--base", "worker:1"), ("--image", "context", "-o", "file.yaml")]
)
def test_options_that_contradict_each_other_are_refused(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    assert package(folder, *arguments)[0] == 2


def test_agents_rewards_filters_commands_and_data_are_found(folder: Path) -> None:
    for module in ("agent", "reward", "sieve", "program", "called"):
        (folder / f"{module}.py").write_text("")
    (folder / "items.jsonl").write_text("{}")
    (folder / "prompt.txt").write_text("")
    files = found(
        folder,
        envs=[
            *envs(agent={"type": "agent:Agent"}, dataset={"path": "*.jsonl"}),
            {
                "tag": "B",
                "type": "sokoban",
                "agent": {"type": "outside", "config": {"command": ["python", "-m", "program"]}},
            },
            {
                "tag": "C",
                "type": "sokoban",
                "agent": {"type": "outside", "config": {"run": "called:play"}},
            },
        ],
        rewards=[{"name": "r", "type": "reward:right", "config": {"prompt": "prompt.txt"}}],
        trainEnvs={
            "groups": 6,
            "groupSize": 2,
            "tags": ["A", "B", "C"],
            "groupFilter": {"type": "sieve:sieve"},
        },
        rolloutBatchSize=12,
    )
    assert files == {
        "own_env.py": "spec.pipeline.envs[0].type",
        "words.py": "own_env.py:3",
        "agent.py": "spec.pipeline.envs[0].agent.type",
        "items.jsonl": "spec.pipeline.envs[0].dataset.path",
        "program.py": "spec.pipeline.envs[1].agent.config.command[2]",
        "called.py": "spec.pipeline.envs[2].agent.config.run",
        "reward.py": "spec.pipeline.rewards[0].type",
        "prompt.txt": "spec.pipeline.rewards[0].config.prompt",
        "sieve.py": "spec.pipeline.trainEnvs.groupFilter.type",
    }


def test_losses_estimators_and_trackers_are_found(folder: Path) -> None:
    for name in ("losses", "estimators", "trackers"):
        (folder / f"{name}.py").write_text("import words\n")
    (folder / "keys.txt").write_text("x")
    run = yaml.safe_load(RUN)
    run["spec"]["pipeline"]["algorithm"] = {"name": "estimators:own", "pgVariant": "losses:own"}
    run["spec"]["tracking"] = {"custom": "trackers:Own", "customConfig": {"names": "keys.txt"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    needed = find_local_code(load_run(folder / "run.yaml"), folder).files
    assert needed["estimators.py"] == "spec.pipeline.algorithm.name"
    assert needed["losses.py"] == "spec.pipeline.algorithm.pgVariant"
    assert needed["trackers.py"] == "spec.tracking.custom"
    assert needed["keys.txt"] == "spec.tracking.customConfig.names"
    run["spec"]["tracking"] = {"custom": "absent:Own"}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    with pytest.raises(PackagingError, match=r"spec\.tracking\.custom: there is no absent\.py"):
        find_local_code(load_run(folder / "run.yaml"), folder)


def test_scripts_of_commands_are_found_with_what_they_import(folder: Path) -> None:
    (folder / "play.py").write_text("import json\nimport words\n")
    (folder / "tools").mkdir()
    (folder / "tools" / "again.py").write_text("import beside\nimport own_env\n")
    (folder / "tools" / "beside.py").write_text("")
    assert found(
        folder,
        envs=[
            {"tag": tag, "type": "sokoban", "agent": {"type": "outside", "config": config}}
            for tag, config in (
                ("A", {"command": ["python", "play.py"]}),
                ("B", {"command": ["python", "tools/again.py"]}),
            )
        ],
    ) == {
        "play.py": "spec.pipeline.envs[0].agent.config.command[1]",
        "words.py": "play.py:2",
        "tools/again.py": "spec.pipeline.envs[1].agent.config.command[1]",
        "tools/beside.py": "tools/again.py:1",
        "own_env.py": "tools/again.py:2",
    }


def test_imports_of_imports_cycles_and_relative_imports_are_followed(folder: Path) -> None:
    (folder / "words.py").write_text("import own_env\nfrom deep.inner import x")
    (folder / "deep").mkdir()
    (folder / "deep" / "inner.py").write_text("from . import sister\nimport last")
    (folder / "deep" / "sister.py").write_text("")
    (folder / "deep" / "data.json").write_text("{}")
    (folder / "deep" / "__pycache__").mkdir()
    (folder / "deep" / "__pycache__" / "inner.pyc").write_text("")
    (folder / "last.py").write_text("def f():\n    import random, os.path")
    assert sorted(found(folder)) == [
        *("deep/data.json", "deep/inner.py", "deep/sister.py"),
        *("last.py", "own_env.py", "words.py"),
    ]


def test_a_folder_of_data_does_not_hide_an_installed_package(folder: Path) -> None:
    (folder / "own_env.py").write_text("import yaml")
    (folder / "yaml").mkdir()
    (folder / "yaml" / "helper.py").write_text("")
    assert list(found(folder)) == ["own_env.py"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"type": "nowhere:Env"},
            "spec.pipeline.envs[0].type: there is no nowhere.py in {folder}, and no package "
            "nowhere is installed: correct the name, or move the module there",
        ),
        (
            {"agent": {"type": "outside", "config": {"run": "nowhere:play"}}},
            "spec.pipeline.envs[0].agent.config.run: there is no nowhere.py",
        ),
        (
            {"dataset": {"path": "../outside.jsonl"}},
            "spec.pipeline.envs[0].dataset.path: ../outside.jsonl lies outside of {folder}: move",
        ),
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    (folder.parent / "outside.jsonl").write_text("{}")
    assert message.format(folder=folder) in refused(folder, envs=envs(**fields))


def test_an_import_of_a_file_outside_of_the_folder_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = folder.parent / "outside_helper.py"
    helper.write_text("")
    monkeypatch.syspath_prepend(folder.parent)
    (folder / "words.py").write_text("WORDS = []\nimport outside_helper")
    message = refused(folder)
    assert message.startswith(
        f"words.py:2 needs outside_helper, which is {helper}, outside of {folder}: move it"
    )
    run = load_run(folder / "run.yaml")
    assert "words.py" in find_local_code(run, folder, {"outside-helper"}).files
    assert "outside_helper" not in sys.modules


def test_a_module_that_is_not_python_is_refused_with_its_line(folder: Path) -> None:
    (folder / "words.py").write_text("WORDS = []\nimport = 3")
    assert refused(folder).startswith("words.py:2: not Python: invalid syntax")


def test_a_run_without_own_code_is_refused(folder: Path) -> None:
    (folder / "run.yaml").write_text(RUN.replace('"own_env:Own"', "sokoban"))
    code, output = package(folder)
    assert (code, "names no module and no data file" in output) == (64, True)


@pytest.mark.usefixtures("unchecked")
def test_packages_that_the_worker_image_lacks_are_warned_of(folder: Path) -> None:
    (folder / "words.py").write_text(
        "import yaml, pytest\nWORDS = ['a', 'b']\ndef f():\n    import absent_package"
    )
    code, output = package(folder)
    assert code == 0, output
    assert "words.py:1 imports pytest, which the worker image does not have" in output
    assert "words.py:4 imports absent_package, which the worker image does not have" in output
    assert "imports yaml" not in output
    (folder / "requirements.txt").write_text("absent_package\n")
    for options in ((), ("--image", "context", "--base", "worker:1")):
        code, output = package(folder, *options)
        assert (code, "absent_package" in output) == (0, False), output
        assert "imports pytest" in output
    changes = ("--set", "code.pip.requirements=[pytest]")
    assert "imports pytest" not in package(folder, *changes)[1]


@pytest.mark.usefixtures("unchecked")
def test_a_config_map_has_the_requirements_and_the_run_installs_them(folder: Path) -> None:
    (folder / "requirements.txt").write_text("emoji==2.15.0\n")
    code, output = package(folder)
    assert code == 0, output
    wanted = "    code: {configMap: own-code, pip: {requirementsFile: requirements.txt}}"
    assert f"run.yaml\n  spec:\n{wanted}\nand run\n" in output
    data = yaml.safe_load(Path("own-code.yaml").read_text())["data"]
    assert data["requirements.txt"] == "emoji==2.15.0\n"
    (folder / "run.yaml").write_text(f"{RUN}{wanted[2:]}\n")
    assert "\nnow run\n  kubectl apply" in package(folder)[1]


@pytest.mark.usefixtures("unchecked")
def test_a_run_with_code_of_another_kind_is_told_to_replace_it(folder: Path) -> None:
    git = ("--set", "code.git.url=https://host.example/mine")
    code, output = package(folder, *git)
    assert code == 0, output
    assert "run.yaml, in place of spec.code\n  spec:\n    code: {configMap: own-code}" in output


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", set()),
        ("Emoji_Data==2.15.0  # comment\n\n# more\n", {"emoji-data"}),
        ("a[x]>=1 ; python_version > '3'\nb @ https://host/b.whl", {"a", "b"}),
        ("a==1 \\\n    --hash=sha256:00\n--index-url https://host", {"a"}),
    ],
)
def test_names_of_requirements(text: str, names: set[str]) -> None:
    assert required_names(text) == names


@pytest.mark.parametrize(
    "line", ["-r base.txt", "-c base.txt", "-e .", "./a.whl", "../a", "/a.whl", "file:///a.whl"]
)
def test_requirements_in_other_files_are_refused(line: str) -> None:
    with pytest.raises(PackagingError, match="refers to another file"):
        required_names(f"a==1\n{line}\n")


NAMES = st.from_regex(r"[a-z]{1,8}\.(py|bin)", fullmatch=True)


@given(st.dictionaries(NAMES, st.binary(max_size=50) | st.text(max_size=50).map(str.encode)))
def test_the_manifest_has_every_byte_of_every_file(contents: dict[str, bytes]) -> None:
    read = yaml.safe_load(manifest_text(config_map("own", None, contents)))
    kept = {name: text.encode() for name, text in read.get("data", {}).items()}
    kept |= {name: base64.b64decode(text) for name, text in read.get("binaryData", {}).items()}
    assert kept == contents


@given(st.lists(st.integers(0, LIMIT // 2), min_size=1, max_size=4), st.booleans())
def test_the_limit_is_one_mebibyte_of_content(sizes: list[int], binary: bool) -> None:
    byte = b"\xff" if binary else b"a"
    contents = {f"f{index}.py": byte * count for index, count in enumerate(sizes)}
    if sum(sizes) <= LIMIT:
        config_map("own", None, contents)
        contents["rest.py"] = byte * (LIMIT - sum(sizes))
        config_map("own", None, contents)
        contents["one.py"] = byte
    with pytest.raises(PackagingError) as caught:
        config_map("own", None, contents)
    message = str(caught.value)
    assert f"the files have {sum(map(len, contents.values()))} bytes" in message
    assert all(f"{len(content):>10} {name}" in message for name, content in contents.items())
    assert "use --image" in message


@pytest.mark.parametrize("name", ["with space.py", "größe.py", "..hidden.py", "x" * 254])
def test_names_that_cannot_be_keys_are_refused(name: str) -> None:
    with pytest.raises(PackagingError, match="Rename the files, or use --image"):
        config_map("own", None, {name: b""})


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (LIMIT, "1.00 MiB"),
        (LIMIT - 1, "1024.0 KiB"),
    ],
)
def test_sizes_as_people_read_them(count: int, text: str) -> None:
    assert size(count) == text
