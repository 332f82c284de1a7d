"""Break the code in one place at a time and check that its tests notice.

    python3 tools/mutants.py                  all mutants (about ten minutes on two cores)
    python3 tools/mutants.py NAME [NAME ...]  some of them
    python3 tools/mutants.py --list

Each mutant replaces one piece of code, which must occur exactly once in its file or folder, and
names the tests that must then fail. The working tree stays as it is: mutants live in copies. The
tests are first run on unchanged code, because a test that always fails notices nothing. Exit code 1
if a mutant survives or its code is no longer there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 600
"""Time limit of one mutant's tests. A mutant that makes them hang is caught, too."""
WORKERS = "workers/agenticrun_workers"
OPERATOR = "operator/agenticrun_operator"


@dataclass(frozen=True)
class Mutant:
    """One deliberate mistake.

    Attributes:
        name: `<subsystem>/<what breaks>`.
        where: the file, or a folder in which the code occurs once.
        old: the code, with any white space between its words.
        new: the mistake.
        tests: what must fail, as arguments of pytest.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]


class Missing(Exception):
    """A mutant's code does not occur exactly once."""


MUTANTS = (
    Mutant(
        "algorithms/rloo-baseline",
        f"{WORKERS}/algorithms",
        "centred_N * size_N / np.maximum(size_N - 1, 1)",
        "centred_N",
        ("tests/unit/algorithms/test_baselines.py",),
    ),
    Mutant(
        "algorithms/gigpo-states-across-groups",
        f"{WORKERS}/algorithms",
        'groups_K.astype(">i8").view(np.uint8)',
        'np.zeros_like(groups_K).astype(">i8").view(np.uint8)',
        ("tests/unit/algorithms/test_baselines.py",),
    ),
    Mutant(
        "algorithms/overlong-penalty-of-format",
        f"{WORKERS}/algorithms",
        "np.where(invalid_K, penalty_N[owners(cu_turns_N1)], 0.0)",
        "np.where(invalid_K, -penalty_N[owners(cu_turns_N1)], 0.0)",
        ("tests/unit/algorithms/test_rewards.py", "tests/unit/algorithms/test_credit.py"),
    ),
    Mutant(
        "losses/dual-clip",
        f"{WORKERS}/algorithms/losses.py",
        "(loss_N > ceiling_N)",
        "(loss_N < ceiling_N)",
        ("tests/unit/algorithms/test_losses.py",),
    ),
    Mutant(
        "losses/value-clip",
        f"{WORKERS}/algorithms/losses.py",
        "ValueLoss(torch.maximum(plain_N, bounded_N)",
        "ValueLoss(torch.minimum(plain_N, bounded_N)",
        ("tests/unit/algorithms/test_losses.py",),
    ),
    Mutant(
        "losses/k3",
        f"{WORKERS}/algorithms/losses.py",
        "exponent_N.expm1() - exponent_N",
        "exponent_N.expm1() + exponent_N",
        ("tests/unit/algorithms/test_losses.py",),
    ),
    Mutant(
        "losses/decoupled-cap",
        f"{WORKERS}/algorithms/losses.py",
        ".clamp(max=variant.cap).detach()",
        ".detach()",
        ("tests/unit/algorithms/test_losses.py",),
    ),
    Mutant(
        "launch/frozen-actors-live",
        f"{WORKERS}/launch/handle.py",
        "may_freeze: ClassVar[bool] = True",
        "may_freeze: ClassVar[bool] = False",
        ("tests/unit/launch/test_liveness.py",),
    ),
    Mutant(
        "rollout/gate-capacity",
        f"{WORKERS}/rollout",
        "math.floor((self.max_staleness + self.engine_version + 1)",
        "math.floor((self.max_staleness + self.engine_version + 2)",
        ("tests/unit/rollout/test_gate.py",),
    ),
    Mutant(
        "rollout/age-of-what-is-served",
        f"{WORKERS}/rollout",
        "VersionBounds(next_batch - self._max_age,",
        "VersionBounds(next_batch - self._max_age - 1,",
        ("tests/unit/rollout/test_staleness.py",),
    ),
    Mutant(
        "rollout/slow-groups-starve",
        f"{WORKERS}/rollout",
        "return fits or nothing_to_wait_for or not any(run.requeued for run in unfinished)",
        "return True",
        ("tests/unit/rollout/test_staleness.py",),
    ),
    Mutant(
        "rollout/poisoned-numbers",
        f"{WORKERS}/rollout",
        "np.isfinite(turn.reward) and np.isfinite(turn.logprobs_T).all()",
        "np.isfinite(turn.logprobs_T).all()",
        ("tests/unit/rollout",),
    ),
    Mutant(
        "seeds/streams-share-levels",
        f"{WORKERS}/seeds.py",
        'derive(seed, "env", stream.value, group)',
        'derive(seed, "env", group)',
        ("tests/unit/rollout/test_groups.py",),
    ),
    Mutant(
        "driver/balance",
        f"{WORKERS}/driver",
        "loads[lightest] += result.tokens",
        "loads[lightest] += 1",
        ("tests/unit/driver/test_batch_plan.py",),
    ),
    Mutant(
        "driver/variance-filter",
        f"{WORKERS}/driver",
        "key=lambda index: (-spread[index], index)",
        "key=lambda index: (spread[index], index)",
        ("tests/unit/driver/test_step.py",),
    ),
    Mutant(
        "driver/guard-patience",
        f"{WORKERS}/driver",
        "streak >= self._spec.patience",
        "streak > self._spec.patience",
        ("tests/unit/driver/test_guards.py",),
    ),
    Mutant(
        "driver/checkpoints-kept",
        f"{WORKERS}/driver",
        "kept >= self._keep",
        "kept > self._keep",
        ("tests/unit/driver/test_checkpoints.py",),
    ),
    Mutant(
        "driver/not-retried",
        f"{WORKERS}/driver",
        "_report(Outcome.FAILED, Reason.INVALID_CONFIG, str(error), retryable=False)",
        "_report(Outcome.FAILED, Reason.INVALID_CONFIG, str(error), retryable=True)",
        ("tests/unit/driver/test_reports.py",),
    ),
    Mutant(
        "trainer/token-budget",
        f"{WORKERS}/trainer",
        "(len(batches[-1]) + 1) * lengths[i] > max_tokens",
        "len(batches[-1]) * lengths[i] > max_tokens",
        ("tests/unit/trainer/test_micro_batch.py",),
    ),
    Mutant(
        "trainer/learning-rate-warm-up",
        f"{WORKERS}/trainer",
        "self.learning_rate * (step + 1) / self.warmup_steps",
        "self.learning_rate * step / self.warmup_steps",
        ("tests/unit/trainer/test_optimizer_and_samples.py",),
    ),
    Mutant(
        "trainer/broken-gradients-in-a-row",
        f"{WORKERS}/trainer",
        "self._broken >= self.spec.max_skipped_steps",
        "self._broken > self.spec.max_skipped_steps + 1",
        ("tests/unit/trainer/test_policy_trainer.py",),
    ),
    Mutant(
        "models/lora-scale",
        f"{WORKERS}/models",
        "(b.to(wide) @ a.to(wide)).mul_(scale)",
        "(b.to(wide) @ a.to(wide))",
        ("tests/unit/weights/test_lora_merge.py",),
    ),
    Mutant(
        "weights/delta-escapes",
        f"{WORKERS}/weights",
        "np.divmod(gaps_K, ESCAPE)",
        "np.divmod(gaps_K, ESCAPE - 1)",
        ("tests/unit/weights/test_delta.py",),
    ),
    Mutant(
        "weights/checksum",
        f"{WORKERS}/weights",
        "xxhash.xxh3_64_intdigest(known[1]) != checksum",
        "xxhash.xxh3_64_intdigest(known[1]) == -1",
        ("tests/unit/weights",),
    ),
    Mutant(
        "inference/temperature",
        f"{WORKERS}/inference",
        "[params.temperature or 1.0 for params in sampling]",
        "[1.0 for params in sampling]",
        ("tests/unit/inference/test_sampling.py",),
    ),
    Mutant(
        "agents/cut-answers",
        f"{WORKERS}/agents",
        "StopReason.MAX_TOKENS if cut else StopReason.PARSE_ERROR",
        "StopReason.PARSE_ERROR",
        ("tests/unit/agents/test_multi_turn.py",),
    ),
    Mutant(
        "agents/rewards-of-outside-agents",
        f"{WORKERS}/agents/outside",
        "not isinstance(value, (int, float, np.number)) or not math.isfinite(value)",
        "not isinstance(value, (int, float, np.number))",
        ("tests/unit/agents",),
    ),
    Mutant(
        "sandbox/system-calls",
        f"{WORKERS}/sandbox/seccomp.py",
        # One call more. Without the filter, the tests' fork bomb would go off.
        '"sigaltstack": (131, 132),',
        '"sigaltstack": (131, 132), "socket": (41, 198),',
        ("tests/unit/envs/test_sandbox.py",),
    ),
    Mutant(
        "reporting/token",
        f"{WORKERS}/reporting",
        "not hmac.compare_digest(given, self._bearer)",
        "not given",
        ("tests/unit/reporting/test_sidecar.py",),
    ),
    Mutant(
        "reporting/not-a-number",
        WORKERS,
        "if np.isfinite(value) and NAME.fullmatch(name)",
        "if NAME.fullmatch(name)",
        ("tests/unit/driver",),
    ),
    Mutant(
        "convert/validation-batch",
        f"{WORKERS}/convert",
        'val["groups"] * val["groupSize"]',
        'val["groups"]',
        ("tests/unit/convert",),
    ),
    Mutant(
        "operator/backoff",
        f"{OPERATOR}/planning",
        "backoff_seconds(max(0, failures - 1), policy",
        "backoff_seconds(0, policy",
        ("tests/unit/operator/test_life_of_a_run.py",),
    ),
    Mutant(
        "operator/restart-budget",
        f"{OPERATOR}/planning",
        "failures > policy.max_restarts",
        "failures >= policy.max_restarts",
        ("tests/unit/operator/test_life_of_a_run.py",),
    ),
    Mutant(
        "operator/suspension-without-grace",
        f"{OPERATOR}/planning/stopping.py",
        "if _is_given_up(state, cause):",
        "if True:",
        ("tests/unit/operator/test_suspension.py",),
    ),
    Mutant(
        "operator/one-incarnation",
        f"{OPERATOR}/reconciler.py",
        "str(head.incarnation) == job.incarnation",
        "head.incarnation is not None",
        (
            "tests/unit/operator/test_any_order_of_events.py",
            "tests/unit/operator/test_life_of_a_run.py",
        ),
    ),
    Mutant(
        "operator/readiness",
        f"{OPERATOR}/observed.py",
        'ready = readiness.get("status") == "True"',
        "ready = bool(readiness)",
        ("tests/unit/operator/test_pods.py", "tests/unit/operator/test_life_of_a_run.py"),
    ),
    Mutant(
        "operator/claim-dies-with-its-run",
        f"{OPERATOR}/resources/claims.py",
        "if claim.retain:",
        "if not claim.retain:",
        ("tests/unit/operator/test_claims.py",),
    ),
    Mutant(
        "operator/status-of-an-older-crd",
        f"{OPERATOR}/reconciler.py",
        'self._read(document, None).model_copy(update={"status": plan_.status})',
        "self._read(document, None)",
        ("tests/unit/operator/test_older_crd.py",),
    ),
    Mutant(
        "operator/overlay-replaces-lists",
        "crds/agenticrun_api/pods.py",
        "key = MERGE_KEYS.get(field)",
        "key = None",
        ("tests/unit/operator/test_overlay.py",),
    ),
    Mutant(
        "driver/previous-run-by-step",
        f"{WORKERS}/driver/checkpoints.py",
        "[(manifest.time, manifest.step, folder)]",
        "[(str(manifest.step), manifest.step, folder)]",
        ("tests/unit/driver/test_checkpoints.py",),
    ),
    Mutant(
        "operator/someone-elses-object",
        f"{OPERATOR}/planning/children.py",
        "if not is_retained(state.run, manifest) and (",
        "if False:",
        ("tests/unit/operator/test_life_of_a_run.py",),
    ),
    Mutant(
        "operator/queue-delays",
        f"{OPERATOR}/workqueue.py",
        "if timer.when() <= due:",
        "if timer.when() >= due:",
        ("tests/unit/operator/test_workqueue.py",),
    ),
    Mutant(
        "operator/credentials-in-pods",
        f"{OPERATOR}/resources",
        '"automountServiceAccountToken": False',
        '"automountServiceAccountToken": True',
        ("tests/unit/operator/test_resources.py",),
    ),
    Mutant(
        "devcluster/changed-sources",
        "tools/devcluster/binaries.py",
        "digest.update(path.read_bytes())",
        "pass",
        ("tests/unit/devcluster/test_binaries.py",),
    ),
)


