"""Cost of our way to an engine: its tokens per second relative to the engine's own client.

Our way is GenerationClient, the actor and the engine.

    python benchmarks/engines.py [--engines NAME ...] [--quick] [--json FILE]

Both sides send the same prompts to the same engine with the same number in flight, alternately and
several times; figures are ratios of medians. The other side is the faster of the engine's own
benchmark client (in the engine's environment) and a minimal loop that posts the same requests with
aiohttp. For the transformers engine, which is not a server, it is calls of `generate` in its own
process.

All responses of a round are equally long, so they end together and the engine idles until the next
requests arrive: the worst case. `client_share_*` is at 128 tokens each, the default of
`vllm bench serve` (SGLang's is 1,024); `client_share_short_*` at 64, without a limit. `--quick`
sends an eighth of the prompts, once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import ray
from record import write_record

from agenticrun_api import Pipeline, parse_run
from agenticrun_workers.inference.actor import LOG_FOLDER, EngineActor
from agenticrun_workers.inference.client import GenerationClient
from agenticrun_workers.inference.server_process import engines_folder
from agenticrun_workers.launch import ActorOptions
from agenticrun_workers.launch.ray_launcher import RayLauncher
from agenticrun_workers.models.initialize import InitializeSpec, initialize_model
from agenticrun_workers.models.source import ModelSource
from agenticrun_workers.types import GenerationRequest, SamplingParams

ENGINES = ("transformers", "sglang", "vllm")
CLIENTS = Path(__file__).parent / "engine_clients"
LIMIT = 0.95
LENGTHS = {"": 128, "short_": 64}
"""New tokens of each response, by what the name of a figure says about them."""
OPTIONS = {"vllm": {"skip_tokenizer_init": False}}
"""vLLM's own client waits for text."""
MODEL = InitializeSpec(
    words=tuple(f"w{number}" for number in range(500)),
    hidden_size=64,
    intermediate_size=128,
    heads=2,
    max_position_embeddings=256,
)
"""So small that clients matter; heads of 32, the smallest that vLLM has on CPUs."""


@dataclass(frozen=True)
class Work:
    """The requests to send."""

    prompts: list[list[int]]
    new_tokens: int
    concurrency: int

    @staticmethod
    def make(requests: int, new_tokens: int, seed: int) -> Work:
        rng = np.random.default_rng(seed)
        return Work(
            rng.integers(1, len(MODEL.words), (requests, 64)).tolist(), new_tokens, concurrency=32
        )

    @property
    def tokens(self) -> int:
        return len(self.prompts) * self.new_tokens

    def request(self, number: int) -> GenerationRequest:
        sampling = SamplingParams(max_new_tokens=self.new_tokens)
        return GenerationRequest(
            f"r{number}",
            f"s{number}",
            np.array(self.prompts[number], np.int32),
            sampling,
            seed=number,
        )

    async def ask(self, one: Any) -> float:
        """Seconds until `one(number)` has returned for all prompts, so many at a time."""
        slots = asyncio.Semaphore(self.concurrency)

        async def slotted(number: int) -> None:
            async with slots:
                await one(number)

        began = time.perf_counter()
        await asyncio.gather(*(slotted(number) for number in range(len(self.prompts))))
        return time.perf_counter() - began


class MeasuredActor(EngineActor):
    """The product's actor, with a way around it."""

    async def url(self) -> str:
        engine: Any = self._engine
        return str(engine.url)

    async def ask_engine(self, work: Work) -> float:
        """Seconds of calls of the engine in its own process."""
        return await work.ask(lambda number: self._serving.generate(work.request(number)))


async def ask_through_client(actor: Any, work: Work, name: str) -> float:
    """Seconds of the product's way."""
    client = GenerationClient(name)
    client.set_engines({"engine-0": actor})

    async def one(number: int) -> None:
        generation = await client.generate(work.request(number))
        assert len(generation.tokens_T) == work.new_tokens, generation.finish

    try:
        return await work.ask(one)
    finally:
        client.set_engines({})  # ends its connections


