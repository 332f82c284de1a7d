"""The behaviour that callers may expect of every launcher, with actors to try it on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from agenticrun_api import Role
from agenticrun_api.base import clean_text
from agenticrun_workers.launch import (
    ActorDied,
    ActorHandle,
    ActorOptions,
    Launcher,
    OtherActorDied,
    current_node,
    packed,
)

CHOICE = ContextVar("choice", default="")
NOT_UTF8 = os.fsdecode(b"/data/n\xe9")
"""Name of a file as Python gives it; Ray cannot carry it in the text of an exception."""


class Refused(Exception):
    """Raised by actors. It has more than a text."""

    def __init__(self, path: str, number: int) -> None:
        super().__init__(path, number)
        self.path = path
        self.number = number

    def __str__(self) -> str:
        return f"{self.path} is refused"


class Counter:
    """An actor without async methods."""

    def __init__(self, start: int, *, step: int = 1) -> None:
        self._first = self._value = start
        self._step = step
        self._others: list[ActorHandle[Keeper]] = []

    def reset(self) -> None:
        self._value = self._first

    def add(self, *numbers: int) -> int:
        self._value += self._step * sum(numbers)
        return self._value

    def slow_add(self, number: int) -> int:
        before = self._value
        threading.Event().wait(0.02)
        self._value = before + number
        return self._value

    def both(self) -> tuple[int, str]:
        return self._value, str(self._value)

    @packed
    def negate(self, *arrays: np.ndarray) -> list[np.ndarray]:
        return [-array for array in arrays]

    @packed
    def halves(self, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        return arrays[:1], arrays[1]

    def count(self, last: int) -> Iterator[int]:
        for number in range(last):  # noqa: UP028  (Ray sends to generators, which a range cannot take)
            yield number
        if last > 3:
            raise Refused("count", last)

    def refuse(self, number: int) -> None:
        raise Refused("refuse", number)

    def refuse_bytes(self) -> None:
        try:
            raise ValueError(f"no level in {NOT_UTF8}")
        except ValueError as error:
            raise Refused(NOT_UTF8, 1) from error

    def count_bytes(self) -> Iterator[int]:
        yield 1
        self.refuse_bytes()

    def use(self, others: list[ActorHandle[Keeper]]) -> None:
        self._others = others

    def fetch(self) -> list[int]:
        answers = [other.call(lambda keeper: keeper.get("a")) for other in self._others]
        return [answer.wait() for answer in answers]

    def node(self) -> tuple[str, str]:
        node = current_node()
        return node.node_id, node.address

    def choose(self, choice: str) -> None:
        CHOICE.set(choice)

    def chosen(self) -> str:
        return CHOICE.get()

    def gpus(self) -> tuple[tuple[str, ...], str | None]:
        return current_node().gpus, os.environ.get("CUDA_VISIBLE_DEVICES")


class Keeper:
    """An actor with async methods."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._values: dict[str, int] = {}
        self._changed = asyncio.Event()

    async def reset(self) -> None:
        self._values.clear()

    async def put(self, name: str, value: int) -> None:
        self._values[name] = value
        self._changed.set()

    @packed
    async def last(self, *, arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[-1]

    async def get(self, name: str) -> int:
        while name not in self._values:
            self._changed.clear()
            await self._changed.wait()
        return self._values[name]

    async def ask(self, other: ActorHandle[Keeper]) -> int:
        return await other.call(lambda keeper: keeper.get("never"))

    async def count(self, last: int) -> AsyncIterator[int]:
        for number in range(last):
            await asyncio.sleep(0)
            yield number

    async def refuse_bytes(self) -> None:
        raise Refused(NOT_UTF8, 1)

    async def count_bytes(self) -> AsyncIterator[int]:
        yield 1
        await self.refuse_bytes()

    async def until_death(self) -> None:
        await asyncio.Event().wait()

    async def node(self) -> tuple[str, str]:
        node = current_node()
        return node.node_id, node.address


class Broken:
    """An actor that cannot be made."""

    def __init__(self) -> None:
        raise OSError("no memory left")

    async def answer(self) -> int:
        return 1


class BrokenBytes:
    """An actor that cannot be made, for a reason that is not UTF-8."""

    def __init__(self) -> None:
        raise ValueError(f"no level in {NOT_UTF8}")

    async def answer(self) -> int:
        return 1


async def soon(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, 60)


def reset_or_new(
    alive: dict[type, ActorHandle[Any]], cls: type, start: Callable[[], ActorHandle[Any]]
) -> ActorHandle[Any]:
    """Return an actor in its first state: the one that is alive, or a new one."""
    try:
        alive[cls].call(lambda actor: actor.reset()).wait()
    except (KeyError, ActorDied):
        alive[cls] = start()
    return alive[cls]


class LauncherConformance:
    """Tests of a launcher, which a subclass gives as a fixture `launcher` of its class."""

    @pytest.fixture(scope="class")
    @classmethod
    def alive(cls) -> dict[type, ActorHandle[Any]]:
        """Actors that tests share, because a new one on Ray takes seconds."""
        return {}

    @pytest.fixture
    def counter(
        self, launcher: Launcher, alive: dict[type, ActorHandle[Any]]
    ) -> ActorHandle[Counter]:
        def start() -> ActorHandle[Counter]:
            return launcher.start(ActorOptions(), Counter, 10, step=2)

        return reset_or_new(alive, Counter, start)

    @pytest.fixture
    def keeper(
        self, launcher: Launcher, alive: dict[type, ActorHandle[Any]]
    ) -> ActorHandle[Keeper]:
        def start() -> ActorHandle[Keeper]:
            return launcher.start(ActorOptions(max_concurrency=100), Keeper)

        return reset_or_new(alive, Keeper, start)

    async def test_a_call_returns_what_the_method_returns(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        result = counter.call(lambda actor: actor.add(1, 2))
        assert await soon(result) == 16
        assert await soon(result) == 16, "it can be awaited again"
        assert counter.call(lambda actor: actor.add()).wait() == 16
        await soon(keeper.call(lambda actor: actor.put("a", value=3)))
        assert await soon(keeper.call(lambda actor: actor.get("a"))) == 3

    async def test_a_call_that_nobody_awaits_is_made(self, keeper: ActorHandle[Keeper]) -> None:
        keeper.call(lambda actor: actor.put("a", 7))
        assert await soon(keeper.call(lambda actor: actor.get("a"))) == 7

    async def test_an_actor_without_async_methods_runs_one_call_after_the_other(
        self, counter: ActorHandle[Counter]
    ) -> None:
        adding = [counter.call(lambda actor: actor.slow_add(1)) for _ in range(10)]
        assert await soon(asyncio.gather(*adding)) == list(range(11, 21))

    async def test_async_methods_run_at_the_same_time(self, keeper: ActorHandle[Keeper]) -> None:
        waiting = [keeper.call(lambda actor: actor.get("a")) for _ in range(50)]
        await soon(keeper.call(lambda actor: actor.put("a", 1)))
        assert await soon(asyncio.gather(*waiting)) == [1] * 50

    async def test_a_wait_that_is_given_up_does_not_stop_the_call(
        self, keeper: ActorHandle[Keeper]
    ) -> None:
        result = keeper.call(lambda actor: actor.get("a"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(result, 0.05)
        await soon(keeper.call(lambda actor: actor.put("a", 1)))
        assert await soon(result) == 1

    async def test_a_method_raises_at_the_caller_what_it_raised(
        self, counter: ActorHandle[Counter]
    ) -> None:
        result = counter.call(lambda actor: actor.refuse(5))
        for raising in (soon(result), asyncio.to_thread(result.wait)):
            with pytest.raises(Refused, match="refuse is refused") as raised:
                await raising
            assert type(raised.value) is Refused
            assert (raised.value.path, raised.value.number) == ("refuse", 5)
        assert await soon(counter.call(lambda actor: actor.add())) == 10, "it lives on"

    async def test_an_error_whose_text_is_not_utf_8_arrives_and_the_actor_lives_on(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        items, others = (
            counter.stream(lambda actor: actor.count_bytes()),
            keeper.stream(lambda actor: actor.count_bytes()),
        )
        assert (await soon(anext(items)), await soon(anext(others))) == (1, 1)
        for failing in (
            counter.call(lambda actor: actor.refuse_bytes()),
            keeper.call(lambda actor: actor.refuse_bytes()),
            anext(items),
            anext(others),
        ):
            with pytest.raises(Refused) as raised:
                await soon(failing)
            assert clean_text(str(raised.value)) == "/data/n\\udce9 is refused"
            assert raised.value.number == 1
        assert await soon(counter.call(lambda actor: actor.add())) == 10

    async def test_a_result_goes_to_another_call_as_a_value(
        self, launcher: Launcher, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        first = counter.call(lambda actor: actor.add(1))
        second = keeper.call(lambda actor: actor.get("a"))
        three = launcher.put(3)
        adding = counter.call(
            lambda actor: actor.add(*(one.as_argument() for one in (first, second, three)))
        )
        keeper.call(lambda actor: actor.put("a", value=three.as_argument()))
        assert await soon(adding) == 12 + 2 * (12 + 3 + 3)

    async def test_a_call_with_a_failed_result_fails_like_it(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        failed = counter.call(lambda actor: actor.refuse(6))
        using = keeper.call(lambda actor: actor.put("a", failed.as_argument()))  # type: ignore[arg-type]
        with pytest.raises(Refused) as raised:
            await soon(using)
        assert raised.value.number == 6

    async def test_what_a_call_sets_in_its_context_is_there_in_later_calls_of_this_actor_only(
        self, launcher: Launcher, counter: ActorHandle[Counter]
    ) -> None:
        other = launcher.start(ActorOptions(), Counter, 0)
        for actor, choice in ((counter, "one"), (other, "two")):
            await soon(actor.call(lambda actor, choice=choice: actor.choose(choice)))  # type: ignore[misc]
        assert await soon(counter.call(lambda actor: actor.chosen())) == "one"
        assert await soon(other.call(lambda actor: actor.chosen())) == "two"
        other.kill()

    async def test_no_gpu_is_reserved_for_two_actors(self, launcher: Launcher) -> None:
        actors = [
            launcher.start(ActorOptions(Role.TRAINER, gpus=gpus), Counter, 0) for gpus in (2, 1)
        ]
        (two, _), (one, _) = [
            await soon(actor.call(lambda actor: actor.gpus())) for actor in actors
        ]
        assert (len(two), len(one)) == (2, 1)
        assert not {*two} & {*one}
        for actor in actors:
            actor.kill()

    async def test_a_pair_comes_as_two_results(self, counter: ActorHandle[Counter]) -> None:
        number, text = counter.call_pair(lambda actor: actor.both())
        assert (await soon(number), await soon(text)) == (10, "10")
        assert await soon(counter.call(lambda actor: actor.add(number.as_argument()))) == 30

    async def test_packed_methods_take_and_return_values_results_and_pairs(
        self, launcher: Launcher, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        one, two = np.arange(3), np.zeros((2, 0), np.float32)
        negated = counter.call(lambda actor: actor.negate(one, two))
        assert [array.tolist() for array in await soon(negated)] == [[0, -1, -2], [[], []]]
        assert (await soon(negated))[1].dtype == np.float32
        for arrays in (negated, launcher.put([one, -one])):
            last = keeper.call(lambda actor, a=arrays: actor.last(arrays=a.as_argument()))  # type: ignore[misc]
            assert (await soon(last)).tolist() == (await soon(arrays))[1].tolist()
        first, second = counter.call_pair(lambda actor: actor.halves(negated.as_argument()))
        assert [array.tolist() for array in await soon(first)] == [[0, -1, -2]]
        assert (await soon(second)).shape == (2, 0)

    async def test_a_generator_streams(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        assert [item async for item in counter.stream(lambda actor: actor.count(3))] == [0, 1, 2]
        assert [item async for item in keeper.stream(lambda actor: actor.count(5))] == [*range(5)]
        failing = counter.stream(lambda actor: actor.count(4))
        assert [await anext(failing) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(Refused, match="count is refused"):
            await anext(failing)

    async def test_actors_call_each_other_through_handles(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        await soon(keeper.call(lambda actor: actor.put("a", 4)))
        await soon(counter.call(lambda actor: actor.use([keeper, keeper])))
        assert await soon(counter.call(lambda actor: actor.fetch())) == [4, 4]

    async def test_a_killed_actor_fails_calls_in_progress_and_later_ones(
        self, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        watching = keeper.call(lambda actor: actor.until_death())
        await soon(keeper.call(lambda actor: actor.put("a", 1)))
        keeper.kill()
        keeper.kill()
        counter.kill()
        late = counter.call(lambda actor: actor.add(1))
        for result in (watching, keeper.call(lambda actor: actor.get("a")), late):
            with pytest.raises(ActorDied) as raised:
                await soon(result)
            assert not isinstance(raised.value, OtherActorDied)

    async def test_an_actor_that_meets_the_death_of_another_one_is_not_called_dead(
        self, launcher: Launcher, counter: ActorHandle[Counter], keeper: ActorHandle[Keeper]
    ) -> None:
        other = launcher.start(ActorOptions(max_concurrency=10), Keeper)
        await soon(other.call(lambda actor: actor.put("b", 1)))
        asking = keeper.call(lambda actor: actor.ask(other))
        await soon(counter.call(lambda actor: actor.use([other])))
        fetching = counter.call(lambda actor: actor.fetch())
        await asyncio.sleep(0.05)
        other.kill()
        for result in (asking, fetching):
            with pytest.raises(OtherActorDied):
                await soon(result)
        await soon(keeper.call(lambda actor: actor.put("a", 1)))
        assert await soon(counter.call(lambda actor: actor.add())) == 10

    async def test_an_actor_that_cannot_be_made_is_dead_and_says_why(
        self, launcher: Launcher
    ) -> None:
        broken = launcher.start(ActorOptions(), Broken)
        for _ in range(2):
            with pytest.raises(ActorDied, match="no memory left"):
                await soon(broken.call(lambda actor: actor.answer()))

    async def test_an_actor_that_cannot_be_made_says_why_in_any_bytes(
        self, launcher: Launcher
    ) -> None:
        broken = launcher.start(ActorOptions(), BrokenBytes)
        with pytest.raises(ActorDied) as raised:
            await soon(broken.call(lambda actor: actor.answer()))
        assert "no level in /data/n\\udce9" in clean_text(str(raised.value))

    async def test_an_actor_of_a_role_runs_on_a_node_that_offers_it(
        self, launcher: Launcher, keeper: ActorHandle[Keeper]
    ) -> None:
        actor = launcher.start(ActorOptions(Role.ENV), Counter, 0)
        node_id, address = await soon(actor.call(lambda counter: counter.node()))
        assert address.count(".") == 3
        assert Role.ENV.value in launcher.offers(node_id)
        assert list(launcher.offers("elsewhere")) == []
        beside = launcher.start(ActorOptions(node_id=node_id), Keeper)
        for handle in (keeper, beside):
            found = await soon(handle.call(lambda keeper: keeper.node()))
            assert found == (node_id, address)
        actor.kill()
        beside.kill()

    def test_a_lambda_that_calls_no_method_is_refused(self, counter: ActorHandle[Counter]) -> None:
        with pytest.raises(TypeError, match="must call one method"):
            counter.call(lambda actor: 1)