def place(mutant: Mutant, root: Path) -> tuple[Path, re.Match[str]]:
    """Return the file and the place of a mutant's code below `root`.

    Raises:
        Missing: the code is not there, or more than once.
    """
    words = (re.escape(word) for word in mutant.old.split())
    pattern = re.compile(r"\s+".join(words))
    target = root / mutant.where
    files = sorted(target.rglob("*.py")) if target.is_dir() else [target]
    found = [
        (file, match)
        for file in files
        if file.exists()
        for match in pattern.finditer(file.read_text())
    ]
    if len(found) != 1:
        raise Missing(f"{mutant.name}: {len(found)} places with {mutant.old!r} in {mutant.where}")
    return found[0]


def survives(mutant: Mutant, root: Path) -> bool:
    """Run a mutant's tests in the copy `root`; the copy is put back afterwards."""
    file, match = place(mutant, root)
    before = file.read_text()
    file.write_text(before[: match.start()] + mutant.new + before[match.end() :])
    try:
        return passes(mutant.tests, root)
    finally:
        file.write_text(before)


def passes(tests: tuple[str, ...], root: Path, *, shown: bool = False) -> bool:
    """Run tests on the sources below `root`; show their output if it is asked for."""
    sources = os.pathsep.join(str(root / folder) for folder in ("crds", "operator", "workers"))
    environment = os.environ | {"PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=root,
            env=environment,
            stdout=None if shown else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1, 2):  # passed, failed, or could not be imported
        raise SystemExit(f"pytest {' '.join(tests)} could not run:\n{(done.stdout or '')[-2000:]}")
    return done.returncode == 0


