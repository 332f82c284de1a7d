"""The shop's search: BM25 with the settings of Lucene's index in WebShop (k1 0.9, b 0.4), by bm25s.

Words are folded like Lucene's English analyser does it, but for the stemmer: plurals only (Harman's S stemmer).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agenticrun_workers.envs.webshop.products import Product

K1 = 0.9
B = 0.4

REMEMBERED_QUERIES = 4096
"""Members of a group play the same goal, and search for the same words."""

_STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will
    with"""
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""Lucene's."""


class SearchEngine:
    """An index of products; safe to use from many threads.

    Args:
        products: in the order that decides between equal scores.
        limit: results per search.
    """

    def __init__(self, products: Sequence[Product], limit: int) -> None:
        import bm25s  # it imports numba, which nobody who does not search should wait for

        self._index = bm25s.BM25(k1=K1, b=B, method="lucene")
        self._index.index(
            [words(document(product)) or [""] for product in products], show_progress=False
        )
        self._limit = limit
        self.search = lru_cache(REMEMBERED_QUERIES)(self._search)

    def _search(self, query: str) -> tuple[int, ...]:
        """Positions of the best products that have any of the words, best first."""
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
    """What is searched of a product: WebShop's choice of fields."""
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
    """The words of a text as they are indexed."""
    return [singular(word) for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def singular(word: str) -> str:
    """A word without the ending of its plural (Harman 1991): ies to y, es to e, s to nothing."""
    if len(word) > 3 and word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if len(word) > 3 and word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    if len(word) > 3 and word.endswith("s") and not word.endswith(("us", "ss")):
        return word[:-1]
    return word
