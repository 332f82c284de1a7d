"""Check an installation on a node with 8 GPUs: NCCL, and two steps of each run in examples/gpu.

    tools/gpu_check_cluster.py -n my-runs --image registry.example.org/agenticrun/worker:0.2.0

Needs kubectl, the operator with images of both engines, and a namespace for runs. The runs start
SGLang and vLLM from these images. --dry-run prints the manifests and applies nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api import parse_run
from agenticrun_api.overrides import with_overrides

ROOT = Path(__file__).resolve().parent.parent
GPUS = 8
STEPS = 2
MINUTES = 20.0
"""Longest wait for one object: images of 10 GB are pulled, and engines compile kernels."""
POLL_SECONDS = 5.0
SMALL = (
    f"pipeline.maxSteps={STEPS}",
    "pipeline.evalSteps=0",
    "pipeline.saveSteps=0",
    "checkpoint={none: true}",
)
"""Changes of each example. Its model, roles, strategies and batches stay."""
ALL_REDUCE = """
import os, time
import torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
ranks, count = dist.get_world_size(), 2**28
tensor = torch.ones(count, device="cuda")
dist.all_reduce(tensor)
assert tensor[0].item() == ranks, tensor[0].item()
torch.cuda.synchronize(); begun = time.perf_counter()
for _ in range(5):
    dist.all_reduce(tensor)
torch.cuda.synchronize()
rate = 5 * 4 * count * 2 * (ranks - 1) / ranks / (time.perf_counter() - begun) / 1e9
if dist.get_rank() == 0:
    print(f"NCCL {torch.cuda.nccl.version()}, all-reduce of {ranks} GPUs: {rate:.0f} GB/s")
dist.destroy_process_group()
"""

Kubectl = Callable[[Sequence[str], str], str]
"""Runs kubectl with arguments and standard input; returns its output. Raises RuntimeError."""


@dataclass(frozen=True)
class Check:
    """An object to apply, and how its end is read from its status."""

    name: str
    document: dict[str, Any]
    gpus: int
    """GPUs of all its pods."""

    @property
    def resource(self) -> str:
        kind: str = self.document["kind"]
        return f"{kind.lower()}/{self.document['metadata']['name']}"

    def verdict(self, status: dict[str, Any]) -> str | None:
        """Return `passed`, or why it failed; None while it runs."""
        phase = status.get("phase")
        if phase == "Succeeded":
            return "passed"
        if phase != "Failed":
            return None
        reasons = [
            f"{each.get('reason')}: {each.get('message')}"
            for each in status.get("conditions", ())
            if each.get("status") == "False"
        ]
        return f"failed: {'; '.join(reasons) or 'see its log'}"


def checks(image: str) -> Iterator[Check]:
    """Yield the pod that tests NCCL, then a run of two steps for each file in examples/gpu."""
    yield Check("nccl", _nccl_pod(image), GPUS)
    for file in sorted((ROOT / "examples/gpu").glob("*.yaml")):
        document = with_overrides(yaml.safe_load(file.read_text()), SMALL)
        document["metadata"]["name"] = f"gpu-check-{file.stem}"
        roles = [role for _, role in parse_run(document).spec.roles if role is not None]
        gpus = sum(role.gpus * getattr(role, "replicas", 1) for role in roles)
        yield Check(file.stem, document, gpus)


def _nccl_pod(image: str) -> dict[str, Any]:
    command = ["torchrun", "--standalone", f"--nproc-per-node={GPUS}", "--no-python"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "gpu-check-nccl"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "nccl",
                    "image": image,
                    "command": [*command, "python", "-c", ALL_REDUCE],
                    "resources": {"limits": {"nvidia.com/gpu": GPUS}},
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
        },
    }


def run_check(check: Check, kubectl: Kubectl, minutes: float = MINUTES) -> str:
    """Apply an object, wait for its end, and delete it. Returns its verdict."""
    kubectl(["apply", "-f", "-"], yaml.safe_dump(check.document))
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            found = json.loads(kubectl(["get", check.resource, "-o", "json"], ""))
            if verdict := check.verdict(found.get("status", {})):
                return verdict
            time.sleep(POLL_SECONDS)
        return f"failed: it has not ended after {minutes:g} minutes"
    finally:
        kubectl(["delete", check.resource, "--ignore-not-found", "--wait"], "")


def _kubectl(namespace: str) -> Kubectl:
    def call(arguments: Sequence[str], text: str) -> str:
        done = subprocess.run(
            ["kubectl", "-n", namespace, *arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    return call


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks that fit on 8 GPUs. Returns 0 if all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", "--namespace", default="default", help="of the runs")
    parser.add_argument("--image", required=True, help="worker image, for the pod that tests NCCL")
    parser.add_argument("--gpus", type=int, default=GPUS, help="GPUs of the cluster")
    parser.add_argument("--dry-run", action="store_true", help="print the manifests only")
    options = parser.parse_args(arguments)
    chosen = list(checks(options.image))
    if options.dry_run:
        print(yaml.safe_dump_all([check.document for check in chosen]), end="")
        return 0
    kubectl, verdicts = _kubectl(options.namespace), {}
    for check in chosen:
        verdict = f"needs {check.gpus} GPUs"
        if check.gpus <= options.gpus:
            try:
                verdict = run_check(check, kubectl)
            except RuntimeError as error:
                verdict = f"failed: {error}"
        verdicts[check.name] = verdict
        print(f"{check.name:<20} {verdict}", flush=True)
    return int(any(verdict.startswith("failed") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