async def ask_by_http(engine: str, url: str, work: Work) -> float:
    """Seconds of the leanest client that there is."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> None:
            if engine == "sglang":
                sampling = {
                    "max_new_tokens": work.new_tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                }
                body: dict[str, Any] = {
                    "input_ids": work.prompts[number],
                    "sampling_params": sampling,
                    "return_logprob": True,
                }
                path = "/generate"
            else:
                sampling = {
                    "max_tokens": work.new_tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "logprobs": 0,
                }
                body = {"token_ids": work.prompts[number], "sampling_params": sampling}
                path = "/inference/v1/generate"
            async with session.post(f"{url}{path}", json=body) as response:
                response.raise_for_status()
                await response.read()

        return await work.ask(one)


def ask_by_own_client(engine: str, url: str, work: Work) -> float:
    """Seconds of the engine's own benchmark client."""
    python = engines_folder(engine) / engine / "bin" / "python"
    command = [
        str(python),
        str(CLIENTS / f"{engine}_client.py"),
        url,
        *(["policy"] if engine == "vllm" else []),
    ]
    done = subprocess.run(
        command, input=json.dumps(asdict(work)), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def pipeline_for(engine: str) -> Pipeline:
    """A run whose engine it is."""
    run = {
        "apiVersion": "agenticrun.dev/v1alpha1",
        "kind": "AgenticRun",
        "metadata": {"name": "benchmark"},
        "spec": {
            "model": {"path": "unused"},
            "pipeline": {
                "maxSteps": 1,
                "rolloutBatchSize": 2,
                "evalSteps": 0,
                "sequenceLength": 256,
                "envs": [{"tag": "Lake", "type": "frozen_lake"}],
                "trainEnvs": {"groups": 1, "groupSize": 2, "tags": ["Lake"]},
                "actorInfer": {"strategy": {"name": engine, "config": OPTIONS.get(engine, {})}},
            },
        },
    }
    return parse_run(run, local=True).spec.pipeline


async def measure(
    engine: str, model: Path, requests: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Tokens per second by way, for each of LENGTHS."""
    options = ActorOptions(max_concurrency=1000)
    actor = RayLauncher().start(options, MeasuredActor, "engine-0")
    await actor.call(lambda actor: actor.start(pipeline_for(engine), ModelSource(str(model)), 1))
    await ask_through_client(actor, Work.make(8, 64, 0), "warm-up")
    found = {}
    for length, new_tokens in LENGTHS.items():
        seconds: dict[str, list[float]] = {
            "ours": [],
            "lean": [],
            **({"own": []} if engine != "transformers" else {}),
        }
        for number in range(rounds):
            work = Work.make(requests, new_tokens, number + 1)
            seconds["ours"].append(
                await ask_through_client(actor, work, f"client-{length}{number}")
            )
            if engine == "transformers":
                seconds["lean"].append(await actor.call(lambda actor: actor.ask_engine(work)))
            else:
                url = await actor.call(lambda actor: actor.url())
                seconds["lean"].append(await ask_by_http(engine, url, work))
                seconds["own"].append(await asyncio.to_thread(ask_by_own_client, engine, url, work))
        found[length] = {way: work.tokens / median(times) for way, times in seconds.items()}
    actor.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--quick", action="store_true", help="few prompts, one round: a smoke test, not a result"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    requests, rounds = (32, 1) if arguments.quick else (256, 5)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        runtime = {"env_vars": {LOG_FOLDER: folder}}
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env=runtime,
        )
        model = Path(folder) / "model"
        initialize_model(model, MODEL)
        print(
            f"{'engine':14}{'tokens':>8}{'ours tok/s':>12}{'own tok/s':>12}{'lean tok/s':>12}"
            f"{'share':>8}"
        )
        for engine in arguments.engines:
            for length, found in asyncio.run(measure(engine, model, requests, rounds)).items():
                share = found["ours"] / max(speed for way, speed in found.items() if way != "ours")
                own = f"{found['own']:.0f}" if "own" in found else "-"
                limit = "" if length else f"  (at least {LIMIT})"
                print(
                    f"{engine:14}{LENGTHS[length]:8}{found['ours']:12.0f}{own:>12}"
                    f"{found['lean']:12.0f}{share:8.3f}{limit}",
                    flush=True,
                )
                figures[f"client_share_{length}{engine}"] = share
                figures |= {
                    f"{length}{engine}_{way}_tokens_per_second": speed
                    for way, speed in found.items()
                }
        ray.shutdown()
    if arguments.json:
        write_record(arguments.json, figures)


if __name__ == "__main__":
    main()
