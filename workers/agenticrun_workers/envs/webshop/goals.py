"""Goals of customers: instructions that people wrote, or that combine a product's options.

The order of the goals is WebShop's, so an index means the same goal as there, and so do its ranges
for training and evaluation. WebShop draws upper price limits again in every process; here they are
drawn from the goal itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenticrun_workers.envs.webshop.products import Product, draw

NO_LIMIT = 1_000_000.0
"""The upper price of goals without a limit."""

PRICE_LIMIT = ", and price lower than "
"""Beginning of the price limit in an instruction."""

SHUFFLE_SEED = 233
"""WebShop's."""

TEST_GOALS = (0, 500)
TRAIN_GOALS_FROM = 1500
"""WebShop's ranges: 0 to 499 test, 500 to 1499 evaluate, the rest train."""

PARTS_OF_FEW = 5
"""With fewer goals, the first of this many equal parts is for validation."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A product to buy and the criteria for the reward."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    """Name and value; the name is empty where people wrote the goal."""
    price_upper: float
    title: str
    query: str
    product_category: str


@dataclass(frozen=True, slots=True)
class Split:
    """The goals for training and for validation, as index ranges."""

    train: range
    validation: range

    @classmethod
    def of(
        cls, goals: int, train: Sequence[int] | None = None, validation: Sequence[int] | None = None
    ) -> Split:
        """Return the ranges asked for, or WebShop's; with few goals the first fifth validates.

        Raises `ValueError`.
        """
        first = TEST_GOALS[1] if goals > TRAIN_GOALS_FROM else max(1, goals // PARTS_OF_FEW)
        default_train = (TRAIN_GOALS_FROM if goals > TRAIN_GOALS_FROM else first, goals)
        split = cls(
            _range("trainGoals", train or default_train, goals),
            _range("validationGoals", validation or (TEST_GOALS[0], first), goals),
        )
        shared = range(
            max(split.train.start, split.validation.start),
            min(split.train.stop, split.validation.stop),
        )
        if shared:
            raise ValueError(
                f"trainGoals and validationGoals share goals {shared.start} to {shared.stop - 1}: "
                "they must not overlap"
            )
        return split


def human_goals(
    products: Iterable[Product], instructions: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Goal]:
    """Return the goals of `items_human_ins.json` that have attributes, as in WebShop."""
    goals = []
    for product in products:
        for number, entry in enumerate(instructions.get(product.asin, ())):
            if entry["instruction_attributes"]:
                upper, limit = _price_limit(product, number)
                options = tuple(("", value) for value in entry["instruction_options"])
                goals.append(
                    _goal(
                        product,
                        entry["instruction"].strip(".") + limit,
                        entry["instruction_attributes"],
                        options,
                        upper,
                    )
                )
    return _shuffled(goals)


def synthetic_goals(
    products: Iterable[Product], attributes: Mapping[str, Mapping[str, Any]]
) -> list[Goal]:
    """Return one goal per combination of options.

    For every product that has an instruction in `items_ins_v2*.json`.
    """
    goals = []
    for product in products:
        entry = attributes.get(product.asin, {})
        if not entry.get("instruction") or not entry.get("instruction_attributes"):
            continue
        upper, limit = _price_limit(product, 0)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = tuple(zip(names, values, strict=True))
            wish = ", and ".join(f"{name}: {value}" for name, value in options)
            text = entry["instruction"] + (f" with {wish}" if wish else "") + limit
            goals.append(_goal(product, text, entry["instruction_attributes"], options, upper))
    return _shuffled(goals)


def _goal(
    product: Product,
    text: str,
    attributes: Sequence[str],
    options: tuple[tuple[str, str], ...],
    upper: float,
) -> Goal:
    return Goal(
        product.asin,
        text,
        tuple(attributes),
        options,
        upper,
        product.title,
        product.query,
        product.product_category,
    )


def _price_limit(product: Product, number: int) -> tuple[float, str]:
    """Return the upper price and the text that states it.

    It is the larger of two different limits among the next four multiples of ten above the price.
    """
    above = [ten for ten in range(10, 1000, 10) if ten > product.price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    pairs = list(itertools.combinations(above, 2))
    upper = float(max(pairs[int(draw(f"limit-{number}", product.asin) * len(pairs))]))
    return upper, f"{PRICE_LIMIT}{upper:.2f} dollars"


def _shuffled(goals: list[Goal]) -> list[Goal]:
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def _range(key: str, bounds: Sequence[int], goals: int) -> range:
    first, end = bounds if len(bounds) == 2 else (0, 0)
    if not 0 <= first < end <= goals:
        raise ValueError(
            f"{key} must be [first, end] with 0 <= first < end <= {goals}, the number of goals, "
            f"not {list(bounds)}"
        )
    return range(first, end)
