"""WebShop's reward against the paper's formula, with our own token set ratio, and its goals."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agenticrun_workers.envs.webshop import made_up
from agenticrun_workers.envs.webshop.goals import (
    NO_LIMIT,
    Goal,
    Split,
    content_words,
    human_goals,
    option_text,
    reward,
    same_text,
    synthetic_goals,
    type_reward,
)
from agenticrun_workers.envs.webshop.products import CATEGORY_SEPARATOR, Product, read_products

DATA = made_up.catalogue()
PRODUCTS = read_products(DATA.items, DATA.attributes, DATA.reviews)


def product(
    title: str = "Alder Wool Socks",
    query: str = "wool socks",
    path: str = "A > B > C",
    **others: Any,
) -> Product:
    fields: dict[str, Any] = {
        "description": "",
        "features": (),
        "price": 10.0,
        "price_tag": "$10.0",
        "options": {},
        "attributes": (),
        "category": "fashion",
    }
    return Product(
        "B000000001",
        title,
        query=query,
        product_category=path.replace(">", CATEGORY_SEPARATOR),
        **{**fields, **others},
    )


def goal(
    title: str = "Alder Wool Socks",
    query: str = "wool socks",
    path: str = "A > B > C",
    options: Sequence[tuple[str, str]] = (),
) -> Goal:
    return Goal(
        "B000000001",
        "",
        ("warm", "thick"),
        tuple(options),
        20.0,
        title,
        query,
        path.replace(">", CATEGORY_SEPARATOR),
    )


def longest_common_subsequence(one: str, other: str) -> int:
    row = [0] * (len(other) + 1)
    for a in one:
        above = 0
        for column, b in enumerate(other, 1):
            above, row[column] = (
                row[column],
                above + 1 if a == b else max(row[column], row[column - 1]),
            )
    return row[-1]


def token_set_ratio(one: str, other: str) -> float:
    """Return the best similarity of the common words and of these with the rest of each text."""
    words = [
        set(re.sub(r"[^a-z0-9]", " ", re.sub(r"[^\x00-\x7f]", "", text).lower()).split())
        for text in (one, other)
    ]
    if not all(words):
        return 0.0
    common = words[0] & words[1]
    if common and (words[0] <= words[1] or words[1] <= words[0]):
        return 100.0
    base = " ".join(sorted(common))
    first, second = (" ".join([*([base] if base else []), *sorted(own - common)]) for own in words)
    pairs = [(first, second)] + ([(base, first), (base, second)] if base else [])
    return max(200 * longest_common_subsequence(a, b) / (len(a) + len(b)) for a, b in pairs)


TEXTS = st.lists(
    st.sampled_from(
        [
            "tea tree",
            "essential",
            "oils",
            "oil",
            "pack of 12",
            "XL",
            "é-cru",
            "navy|blue",
            "",
            "6 feet",
        ]
    ),
    max_size=4,
)


@given(TEXTS.map(" ".join), TEXTS.map(" ".join))
def test_texts_are_the_same_above_a_token_set_ratio_of_85(one: str, other: str) -> None:
    assert same_text(one, other) == (round(token_set_ratio(one, other)) > 85)


@given(st.text("abc ", max_size=12), st.text("abc ", max_size=12))
def test_so_are_texts_that_nearly_agree(one: str, other: str) -> None:
    assert same_text(one, other) == (round(token_set_ratio(one, other)) > 85)


@pytest.mark.parametrize(
    ("one", "other", "same"), [("aaaaab", "aaaaac", False), ("aaaaaab", "aaaaaac", True)]
)
def test_83_percent_is_different_and_86_percent_is_the_same(
    one: str, other: str, same: bool
) -> None:
    assert same_text(one, other) is same


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        (product(), goal(), 1.0),
        (product(query="other", path="X > Y"), goal(), 1.0),  # the title alone is enough
        (
            product(title="Wool " + "a1 b1 c1"),
            goal("Wool s t u v w"),
            1.0,
        ),  # a sixth of the words, but the same query
        (
            product(title="Wool", query="other"),
            goal("Wool s t u v w"),
            1.0,
        ),  # or two categories in common
        (product(title="Wool", query="other", path="A > X"), goal("Wool s t u v w"), 0.5),
        (
            product(title="Wool", query="other", path="A > A > X"),
            goal("Wool s t u v w", path="A > A > B"),
            0.5,
        ),  # one twice is one
        (
            product(title="Wool"),
            goal("Wool d e f g h j k l m n"),
            0.1,
        ),  # a tenth is too little, whatever the query
        (product(title="Lamp"), goal(), 0.0),
        (
            product(title="Lamp", query="other", path="X"),
            goal("12 of the 3"),
            0.5,
        ),  # no words to compare: as if a fifth agreed
    ],
)
def test_the_type_counts_content_words_query_and_categories(
    found: Product, wanted: Goal, expected: float
) -> None:
    assert type_reward(found, wanted) == expected


def test_content_words_are_no_numbers_and_no_function_words() -> None:
    assert content_words("Pack of 12 USB-C Cables (6 ft), for the 4K Player") == [
        "pack",
        "usb-c",
        "cables",
        "ft",
        "4k",
        "player",
    ]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("", "navy blue", "blue"),  # the first in the alphabet, as in WebShop
        ("", "XL", "XL"),
        ("color", "navy", "navy"),
        ("color", "navy blue", "color navy blue"),
        ("size", "6 feet", "size 6 feet"),
    ],
)
def test_goal_options_are_compared_as_colours_or_texts(
    name: str, value: str, expected: str
) -> None:
    assert option_text(name, value) == expected


def test_each_part_of_the_reward_counts_as_the_formula_says() -> None:
    wanted = goal(options=(("color", "navy"), ("size", "large")))
    found = product(attributes=("warm",), features=("Thick and soft",))
    everything = reward(found, wanted, {"color": "true navy", "size": "large"})
    assert (
        everything.total,
        everything.type,
        everything.attributes,
        everything.options,
        everything.price,
    ) == (1, 1, 1, 1, 1)
    assert reward(found, wanted, {"color": "true navy"}).total == 4 / 5
    assert reward(product(attributes=("warm",)), wanted, {}).total == 2 / 5
    assert reward(product(price=20.5), wanted, {}).total == 0
    assert reward(product(price=20.0), wanted, {}).total == 1 / 5
    assert reward(product(title="Lamp", attributes=("warm", "thick")), wanted, {}).total == 0
    assert reward(found, goal(), {"color": "red"}).options is None


@given(
    st.sampled_from(PRODUCTS),
    st.sampled_from(human_goals(PRODUCTS, DATA.human_instructions)),
    st.randoms(use_true_random=False),
)
def test_rewards_of_the_catalogue_follow_the_papers_formula(
    found: Product, wanted: Goal, rng: random.Random
) -> None:
    chosen = {
        name: rng.choice(values) for name, values in found.options.items() if rng.random() < 0.7
    }
    attributes = sum(attribute in found.attributes for attribute in wanted.attributes)
    options = sum(
        any(token_set_ratio(value, text) > 85 for text in chosen.values())
        for _, value in wanted.options
    )
    match = (attributes + options + (found.price <= wanted.price_upper)) / (
        len(wanted.attributes) + len(wanted.options) + 1
    )
    assert reward(found, wanted, chosen).total == pytest.approx(type_reward(found, wanted) * match)


def test_the_right_product_with_the_right_options_is_worth_one() -> None:
    by_asin = {product.asin: product for product in PRODUCTS}
    for wanted in [
        *human_goals(PRODUCTS, DATA.human_instructions),
        *synthetic_goals(PRODUCTS, DATA.attributes),
    ]:
        options = {
            name or str(number): value for number, (name, value) in enumerate(wanted.options)
        }
        assert reward(by_asin[wanted.asin], wanted, options).total == 1


def test_synthetic_goals_are_all_combinations_of_options_in_webshops_order() -> None:
    goals = synthetic_goals(PRODUCTS, DATA.attributes)
    per_product = [len(list(_combinations(product))) for product in PRODUCTS]
    assert len(goals) == sum(per_product) == len({goal.instruction + goal.asin for goal in goals})
    assert len({goal.asin for goal in goals[:50]}) > 25, "the goals are not shuffled"
    socks = next(goal for goal in goals if goal.query == "wool socks")
    names = [name for name, _ in socks.options]
    assert names == sorted(names)
    assert all(f"{name}: {value}" in socks.instruction for name, value in socks.options)


def _combinations(product: Product) -> list[int]:
    count = 1
    for values in product.options.values():
        count *= len(values)
    return list(range(count))


def test_price_limits_are_tens_above_the_price_and_said_in_the_instruction() -> None:
    prices = {product.asin: product.price for product in PRODUCTS}
    for wanted in human_goals(PRODUCTS, DATA.human_instructions):
        tens = [ten for ten in range(10, 1000, 10) if ten > prices[wanted.asin]][1:4]
        assert wanted.price_upper in tens
        assert wanted.instruction.endswith(
            f", and price lower than {wanted.price_upper:.2f} dollars"
        )


def test_dear_products_have_no_price_limit() -> None:
    dear = {**DATA.items[0], "pricing": "$1,985.50"}
    [bought] = read_products([dear], DATA.attributes)
    [wanted] = human_goals([bought], DATA.human_instructions)
    assert (bought.price, wanted.price_upper) == (1985.5, NO_LIMIT)
    assert "price lower" not in wanted.instruction


@pytest.mark.parametrize(
    ("goals", "train", "validation", "expected"),
    [
        (12087, None, None, (range(1500, 12087), range(500))),
        (1500, None, None, (range(300, 1500), range(300))),
        (2, None, None, (range(1, 2), range(1))),
        (12087, None, (500, 1500), (range(1500, 12087), range(500, 1500))),
        (100, (50, 100), (0, 50), (range(50, 100), range(50))),
    ],
)
def test_splits_are_webshops_ranges_or_the_ones_asked_for(
    goals: int,
    train: Sequence[int] | None,
    validation: Sequence[int] | None,
    expected: tuple[range, range],
) -> None:
    split = Split.of(goals, train, validation)
    assert (split.train, split.validation) == expected


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ((0, 60), (50, 100), "share goals 50 to 59"),
        ((90, 101), None, "trainGoals must be"),
        (None, (5, 5), "validationGoals must be"),
        ([3], None, "trainGoals must be"),
    ],
)
def test_splits_that_share_goals_or_do_not_exist_are_refused(
    train: Sequence[int] | None, validation: Sequence[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Split.of(100, train, validation)
