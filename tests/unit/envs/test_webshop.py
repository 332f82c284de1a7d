"""WebShop: pages, moves, seeds, many episodes at once, own files, and a vocabulary."""

from __future__ import annotations

import hashlib
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs import EnvConfigError, make_env
from agenticrun_workers.envs.webshop import WebShop, made_up
from agenticrun_workers.envs.webshop.shop import SearchEngine, document, singular
from agenticrun_workers.envs.webshop.shop import words as indexed_words
from agenticrun_workers.types import Stream

PRODUCT = WebShop()._shop.products[0]


def play(env: WebShop, seed: int, split: Stream = Stream.TRAIN, steps: int = 12) -> list[str]:
    """Play random actions, most of them valid, and return everything that the customer sees."""
    rng = random.Random(seed)
    seen = [env.reset(seed, split)]
    for _ in range(steps):
        action = "click[nothing]" if rng.random() < 0.1 else rng.choice(env.valid_actions())
        result = env.step(action)
        seen += [action, result.observation, repr(result.reward), repr(dict(result.metrics))]
        if result.terminated:
            break
    return seen


def digest(episodes: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(episodes).encode()).hexdigest()[:16]


GOLDEN = {"text": "e28807508ffedac4", "text_rich": "efbca19c7e136469"}


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_episodes_are_the_same_on_every_machine(mode: str) -> None:
    env = make_env("webshop", {"observationMode": mode})
    assert isinstance(env, WebShop)
    assert (
        digest([play(env, seed, split) for seed in range(10) for split in Stream]) == GOLDEN[mode]
    )


def test_episodes_are_the_same_in_many_threads_at_once() -> None:
    alone = [play(WebShop(), seed) for seed in range(64)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda seed: play(WebShop(), seed), range(64))) == alone


def test_training_and_validation_share_no_goal() -> None:
    env = WebShop()
    goals = {}
    for split in (Stream.TRAIN, Stream.VALIDATION):
        starts = set()
        for seed in range(600):
            env.reset(seed, split)
            starts.add(env._visit.goal)
        goals[split] = starts
    assert not goals[Stream.TRAIN] & goals[Stream.VALIDATION]
    assert len(goals[Stream.VALIDATION]) == 40
    assert len(goals[Stream.TRAIN]) > 150


def find(env: WebShop) -> None:
    """Go to the product of the goal."""
    goal = env._visit.goal
    env.step(f"search[{goal.query} {' '.join(goal.attributes)}]")
    while f"click[{goal.asin.lower()}]" not in env.valid_actions():
        env.step("click[next >]")
    env.step(f"click[{goal.asin.lower()}]")


def test_a_whole_purchase_is_a_success() -> None:
    env = WebShop()
    env.reset(3, Stream.TRAIN)
    find(env)
    for _, value in env._visit.goal.options:
        env.step(f"click[{value}]")
    end = env.step("Click[Buy Now]")
    assert (end.reward, end.terminated, end.truncated) == (1.0, True, False)
    assert (end.metrics["success"], end.metrics["bought"]) == (1.0, 1.0)
    assert env.step("click[buy now]").metrics["action_is_valid"] == 0