def copy_tree(target: Path) -> None:
    """Copy the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def main() -> int:
    """Run the mutants and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these mutants")
    parser.add_argument("--list", action="store_true", help="list the mutants and their tests")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}; see --list")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<40} {' '.join(mutant.tests)}")
        return 0
    try:
        for mutant in chosen:
            place(mutant, ROOT)
    except Missing as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        os.chmod(folder, 0o755)  # the tests of the sandbox run as another user
        return run(chosen, Path(folder), options.jobs)


def run(chosen: list[Mutant], folder: Path, jobs: int) -> int:
    """Run the tests on unchanged code, then each mutant; returns the exit code."""
    copies: Queue[Path] = Queue()
    for number in range(jobs):
        copy_tree(folder / str(number))
        copies.put(folder / str(number))
    everything = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    print(f"unchanged code, {len(everything)} files and folders of tests", flush=True)
    if not passes(everything, folder / "0", shown=True):
        print("the tests fail on unchanged code: repair them first", file=sys.stderr)
        return 1

    def check(mutant: Mutant) -> bool:
        copy = copies.get()
        start = time.monotonic()
        try:
            survived = survives(mutant, copy)
        finally:
            copies.put(copy)
        word = "SURVIVED" if survived else "caught"
        print(f"{mutant.name:<40} {word:<9} {time.monotonic() - start:5.0f} s", flush=True)
        return survived

    with ThreadPoolExecutor(jobs) as pool:
        survivors = sum(pool.map(check, chosen))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
