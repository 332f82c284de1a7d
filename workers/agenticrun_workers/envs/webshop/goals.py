"""Goals of customers: instructions that people wrote, or that combine a product's options.

The order of the goals is WebShop's, so an index means the same goal as there, and so do its ranges
for training and evaluation. WebShop draws upper price limits again in every process; here they are
drawn from the goal itself.

The reward says how well a purchase matches the goal (Yao et al. 2022, arXiv 2207.01206, section
3.1):

    r = r_type * (matched attributes + matched options + price fits) / (attributes + options + 1)

Texts are compared as WebShop does: rapidfuzz's token set ratio after thefuzz's cleaning, rounded,
above 85. The type compares titles by their content words, where WebShop takes the words that a
spaCy model calls nouns.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.utils import default_process

from agenticrun_workers.envs.webshop.products import CATEGORY_SEPARATOR, Product, draw

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


SAME_ABOVE = 85
"""Token set ratio of texts that mean the same."""

_COLOURS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
    burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
    cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia
    gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender
    lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red
    rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower
    tan taupe teal tiger turquoise violet walnut wheat white wine yellow"""
COLOURS = tuple(_COLOURS.split())
"""The colours that WebShop reduces an option to, in its order: the first one found counts."""

_FUNCTION_WORDS = """
    a an and any are as at be by for from has have if in into is it its not of off on or our out
    over per so than that the their these this those to under up us w was we will with without
    you your"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())


@dataclass(frozen=True, slots=True)
class Reward:
    """The parts of a reward, each in [0, 1]."""

    total: float
    type: float
    attributes: float
    options: float | None
    """None if the goal asks for no option."""
    price: float


def reward(product: Product, goal: Goal, options: Mapping[str, str]) -> Reward:
    """Return the reward for buying `product` with these options (values by name)."""
    attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    wanted = [option_text(name, value) for name, value in goal.options]
    matched = matched_options(wanted, map(colour_or_text, options.values()))
    affordable = product.price <= goal.price_upper
    kind = type_reward(product, goal)
    total = kind * (attributes + matched + affordable) / (len(goal.attributes) + len(wanted) + 1)
    return Reward(
        total,
        kind,
        attributes / len(goal.attributes),
        matched / len(wanted) if wanted else None,
        float(affordable),
    )


def type_reward(product: Product, goal: Goal) -> float:
    """Return how alike the kinds of two products are: 1, 0.5, 0.1 or 0."""
    wanted = content_words(goal.title)
    score = len({*content_words(product.title)} & {*wanted}) / len(wanted) if wanted else 0.2
    if score == 0:
        return 0.0
    if score < 0.1:
        return 0.1
    same_category = (
        len(_categories(product.product_category) & _categories(goal.product_category)) >= 2
    )
    return 1.0 if product.query == goal.query or same_category or score > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    """Return whether the product has nearly this attribute, or its texts contain it."""
    return any(same_text(own, attribute) for own in product.attributes) or any(
        attribute in text.lower()
        for text in (product.title, " ".join(product.features), product.description)
    )


def matched_options(wanted: Iterable[str], chosen: Iterable[str]) -> int:
    """Return how many of the wanted options are among the chosen ones."""
    texts = list(chosen)
    return sum(any(same_text(text, option) for text in texts) for option in wanted)


def same_text(one: str, other: str) -> bool:
    """Return whether two texts have nearly the same words, or one has all words of the other."""
    return round(fuzz.token_set_ratio(_cleaned(one), _cleaned(other))) > SAME_ABOVE


def colour_or_text(text: str) -> str:
    """Return the first known colour in a text, or else the text."""
    return next((colour for colour in COLOURS if colour in text), text)


def option_text(name: str, value: str) -> str:
    """Return the text that a goal's option is compared as.

    With a name it is a colour only if name or value is exactly that colour, as in WebShop.
    """
    if not name:
        return colour_or_text(value)
    return next((colour for colour in COLOURS if colour in (name, value)), f"{name} {value}")


def content_words(title: str) -> list[str]:
    """Return the words of a title in lower case, without numbers and function words."""
    words = re.findall(r"\w[\w.'-]*", title.lower())
    return [word for word in words if word not in FUNCTION_WORDS and re.search(r"[^\W\d_]", word)]


def _cleaned(text: str) -> str:
    return default_process(text.encode("ascii", "ignore").decode())


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split(CATEGORY_SEPARATOR)}