def test_buying_something_else_is_bought_but_no_success() -> None:
    env = WebShop()
    env.reset(3, Stream.TRAIN)
    find(env)
    end = env.step("click[buy now]")
    assert end.terminated
    assert 0 < end.reward < 1
    assert (end.metrics["success"], end.metrics["bought"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    "action",
    [
        "",
        "buy",
        "click[]",
        "click[buy now]",
        "click[search]",
        "search[]",
        "walk[north]",
        "click",
        "[x]",
    ],
)
def test_what_is_not_on_the_page_changes_nothing(action: str) -> None:
    env = WebShop()
    before = env.reset(1, Stream.TRAIN)
    result = env.step(action)
    assert (result.observation, result.reward, result.terminated) == (before, 0.0, False)
    assert (result.metrics["action_is_valid"], result.metrics["action_is_effective"]) == (0.0, 0.0)


def test_an_action_is_effective_if_it_changes_the_page() -> None:
    env = WebShop()
    env.reset(3, Stream.TRAIN)
    find(env)
    option = env._visit.goal.options[0][1]
    rich = WebShop(observation_mode="text_rich")
    rich.reset(3, Stream.TRAIN)
    find(rich)
    assert [rich.step(f"click[{option}]").metrics["action_is_effective"] for _ in range(2)] == [
        1.0,
        0.0,
    ]
    assert env.step("click[features]").metrics["action_is_effective"] == 1.0


def lines(env: WebShop) -> list[str]:
    return env._observation().partition("\nAvailable")[0].split(" [SEP] ")


def test_pages_are_written_like_the_simulators() -> None:
    env = WebShop(show_attributes=True)
    env.reset(3, Stream.TRAIN)
    goal = env._visit.goal
    head = ["Instruction:", goal.instruction, "Back to Search"]
    assert lines(env) == ["WebShop", "Instruction:", goal.instruction, "Search"]
    env.step("search[bar]")
    found = env._visit.results
    assert found is not None
    first = env._shop.products[found[0]]
    assert lines(env)[:8] == [
        *head,
        f"Page 1 (Total results: {len(found)})",
        "Next >",
        first.asin,
        first.title,
        first.price_tag,
    ]
    assert len(lines(env)) == 5 + 3 * 10
    env.step("click[next >]")
    assert lines(env)[3:6] == [f"Page 2 (Total results: {len(found)})", "< Prev", "Next >"]
    env.step("click[< prev]")
    env.step(f"click[{first.asin.lower()}]")
    options = [text for name, values in first.options.items() for text in (name, *values)]
    reads = ["Description", "Features", "Reviews", "Attributes", "Buy Now"]
    assert lines(env) == [
        *head,
        "< Prev",
        *options,
        first.title,
        f"Price: {first.price_tag}",
        f"Rating: {first.rating}",
        *reads,
    ]
    [review] = first.reviews
    contents = {
        "description": [first.description],
        "features": list(first.features),
        "reviews": [f'"{review.title}"', review.score, review.body],
        "attributes": [*first.attributes, first.category, first.query, first.product_category],
    }
    for name, content in contents.items():
        env.step(f"click[{name}]")
        assert lines(env) == [*head, "< Prev", *content]
        env.step("click[< prev]")


def test_rich_pages_mark_what_was_clicked() -> None:
    env = WebShop(observation_mode="text_rich", list_actions=False)
    env.reset(3, Stream.TRAIN)
    find(env)
    option = env._visit.goal.options[0][1]
    page = env.step(f"click[{option}]").observation
    assert page.startswith(f"You have clicked {option}.\nInstruction:\n")
    assert f"\n  [clicked button] {option} [clicked button_]\n" in page
    assert "\n[button] Buy Now [button_]\n" in page
    asin = env._visit.goal.asin
    assert (
        f"\n\n[clicked button] {asin} [clicked button_]\n" in env.step("click[< prev]").observation
    )


def test_going_back_forgets_what_the_simulator_forgets() -> None:
    env = WebShop()
    env.reset(3, Stream.TRAIN)
    find(env)
    option = env._visit.goal.options[0][1]
    env.step(f"click[{option}]")
    env.step("click[description]")
    env.step("click[< prev]")
    assert list(env._visit.options.values()) == [option]
    env.step("click[< prev]")
    assert env._visit.options == {}
    assert env._visit.results is not None
    env.step("click[back to search]")
    assert env._visit.results is None


def test_there_is_always_one_more_page_of_results() -> None:
    env = WebShop(results_per_page=3, search_results=7)
    env.reset(0, Stream.TRAIN)
    env.step("search[wool socks]")
    for _ in range(3):
        env.step("click[next >]")
    assert lines(env)[3:] == ["Page 4 (Total results: 7)", "< Prev", "Next >"]
    env.step("click[< prev]")
    assert len(lines(env)) == 6 + 3


def test_the_search_finds_nothing_for_unknown_words() -> None:
    env = WebShop()
    env.reset(0, Stream.TRAIN)
    assert "(Total results: 0)" in env.step("search[qwertyuiop]").observation
    assert "(Total results: 0)" in env.step("search[the ...]").observation


@given(
    st.lists(
        st.lists(st.sampled_from(["ab", "cd", "ef", "gh"]), min_size=1, max_size=9),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 9),
)
def test_bm25_ranks_as_its_definition_and_ties_keep_the_files_order(
    texts: list[list[str]], limit: int
) -> None:
    products = [replace(PRODUCT, title=" ".join(text)) for text in texts]
    documents = [indexed_words(document(product)) for product in products]
    average = sum(map(len, documents)) / len(documents)
    for query in (["ab"], ["cd", "ef"], ["gh", "gh", "ab"]):
        scores = []
        for text in documents:
            score = 0.0
            for word in query:
                frequency, holders = text.count(word), sum(word in other for other in documents)
                idf = math.log(1 + (len(documents) - holders + 0.5) / (holders + 0.5))
                score += idf * frequency / (frequency + 0.9 * (1 - 0.4 + 0.4 * len(text) / average))
            scores.append(score)
        engine = SearchEngine(products, limit)
        known = [word for word in query if any(word in text for text in documents)]
        if known:
            assert engine._index.get_scores(known) == pytest.approx(scores, rel=1e-5, abs=1e-6)
        best = engine.search(" ".join(query))
        assert len(best) == min(limit, sum(score > 0 for score in scores))
        expected = sorted(range(len(scores)), key=lambda position: -scores[position])[: len(best)]
        assert [scores[position] for position in best] == pytest.approx(
            [scores[position] for position in expected], rel=1e-5
        )
        assert all(
            one < other for one, other in pairwise(best) if documents[one] == documents[other]
        )


def test_plurals_are_found_too() -> None:
    assert [
        singular(word) for word in ("socks", "berries", "dishes", "glass", "bus", "shoes", "gas")
    ] == [
        "sock",
        "berry",
        "dishe",
        "glass",
        "bus",
        "shoe",
        "gas",
    ]


def test_a_clicked_option_belongs_to_the_last_group_that_has_it() -> None:
    env = WebShop()
    env.reset(3, Stream.TRAIN)
    find(env)
    assert env._visit.product is not None
    env._visit.product = replace(
        env._visit.product, options={"size": ("one", "two"), "pack": ("two", "description")}
    )
    env._page = env._visit.page()
    env.step("click[two]")
    assert env._visit.options == {"pack": "two"}
    env.step("click[description]")  # the page of that name comes first, as in the simulator
    assert env._visit.sub_page == "Description"


def write_files(folder: Path) -> dict[str, str]:
    data = made_up.catalogue()
    config = {
        "items": "items_shuffle_1000",
        "attributes": "items_ins_v2_1000",
        "humanInstructions": "items_human_ins",
        "reviews": "reviews",
    }
    contents = (data.items, data.attributes, data.human_instructions, data.reviews)
    for (key, name), content in zip(config.items(), contents, strict=True):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content))
        config[key] = str(path)
    return config


