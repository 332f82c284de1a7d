"""A person reads one screen: which lines need them, what means something else, and a code."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agenticrun_api import parse_run
from agenticrun_workers.cli import app
from agenticrun_workers.convert import Conversion, ConvertError, Fate, compose, convert
from agenticrun_workers.convert.converter import Composition
from agenticrun_workers.convert.outcome import ConvertExit, exit_code, summary, undecided_lines
from agenticrun_workers.envs import make_env
from agenticrun_workers.envs.python_tool import Answer, Call, CallParser
from agenticrun_workers.rollout.env_worker import describe_envs

DATA = Path(__file__).parents[2] / "data/roll"
EXAMPLES = sorted((DATA / "agentic").glob("*.yaml"))
MANAGERS = "roll.pipeline.agentic.env_manager"
SCREEN = 40

BASE: dict[str, Any] = {
    "pretrain": "Qwen/Qwen2.5-0.5B-Instruct",
    "max_steps": 10,
    "rollout_batch_size": 8,
    "sequence_length": 512,
    "adv_estimator": "reinforce",
    "whiten_advantages": True,
    "custom_envs": {"Game": {"env_type": "sokoban"}},
    "train_env_manager": {"num_env_groups": 4, "group_size": 2, "tags": ["Game"]},
}


def merged(base: Any, changes: Any) -> Any:
    """Return `base` with nested changes."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return copy.deepcopy(changes)
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def converted(changes: dict[str, Any]) -> Conversion:
    return convert(Composition(merged(BASE, changes), frozenset()), "game")


def game(env_type: str, config: Any = None, **more: Any) -> dict[str, Any]:
    env = {"env_type": env_type, "env_config": config or {}, **more}
    return {"custom_envs": {"Game": env}}


def notes(conversion: Conversion, fate: Fate) -> dict[str, str]:
    return {line.field: line.note for line in conversion.lines if line.fate is fate}


def meaning(conversion: Conversion) -> dict[str, str]:
    return notes(conversion, Fate.CHANGED)


def fits_a_screen(conversion: Conversion) -> bool:
    lines = list(summary(conversion, "roll.yaml"))
    return len(lines) < SCREEN and max(map(len, lines)) < 120


