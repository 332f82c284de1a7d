"""The launcher on a real Ray."""

from __future__ import annotations

import pytest
import ray
from ray.actor import _ActorClassMethodMetadata

from agenticrun_api import Role
from agenticrun_workers.launch import ActorDied, ActorHandle, ActorOptions, Launcher
from agenticrun_workers.launch.ray_launcher import RayLauncher
from launcher_conformance import Counter, Keeper, LauncherConformance

pytestmark = pytest.mark.usefixtures("ray_node")


@pytest.fixture(scope="class")
def launcher() -> Launcher:
    return RayLauncher()


class TestRayLauncher(LauncherConformance):
    """See `LauncherConformance`."""

    async def test_actors_of_a_class_share_what_ray_keeps_of_it_forever(
        self, launcher: Launcher, counter: ActorHandle[Counter]
    ) -> None:
        """Else each replaced engine would be a leak of every process that had its handle."""
        kept = len(_ActorClassMethodMetadata._cache)
        another = launcher.start(ActorOptions(), Counter, 0)
        assert await another.call(lambda actor: actor.add(1)) == 1
        assert len(_ActorClassMethodMetadata._cache) == kept
        another.kill()

    async def test_an_actor_sees_the_gpus_that_are_reserved_for_it_and_no_others(
        self, launcher: Launcher, counter: ActorHandle[Counter]
    ) -> None:
        assert await counter.call(lambda actor: actor.gpus()) == ((), "")
        options = ActorOptions(Role.TRAINER, gpus=2)
        trainer = launcher.start(options, Counter, 0)
        reserved, visible = await trainer.call(lambda actor: actor.gpus())
        assert visible == ",".join(reserved)
        trainer.kill()

    async def test_an_actor_for_a_node_that_is_lost_counts_as_dead(
        self, launcher: Launcher
    ) -> None:
        actor = launcher.start(ActorOptions(node_id="ab" * 28), Counter, 0)
        with pytest.raises(ActorDied, match="doesn't exist any more"):
            await actor.call(lambda actor: actor.add(1))

    async def test_no_call_after_the_kill_is_answered_although_ray_takes_its_time(
        self,
        counter: ActorHandle[Counter],
        keeper: ActorHandle[Keeper],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with monkeypatch.context() as slow:
            slow.setattr(ray, "kill", lambda _: None)
            counter.kill()
        for result in (
            counter.call(lambda actor: actor.add(1)),
            *counter.call_pair(lambda actor: actor.both()),
        ):
            with pytest.raises(ActorDied, match="was killed"):
                await result
        with pytest.raises(ActorDied, match="was killed"):
            await anext(aiter(counter.stream(lambda actor: actor.count(1))))
        dead = counter.call(lambda actor: actor.add(1))
        with pytest.raises(ActorDied):
            keeper.call(lambda actor: actor.put("a", dead.as_argument()))
