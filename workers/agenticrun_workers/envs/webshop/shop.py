"""A shop: products, a search over them, and goals. Loaded once per process and never changed."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from agenticrun_workers.envs.webshop import made_up
from agenticrun_workers.envs.webshop.goals import Goal, human_goals, synthetic_goals
from agenticrun_workers.envs.webshop.products import Product, read_products

log = logging.getLogger(__name__)

K1 = 0.9
B = 0.4

REMEMBERED_QUERIES = 4096
"""Cached searches: members of a group have the same goal and search for the same words."""

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Lucene's stop words."""


class SearchEngine:
    """An index of products; safe to use from many threads.

    Args:
        products: in the order that decides between equal scores.
        limit: maximum number of results.
    """

    def __init__(self, products: Sequence[Product], limit: int) -> None:
        import bm25s  # imports numba, which takes seconds: only for searches

        self._index = bm25s.BM25(k1=K1, b=B, method="lucene")
        self._index.index(
            [words(document(product)) or [""] for product in products], show_progress=False
        )
        self._limit = limit
        self.search = lru_cache(REMEMBERED_QUERIES)(self._search)

    def _search(self, query: str) -> tuple[int, ...]:
        """Return the positions of the best products with any of the words, best first."""
        known = self._index.get_tokens_ids(words(query))
        if not known:
            return ()
        scores = self._index.get_scores_from_ids(known)
        found = np.flatnonzero(scores > 0)
        if len(found) > self._limit:
            least = np.partition(scores[found], -self._limit)[-self._limit]
            found = found[scores[found] >= least]
        best = found[np.argsort(-scores[found], kind="stable")][: self._limit]
        return tuple(best.tolist())


def document(product: Product) -> str:
    """Return the text of a product that is searched: WebShop's choice of fields."""
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join(
        [
            product.title,
            product.description,
            product.features[0] if product.features else "",
            options,
        ]
    )


def words(text: str) -> list[str]:
    """Return the words of a text as they are indexed."""
    return [singular(word) for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def singular(word: str) -> str:
    """Return a word without its plural ending (Harman 1991): ies to y, es to e, s to nothing."""
    if len(word) > 3 and word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word


GoalKind = Literal["human", "synthetic"]


@dataclass(frozen=True, slots=True)
class Files:
    """Paths of WebShop's data files; without `items` the made-up catalogue is sold."""

    items: str | None = None
    """`items_shuffle*.json`"""
    attributes: str | None = None
    """`items_ins_v2*.json`"""
    human_instructions: str | None = None
    """`items_human_ins.json`"""
    reviews: str | None = None
    """`reviews.json`"""
    num_products: int | None = None
    """Use only the first ones; the file is shuffled."""


@dataclass(frozen=True, slots=True)
class Shop:
    """See the module's docstring."""

    products: Sequence[Product]
    goals: Sequence[Goal]
    engine: SearchEngine


_shops: dict[tuple[Files, GoalKind, int], Shop] = {}
_loading = threading.Lock()


def shared_shop(files: Files, goals: GoalKind, search_limit: int) -> Shop:
    """Return the shop of these files; the first call loads it.

    Raises `ValueError` if a file is missing or has no goals.
    """
    key = (files, goals, search_limit)
    with _loading:
        if key not in _shops:
            _shops[key] = _load(files, goals, search_limit)
        return _shops[key]


def _load(files: Files, kind: GoalKind, search_limit: int) -> Shop:
    if files.items is None:
        data = made_up.catalogue()
        log.warning(
            "a webshop without data files sells %d made-up products: name the real ones in "
            "spec.pipeline.envs[].config.items, attributes and humanInstructions",
            len(data.items),
        )
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
            f"items: {len(products)} products have {len(goals)} {kind} goals: at least 2 are "
            "needed, to train and to validate"
        )
    return Shop(products, goals, SearchEngine(products, search_limit))


def _read(key: str, path: str | None) -> Any:
    if path is None:
        raise ValueError(
            f"{key} is missing: your own catalogue needs items, attributes, and "
            "humanInstructions for human goals"
        )
    try:
        with open(path, encoding="utf-8") as file:
            data: list[Any] | Mapping[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: cannot read {path} as JSON: {error}") from error
    return data
