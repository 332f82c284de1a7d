"""What a fault drill concludes from its samples."""

from __future__ import annotations

from typing import Any

from drills import ENDED, TABLE_HEAD, Report, Row, Sample, untruths, with_row


def sample(
    at: float,
    step: int,
    *,
    training: str = "True",
    phase: str = "Running",
    attempt: int = 1,
    driver: str = "running",
    ready: int = 1,
    **more: Any,
) -> Sample:
    status = {
        "phase": phase,
        "step": step,
        "maxSteps": 10,
        "message": "why",
        "completionTime": "now" if phase in ENDED else None,
        "job": {"attempt": attempt},
        "roles": [{"name": "trainer", "ready": 1}],
        "checkpoint": {"step": max(0, step - 1)},
        "conditions": [
            {"type": "Training", "status": training, "reason": "Any"},
            {"type": "Failed", "status": "False", "reason": "Why"},
        ],
    }
    more = {"operator": True, "saved": step} | more
    return Sample(at, status, driver=driver, ready={"trainer": ready}, **more)


def silent(at: float) -> Sample:
    """The apiserver does not answer."""
    return Sample(at, None, operator=False, driver="running")


def texts(*samples: Sample) -> list[str]:
    return [item.text for item in untruths(samples)]


def test_a_status_that_agrees_is_no_untruth() -> None:
    assert texts(*(sample(at, int(at)) for at in range(30))) == []


def test_training_with_a_dead_driver_may_be_shown_for_ten_seconds_only() -> None:
    dead = [sample(at, 3, driver="gone") for at in range(12)]
    assert texts(*dead[:11]) == []
    assert texts(*dead) == ["Training is True, but the driver is gone"]


def test_the_truth_in_between_ends_an_untruth() -> None:
    assert (
        texts(
            *(sample(at, 3, driver="stopped") for at in range(8)),
            sample(8, 3),
            *(sample(at, 3, driver="stopped") for at in range(9, 17)),
        )
        == []
    )


def test_containers_that_start_after_the_fault_are_counted() -> None:
    def report(*after: str) -> Report:
        seen = [sample(0, 3, pods=frozenset({"a/0", "b/0"}))]
        seen += [sample(at, 4, pods=frozenset({name, "b/0"})) for at, name in enumerate(after, 2)]
        end = sample(9, 10, phase="Succeeded", pods=frozenset({"later/0"}))
        return Report([*seen, silent(8), end], injected=1)

    assert report("a/0", "a/0").new_containers() == 0
    assert report("a/0", "a/1").new_containers() == 1
    assert report("c/0", "d/0").new_containers() == 2


def test_nothing_is_untrue_while_nobody_can_write_the_status() -> None:
    assert texts(sample(0, 3, ready=0), *map(silent, range(1, 60)), sample(60, 3, ready=0)) == []
    assert texts(*(sample(at, 3, ready=0, operator=False) for at in range(60))) == []


def test_pods_that_are_not_ready_and_a_driver_that_lives_are_noticed() -> None:
    assert texts(*(sample(at, 3, ready=0) for at in range(20))) == [
        "1 trainer pods are ready, but it is 0"
    ]
    for phase in ("Failed", "Suspended"):
        assert f"phase is {phase}, but the driver runs" in texts(
            *(sample(at, 3, phase=phase, training="False", ready=0) for at in range(20))
        )


def test_a_frozen_step_is_noticed_and_a_late_one_is_not() -> None:
    assert texts(*(sample(at, at - 4, saved=at) for at in range(5, 40))) == []
    assert texts(*(sample(at, 3, saved=at) for at in range(3, 40))) == [
        "step is 3, but that of the disk is 39"
    ]


def test_steps_are_lost_from_the_last_shown_to_the_first_of_the_next_attempt() -> None:
    samples = [
        sample(0, 4),
        sample(1, 5),
        sample(2, 5, phase="Restarting", training="False", driver="gone"),
        sample(3, 5, phase="Running", training="False", attempt=2),
        sample(4, 4, attempt=2),
        sample(5, 6, attempt=2),
        sample(6, 10, attempt=2, phase="Succeeded", training="False", driver="gone"),
    ]
    report = Report(samples, injected=1.5)
    assert (report.lost(), report.lost_beyond_checkpoint()) == (1, 0)
    assert report.recovered() == 3.5
    assert not report.trained_on()
    assert report.said() == [(0.5, "Training False Any"), (0.5, "Restarting")]
    assert report.result() == "Succeeded"
    behind = [*samples[:4], sample(4, 2, attempt=2)]
    assert Report(behind, injected=1.5).lost_beyond_checkpoint() == 2


def test_a_run_that_trains_through_the_fault_did_not_stop() -> None:
    report = Report([sample(0, 4), sample(2, 5), silent(3), sample(4, 6)], injected=1)
    assert report.trained_on()
    assert report.result() == "did not end"


def test_a_new_row_replaces_that_of_the_same_drill() -> None:
    rows = [Row(name, "today", "said", "1", "0", "Succeeded") for name in ("b", "a", "b")]
    page = f"# Drills\n\n{TABLE_HEAD}\nMore.\n"
    for row in (*rows[:2], Row("b", "later", "a | b\nc", "2", "0", "Failed")):
        page = with_row(page, row, ["a", "b"])
    assert page == (
        f"# Drills\n\n{TABLE_HEAD}| a | today | said | 1 | 0 | Succeeded |\n"
        "| b | later | a b c | 2 | 0 | Failed |\n\nMore.\n"
    )


def test_a_phase_that_somebody_else_wrote_is_no_end() -> None:
    written = sample(2, 4)
    assert written.status is not None
    written.status["phase"] = "Failed"
    report = Report([sample(0, 3), written, sample(9, 10, phase="Succeeded")], injected=1)
    end = report.end()
    assert end is not None
    assert end.phase == "Succeeded"
    assert report.said() == [(1.0, "Failed by hand")]


def test_a_text_is_looked_for_in_all_messages() -> None:
    report = Report([sample(0, 3), sample(2, 10, phase="Succeeded")], injected=1)
    assert report.showed("why")
    assert not report.showed("why not")