def test_webshops_own_files_are_read(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    own = make_env("webshop", files)
    assert [play(own, seed) for seed in range(5)] == [play(WebShop(), seed) for seed in range(5)]  # type: ignore[arg-type]
    assert own._shop is make_env("webshop", files)._shop, "the catalogue is loaded again"  # type: ignore[attr-defined]
    few = make_env("webshop", {**files, "numProducts": 20, "goals": "synthetic"})
    assert len(few._shop.products) == 20  # type: ignore[attr-defined]


def test_odd_products_of_the_files_are_read_as_webshop_reads_them(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    items = json.loads(Path(files["items"]).read_text())
    odd = {
        **items[0],
        "asin": "B0ODD00001",
        "pricing": None,
        "small_description": "One line",
        "full_description": None,
    }
    odd |= {
        "customization_options": {"Color": [{"value": " Navy/Blue ", "image": None}], "Style": None}
    }
    Path(files["items"]).write_text(
        json.dumps([odd, odd, {**odd, "asin": "nan"}, {**odd, "asin": "TOOLONGASIN"}, *items[:3]])
    )
    [product, *others] = make_env("webshop", files)._shop.products  # type: ignore[attr-defined]
    assert len(others) == 3
    assert (product.price, product.price_tag) == (100.0, "$100.0")
    assert (product.features, product.description) == (("One line",), "")
    assert product.options == {"color": ("navy | blue",)}
    assert product.attributes == ("DUMMY_ATTR",)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"items": "nowhere.json"}, "attributes is missing|items: cannot read nowhere.json"),
        ({"reviews": "reviews.json"}, "items is missing"),
        ({"goals": "robot"}, "goals must be human or synthetic"),
        ({"observationMode": "html"}, "observationMode must be text or text_rich"),
        ({"resultsPerPage": 0}, "resultsPerPage must be at least 1"),
        ({"trainGoals": [0, 500]}, "trainGoals must be"),
    ],
)
def test_bad_configs_are_refused_by_key(config: dict[str, object], message: str) -> None:
    with pytest.raises(EnvConfigError, match=message):
        make_env("webshop", config)


def test_a_catalogue_without_goals_is_refused(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    Path(files["humanInstructions"]).write_text("{}")
    with pytest.raises(EnvConfigError, match="200 products have 0 human goals"):
        make_env("webshop", files)


@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_every_text_is_made_of_the_vocabulary(mode: str) -> None:
    env = WebShop(observation_mode=mode)  # type: ignore[arg-type]
    words = set(env.vocabulary())
    longest = max(map(len, words))
    for seed in range(20):
        seen = play(env, seed)
        for text in [seen[0], *seen[1::4], *seen[2::4]]:
            pieces, at = 0, 0
            while at < len(text):
                size = next(size for size in range(longest, 0, -1) if text[at : at + size] in words)
                pieces, at = pieces + 1, at + size
            assert pieces < 10 + len(text) / 2