UNDECIDED = [
    ({"pretrain": "openai/gpt-oss-20b"}, "pretrain", "quantised.*spec.model.path"),
    ({"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, "pretrain", "several modalities.*text model"),
    ({"pretrain": "Qwen/Qwen3.5-2B"}, "pretrain", "several modalities"),
    ({"pretrain": "/models/ours"}, "(resources)", "memory and shmSize"),
    ({"pretrain": None}, "pretrain", "spec.model.path"),
    (game("game:GuessTheNumber-v0"), "custom_envs.Game.env_type", "GEM game.*gem.make"),
    (game("rg:letter_counting"), "custom_envs.Game.env_type", "Reasoning Gym.*gem.make"),
    (game("roll_qa"), "custom_envs.Game.env_type", "set_item"),
    (game("rock_tb_native_env"), "custom_envs.Game.env_type", "ROCK.*agent.type: outside"),
    (game("sokoban_sandbox"), "custom_envs.Game.env_type", "ROCK.*type sokoban is written"),
    (game("openreward_env"), "custom_envs.Game.env_type", "OpenReward.*module:Class"),
    (game("nowhere"), "custom_envs.Game.env_type", "no env is called 'nowhere'"),
    (game("webshop"), "custom_envs.Game.env_config", "200 made-up products.*items"),
    (game("sokoban", {"view": 3}), "custom_envs.Game.env_config.view", "no such argument"),
    (
        game(
            "roll_math", {"dataset_name": "x"}, tool_wrapper={"tool_configs": [{"tool_id": "mcp"}]}
        ),
        "custom_envs.Game.tool_wrapper",
        "not offered",
    ),
    (
        game("sokoban", env_manager_cls=f"{MANAGERS}.agent_native.AgentNativeStepEnvManager"),
        "custom_envs.Game.env_manager_cls",
        "agent of your own",
    ),
    (
        game(
            "sokoban",
            env_manager_cls=f"{MANAGERS}.proxy_env_manager.ProxyEnvManager",
            agent_runner_cls="roll.pipeline.agentic.agent_runner.rock.push_runner.PushRunner",
        ),
        "custom_envs.Game.agent_runner_cls",
        "agent.type: outside",
    ),
    (
        {"rollout_mock": {"enable": True, "mode": "mock"}},
        "rollout_mock.dump_dir",
        "record.to first",
    ),
    (
        {"reward": {"device_mapping": "[7]", "model_args": {"model_name_or_path": "judge"}}},
        "reward",
        "llm_judge",
    ),
    (
        {"train_env_manager": {"group_size": 1}, "rollout_batch_size": 1},
        "rollout_batch_size",
        "at least two trajectories",
    ),
    (
        {
            "train_env_manager": {"group_size": 1},
            "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        },
        "train_env_manager.group_size",
        "at least 2",
    ),
]


@pytest.mark.parametrize(("changes", "field", "note"), UNDECIDED)
def test_a_line_for_a_person_says_what_it_is_and_what_to_write(
    changes: dict[str, Any], field: str, note: str
) -> None:
    conversion = converted(changes)
    assert list(notes(conversion, Fate.DECISION)) == [field]
    assert re.search(note, notes(conversion, Fate.DECISION)[field])
    assert exit_code(conversion) is ConvertExit.UNDECIDED
    assert fits_a_screen(conversion)
    (line,) = undecided_lines(conversion)
    assert line.startswith(field)


@pytest.mark.parametrize(
    "changes",
    [changes for changes, *_ in UNDECIDED] + [{}],
    ids=lambda changes: str(changes)[:40],
)
def test_no_field_has_two_outcomes(changes: dict[str, Any]) -> None:
    outcomes: dict[str, set[Fate]] = {}
    for line in converted(changes).lines:
        outcomes.setdefault(line.field, set()).add(line.fate)
    assert {field for field, fates in outcomes.items() if len(fates) > 1} == set()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_say_all_of_it_on_one_screen(example: Path) -> None:
    assert fits_a_screen(convert(compose(example), example.stem))


def test_the_base_is_ready() -> None:
    conversion = converted({})
    assert exit_code(conversion) is ConvertExit.READY
    describe_envs(parse_run(conversion.document).spec.pipeline)
    assert next(summary(conversion, "roll.yaml")) == "roll.yaml: ready"


def test_rooms_of_sokoban_become_rows_columns_boxes_and_symbols() -> None:
    run = parse_run(convert(compose(DATA / "agentic/sokoban_lora.yaml"), "x").document)
    describe_envs(run.spec.pipeline)
    room, wide = run.spec.pipeline.envs
    assert room.config == {
        "rows": 6,
        "columns": 6,
        "boxes": 1,
        "searchDepth": 12,
        "symbols": "W.GCBA@",
        "actions": ["North", "South", "West", "East"],
    }
    assert (wide.config["rows"], wide.config["columns"], wide.config["boxes"]) == (6, 8, 2)
    bare = converted(game("sokoban", {"max_steps": 3})).document["spec"]["pipeline"]["envs"][0]
    assert bare["config"] == {"rows": 10, "columns": 10, "boxes": 4}  # ROLL's defaults


def test_older_names_buckets_and_recordings_are_read() -> None:
    conversion = convert(compose(DATA / "agentic/sokoban_lora.yaml"), "x")
    pipeline = parse_run(conversion.document).spec.pipeline
    assert (pipeline.train_envs.groups, pipeline.train_envs.partition) == (8, [6, 2])
    assert pipeline.weight_sync.bucket_bytes == 256 * 2**20
    assert pipeline.record is not None
    assert pipeline.record.to == "/checkpoints/first_rollouts"
    assert pipeline.actor_train.training.max_tokens_per_micro_batch == 8192
    assert (
        "read as num_env_groups" in notes(conversion, Fate.ADAPTED)["train_env_manager.env_groups"]
    )


def test_env_managers_sample_where_actor_infer_has_no_settings() -> None:
    composition = compose(DATA / "agentic/sokoban_lora.yaml")
    pipeline = parse_run(convert(composition, "x").document).spec.pipeline
    infer = pipeline.actor_infer
    assert (infer.generating.temperature, infer.generating.allow_truncated_sampling) == (0.9, False)
    greedy = infer.validation_generating
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.3, 0.95, 40)
    assert [env.max_tokens_per_step for env in pipeline.envs] == [24, 24]
    composition.config["actor_infer"]["generating_args"] = {"temperature": 0.5, "top_p": 1.0}
    infer = parse_run(convert(composition, "x").document).spec.pipeline.actor_infer
    assert (infer.generating.temperature, infer.validation_generating.temperature) == (0.5, 0.5)
    composition.config["actor_infer"]["generating_args"] = None
    composition.config["val_env_manager"]["generating_args"] = {"do_sample": False}
    infer = parse_run(convert(composition, "x").document).spec.pipeline.actor_infer
    assert infer.validation_generating.temperature == 0


def test_environments_of_older_files_are_read() -> None:
    older = {
        "env_type": "sokoban",
        "max_actions_per_traj": 30,
        "max_steps_per_traj": 20,
        "env_instruction": "Push.",
        "env_config": {"dim_x": 5, "dim_y": 7, "num_boxes": 1},
    }
    conversion = converted({"custom_envs": {"Game": older}})
    (env,) = parse_run(conversion.document).spec.pipeline.envs
    assert env.max_steps == 20
    assert env.config == {"rows": 5, "columns": 7, "boxes": 1, "instruction": "Push."}
    assert exit_code(conversion) is ConvertExit.READY


def test_files_of_other_pipelines_are_told(tmp_path: Path) -> None:
    file = tmp_path / "rlvr.yaml"
    file.write_text("pretrain: x-7B\nrewards: {}\n")
    with pytest.raises(ConvertError, match="only files of ROLL's agentic pipeline"):
        convert(compose(file), "x")
    result = CliRunner().invoke(app, ["convert", str(file)])
    assert result.exit_code == ConvertExit.UNREADABLE
    assert result.stderr.startswith(f"{file}: neither custom_envs nor train_env_manager")


def test_a_system_template_is_a_text_as_in_roll() -> None:
    pipeline = parse_run(convert(compose(DATA / "agentic/sokoban_lora.yaml"), "x").document).spec
    template = pipeline.pipeline.envs[0].agent.config["systemTemplate"]
    assert template.format(instruction="Push.") == "Answer like {this}.\nPush."


def test_problems_of_math_become_a_data_set() -> None:
    config = {"dataset_name": "owner/problems", "question_key": "prompt", "answer_key": "solution"}
    env = converted(game("roll_math", config)).document["spec"]["pipeline"]["envs"][0]
    assert (env["type"], env["maxSteps"]) == ("math", 1)
    assert env["dataset"] == {
        "path": "owner/problems",
        "columns": {"question": "prompt", "answer": "solution"},
    }
    assert "actionPattern" not in env["agent"]["config"]  # the whole answer counts
    tools = {"tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 7}}]}
    run = parse_run(converted(game("roll_math", config, tool_wrapper=tools)).document)
    python = run.spec.pipeline.envs[0]
    assert (python.type, python.config["seconds"]) == ("python_tool", 7.0)
    describe_envs(run.spec.pipeline)
    parser = CallParser(python.config["callPattern"], python.config["answerPattern"])
    assert parser.parse("I compute <code>print(1)</code> and") == Call("print(1)")
    assert parser.parse("```python\nprint(2)\n```") == Call("\nprint(2)\n")
    assert parser.parse("It is \\boxed{\\frac{1}{2}}.") == Answer("\\frac{1}{2}")


def test_a_game_in_pictures_becomes_one_in_text() -> None:
    conversion = converted(
        game(
            "sokoban",
            {"dim_room": [6, 6], "render_mode": "rgb_array"},
            env_manager_cls=f"{MANAGERS}.vl_traj_env_manager.VLTrajEnvManager",
            pre_step_template="Turn {turn_idx}:\n",
            next_step_template="{actions_left} left",
        )
    )
    agent = conversion.document["spec"]["pipeline"]["envs"][0]["agent"]
    assert agent["config"]["agentTemplate"] == "Turn {turn}:\n{observation}\n{turns_left} left"
    assert exit_code(conversion) is ConvertExit.READY
    assert "not images" in meaning(conversion)["custom_envs.Game.env_manager_cls"]


@pytest.mark.parametrize(
    ("changes", "field", "note"),
    [
        (
            {"adv_estimator": "agentic_reinforce", "add_token_level_kl": True},
            "add_token_level_kl",
            "C23",
        ),
        ({"adv_estimator": "gigpo", "add_token_level_kl": True}, "add_token_level_kl", "C25"),
        (
            {"adv_estimator": "step_reinforce", "add_token_level_kl": True},
            "add_token_level_kl",
            "C25",
        ),
        (
            {
                "train_env_manager": {"group_size": 1},
                "reward_normalization": {
                    "grouping": "traj_group_id",
                    "norm_mean_type": "batch",
                    "norm_std_type": "batch",
                },
            },
            "reward_normalization.norm_std_type",
            "C21",
        ),
        (game("sokoban", env_manager_cls="StepEnvManager"), "adv_estimator", "C24"),
        ({"adv_estimator": "gae", "ppo_epochs": 2}, "ppo_epochs", "C33"),
        ({"adv_estimator": "gae"}, "critic", "C15, C16"),
        ({"reward_clip": 5}, "reward_clip", "C30"),
        ({"loss_agg_mode": "token-mean"}, "loss_agg_mode", "C1"),
        ({"async_generation_ratio": 1}, "async_generation_ratio", "C37"),
        (
            {
                "actor_train": {
                    "worker_cls": "agentic_actor_pg_worker.ActorWorker",
                    "pg_variant": "topr",
                }
            },
            "actor_train.pg_variant",
            "C29",
        ),
        (
            {
                "ratio_type": "segment",
                "train_infer_correction": {"filters": [{"enabled": True, "agg_type": "token"}]},
            },
            "ratio_type",
            "C26",
        ),
        (
            {
                **game("sokoban", env_manager_cls="StepEnvManager"),
                "adv_estimator": "step_reinforce",
                "add_token_level_kl": True,
                "target_kl": 0.1,
            },
            "target_kl",
            "C27",
        ),
        (
            {"actor_train": {"model_args": {"dtype": "fp16"}}},
            "actor_train.model_args.dtype",
            "bfloat16",
        ),
    ],
)
def test_what_computes_something_else_is_told_with_its_reason(
    changes: dict[str, Any], field: str, note: str
) -> None:
    conversion = converted(changes)
    told = meaning(conversion)
    assert note in told.get(field, "not told")
    assert note not in str(meaning(converted({})).get(field))
    assert "means something else here" in "\n".join(summary(conversion, "x"))
    parse_run(conversion.document)


def test_the_command_writes_what_a_person_must_do_into_the_run(tmp_path: Path) -> None:
    file, out = tmp_path / "roll.yaml", tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(merged(BASE, {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"})))
    result = CliRunner().invoke(app, ["convert", str(file), "-o", str(out)])
    assert result.exit_code == 3
    assert result.stderr.startswith("roll.yaml: 1 line needs a decision")
    assert out.read_text().startswith("# needs a decision: pretrain (Qwen/Qwen2.5-VL-7B-Instruct)")
    detailed = CliRunner().invoke(app, ["convert", str(file), "--details"])
    assert "train_env_manager.group_size" in detailed.stderr
    assert "train_env_manager.group_size" not in result.stderr


@pytest.mark.parametrize("given", [{"api_key": "not-a-real-key"}, {"mode": "online"}, {}])
def test_wandb_without_its_key_is_offline_and_the_screen_says_so(given: dict[str, Any]) -> None:
    conversion = converted({"track_with": "wandb", "tracker_kwargs": given})
    wandb = parse_run(conversion.document).spec.tracking.wandb
    assert wandb is not None
    assert wandb.mode == "offline"
    assert exit_code(conversion) is ConvertExit.READY
    screen = " ".join("\n".join(summary(conversion, "x")).split())
    assert "track_with: wandb mode: offline is written" in screen
    assert "WANDB_API_KEY of a Secret into roles.driver.envFrom" in screen


def test_wandb_that_was_offline_is_not_told() -> None:
    conversion = converted({"track_with": "wandb", "tracker_kwargs": {"mode": "offline"}})
    assert conversion.document["spec"]["tracking"]["wandb"]["mode"] == "offline"
    assert "track_with" not in meaning(conversion)


def test_a_file_with_other_content_is_not_overwritten(tmp_path: Path) -> None:
    file, out = tmp_path / "roll.yaml", tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(BASE))
    command = ["convert", str(file), "-o", str(out)]
    assert CliRunner().invoke(app, command).exit_code == ConvertExit.READY
    written = out.read_text()
    assert CliRunner().invoke(app, command).exit_code == ConvertExit.READY
    edited = f"{written}# ours \N{LATIN SMALL LETTER E WITH ACUTE}\n"
    out.write_text(edited, encoding="utf-8")
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == ConvertExit.REFUSED
    assert f"{out}: exists with other content" in refused.stderr
    assert "--force" in refused.stderr
    assert "written" not in refused.stderr
    assert out.read_text(encoding="utf-8") == edited
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == ConvertExit.READY
    assert out.read_text() == written


@pytest.mark.parametrize(
    ("pretrain", "before"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "next:"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "fix the lines above first, then"),
    ],
)
def test_the_last_line_says_what_comes_next(tmp_path: Path, pretrain: str, before: str) -> None:
    file, out = tmp_path / "roll.yaml", tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(merged(BASE, {"pretrain": pretrain})))
    command = ["convert", str(file), "--force", "-o", str(out)]
    last = CliRunner().invoke(app, command).stderr.splitlines()[-1]
    assert last == f"written: {out}; {before} `agenticrun validate -f {out}`"
    last = CliRunner().invoke(app, [*command, "--first-step"]).stderr.splitlines()[-1]
    assert last == f"written: {out}; {before} `agenticrun run -f {out} --in-process`"


def test_the_screen_names_the_field_of_a_typo_and_counts_in_the_words_of_the_tables() -> None:
    screen = list(summary(converted({"reward_cliip": 5, "of_nobody": 1}), "x"))
    assert "probably mistyped, ignored by ROLL: reward_cliip (reward_clip?)" in screen
    counts = screen[-1].removeprefix("all other settings: ").removesuffix(" (--details lists them)")
    words = [re.sub(r"^\d+ ", "", part) for part in counts.split(", ")]
    assert words == ["unknown to ROLL", "done in another way here", "dropped", "mapped"]
    assert all(any(fate.startswith(word) for fate in Fate) for word in words)


@pytest.mark.parametrize("manager", ["TrajEnvManager", "StepEnvManager"])
def test_placeholders_of_a_system_template_stay_and_are_told(manager: str) -> None:
    def told(template: str) -> str:
        env = game("sokoban", env_manager_cls=manager, agent_system_template=template)
        return "\n".join(summary(converted(env), "x"))

    screen = " ".join(told("Play. {env_instruction} {this}").split())
    assert "custom_envs.Game.agent_system_template: {env_instruction} ROLL fills no" in screen
    assert "the model reads {env_instruction} as it is" in screen
    for silent in ("Play.", "Like {this}.", "Like {{env_instruction}}."):
        assert "fills no placeholders" not in told(silent)


def test_the_first_step_runs_on_this_machine(tmp_path: Path) -> None:
    file, out = DATA / "agentic/sokoban_lora.yaml", tmp_path / "first.yaml"
    result = CliRunner().invoke(app, ["convert", str(file), "--first-step", "-o", str(out)])
    assert result.exit_code == ConvertExit.READY
    run = parse_run(yaml.safe_load(out.read_text()))
    assert run.spec.model.initialize is not None
    assert run.spec.pipeline.actor_train.lora is not None
    assert run.spec.roles.trainer.cpus == "200m"  # all four pods fit on a node with two CPUs
    assert run.spec.pipeline.record is None  # it would write into the working folder
    assert (run.spec.pipeline.max_steps, run.spec.pipeline.rollout_batch_size) == (1, 8)
    trained = CliRunner().invoke(
        app, ["run", "-f", str(out), "--in-process", "-o", str(tmp_path / "out")]
    )
    assert trained.exit_code == 0, trained.output


def test_a_shop_s_warning_is_in_the_report_only(caplog: pytest.LogCaptureFixture) -> None:
    shop = game("webshop", {"num_products": 7})
    assert "made-up" in str(notes(converted(shop), Fate.DECISION))
    assert "made-up" not in caplog.text
    make_env("webshop", {"numProducts": 8})
    assert "made-up products" in caplog.text


def test_shell_variables_that_are_not_set_are_secrets_or_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OUR_MODEL", raising=False)
    file = tmp_path / "roll.yaml"
    file.write_text(
        "custom_envs: {}\npretrain: ${oc.env:OUR_MODEL}\n"
        "tracker_kwargs: {api_key: '${oc.env:OUR_KEY}'}\n"
    )
    fields = notes(convert(compose(file), "x"), Fate.DECISION)
    assert "${oc.env:OUR_MODEL}" in fields
    assert "${oc.env:OUR_KEY}" not in fields
    monkeypatch.setenv("OUR_MODEL", "Qwen/Qwen3-4B")
    assert "pretrain" not in notes(convert(compose(file), "x"), Fate.DECISION)


def test_links_are_followed_and_lost_ones_are_told(tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("seed: 3\n")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    (tmp_path / "without-links.yaml").write_text("real.yaml")
    assert compose(tmp_path / "link.yaml").config == {"seed": 3}
    assert compose(tmp_path / "without-links.yaml").config == {"seed": 3}
    (tmp_path / "lost.yaml").write_text("../elsewhere/gone.yaml")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "parts.yaml").write_text("defaults: [../config/gone@_here_]\n")
    for name, message in (
        ("lost", "symbolic link to ../elsewhere/gone.yaml"),
        ("empty", "symbolic link"),
        ("parts", "--config-dir"),
    ):
        with pytest.raises(ConvertError, match=message):
            compose(tmp_path / f"{name}.yaml")
        result = CliRunner().invoke(app, ["convert", str(tmp_path / f"{name}.yaml")])
        assert result.exit_code == 64
