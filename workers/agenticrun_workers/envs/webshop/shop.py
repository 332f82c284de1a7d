"""A shop: products on sale, the search over them, and the goals. Loaded once per process and never changed."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agenticrun_workers.envs.webshop import made_up
from agenticrun_workers.envs.webshop.goals import Goal, human_goals, synthetic_goals
from agenticrun_workers.envs.webshop.products import Product, read_products
from agenticrun_workers.envs.webshop.search import SearchEngine

GoalKind = Literal["human", "synthetic"]


@dataclass(frozen=True, slots=True)
class Files:
    """WebShop's data files by path; without `items` the made-up catalogue is sold."""

    items: str | None = None
    """`items_shuffle*.json`"""
    attributes: str | None = None
    """`items_ins_v2*.json`"""
    human_instructions: str | None = None
    """`items_human_ins.json`"""
    reviews: str | None = None
    """`reviews.json`"""
    num_products: int | None = None
    """Only the first ones; the file is shuffled."""


@dataclass(frozen=True, slots=True)
class Shop:
    """See the module's docstring."""

    products: Sequence[Product]
    goals: Sequence[Goal]
    engine: SearchEngine


_shops: dict[tuple[Files, GoalKind, int], Shop] = {}
_loading = threading.Lock()


def shared_shop(files: Files, goals: GoalKind, search_limit: int) -> Shop:
    """The shop of these files, loaded by the first who asks. Raises `ValueError` if a file is missing or has no goals."""
    key = (files, goals, search_limit)
    with _loading:
        if key not in _shops:
            _shops[key] = _load(files, goals, search_limit)
        return _shops[key]


def _load(files: Files, kind: GoalKind, search_limit: int) -> Shop:
    if files.items is None:
        data = made_up.catalogue()
        items, attributes, instructions, reviews = (
            data.items,
            data.attributes,
            data.human_instructions,
            data.reviews,
        )
    else:
        items = _read("items", files.items)
        attributes = _read("attributes", files.attributes)
        instructions = (
            _read("humanInstructions", files.human_instructions) if kind == "human" else {}
        )
        reviews = _read("reviews", files.reviews) if files.reviews else []
    products = read_products(items[: files.num_products], attributes, reviews)
    goals = (
        human_goals(products, instructions)
        if kind == "human"
        else synthetic_goals(products, attributes)
    )
    if len(goals) < 2:
        raise ValueError(
            f"items: {len(products)} products have {len(goals)} {kind} goals: at least 2 are needed, to train and to validate"
        )
    return Shop(products, goals, SearchEngine(products, search_limit))


def _read(key: str, path: str | None) -> Any:
    if path is None:
        raise ValueError(
            f"{key} is missing: a catalogue of one's own needs items, attributes, and humanInstructions for human goals"
        )
    try:
        with open(path, encoding="utf-8") as file:
            data: list[Any] | Mapping[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: {path} is no JSON file that can be read: {error}") from error
    return data
