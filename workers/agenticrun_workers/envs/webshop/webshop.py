"""WebShop as an environment: actions in, pages out, and WebShop's score for the purchase.

The moves of a visit are WebShop's. Among them: a search works on every page; going back from a
product forgets its options; going back to the search forgets everything; there is always one more
page of results, which may be empty.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from agenticrun_workers.envs.env import StepResult, register_env
from agenticrun_workers.envs.webshop import pages
from agenticrun_workers.envs.webshop.goals import (
    FUNCTION_WORDS,
    PRICE_LIMIT,
    Goal,
    Reward,
    Split,
    reward,
)
from agenticrun_workers.envs.webshop.pages import ObservationMode, Page
from agenticrun_workers.envs.webshop.products import Product
from agenticrun_workers.envs.webshop.shop import Files, GoalKind, SearchEngine, Shop, shared_shop
from agenticrun_workers.types import Stream


@dataclass
class Visit:
    """A visit to the shop, from the search page to the purchase.

    Args:
        goal: what to buy.
        products: everything on sale.
        engine: finds positions in `products`.
        per_page: results on a page.
        show_attributes: whether products have a page of their attributes.
    """

    goal: Goal
    products: Sequence[Product]
    engine: SearchEngine
    per_page: int
    show_attributes: bool
    results: tuple[int, ...] | None = None
    """Positions of the products found; None before the first search."""
    page_number: int = 1
    product: Product | None = None
    options: dict[str, str] = field(default_factory=dict)
    sub_page: str | None = None
    seen: set[str] = field(default_factory=set)
    bought: Reward | None = None

    def page(self) -> Page:
        """Return the page that the customer sees."""
        instruction = self.goal.instruction
        if self.bought is not None:
            return pages.done_page(self.bought.total)
        if self.results is None:
            return pages.search_page(instruction)
        if self.product is None:
            return pages.results_page(
                instruction, self._found(), self.page_number, len(self.results), self.seen
            )
        if self.sub_page is None:
            return pages.item_page(instruction, self.product, self.options, self.show_attributes)
        return pages.sub_page(instruction, self.product, self.sub_page)

    def search(self, query: str) -> None:
        """Search for these words."""
        self.results = self.engine.search(query)
        self._leave_product()
        self.page_number = 1

    def click(self, target: str) -> None:
        """Click one of the page's `clickables`."""
        names = {name.lower(): name for name in pages.SUB_PAGES}
        if target == pages.BACK_TO_SEARCH.lower():
            self.results, self.seen = None, set()
            self._leave_product()
        elif self.product is None:
            if target == pages.NEXT.lower():
                self.page_number += 1
            elif target == pages.PREVIOUS.lower():
                self.page_number -= 1
            else:
                self.product = next(
                    product for product in self._found() if product.asin.lower() == target
                )
                self.seen.add(self.product.asin)
        elif target == pages.BUY.lower():
            self.bought = reward(self.product, self.goal, self.options)
        elif target == pages.PREVIOUS.lower():
            if self.sub_page is not None:
                self.sub_page = None
            else:
                self._leave_product()
        elif target in names:
            self.sub_page = names[target]
        else:
            name = [name for name, values in self.product.options.items() if target in values][-1]
            self.options[name] = target

    def _leave_product(self) -> None:
        self.product, self.sub_page, self.options = None, None, {}

    def _found(self) -> list[Product]:
        first = (self.page_number - 1) * self.per_page
        return [
            self.products[position]
            for position in (self.results or ())[first : first + self.per_page]
        ]


ACTION = re.compile(r"\s*(search|click)\[(.+)\]", re.IGNORECASE | re.DOTALL)

INSTRUCTION = (
    "You are shopping on a web page. Find the product that the instruction describes, choose its "
    "options and buy it. "
    "Answer with one action: search[words] or click[something on the page]."
)

FAST_CATALOGUE = 10_000
"""Products up to which a search takes microseconds, so that a step needs no thread."""

LARGEST_VOCABULARY = 2_000
"""Products up to which `vocabulary` lists the words of the shop for a tiny model."""


@register_env("webshop")
class WebShop:
    """An environment that plays one episode at a time; instances of a process share the shop.

    Args:
        items, attributes, human_instructions, reviews: paths of WebShop's data files
            (items_shuffle*.json, items_ins_v2*.json, items_human_ins.json, reviews.json). Without
            `items`, a small made-up catalogue is sold.
        num_products: use only the first ones of the file.
        goals: `human` (instructions that people wrote) or `synthetic` (attributes and every
            combination
            of options).
        train_goals, validation_goals: [first, end] of the goals in WebShop's order. Default:
            training
            from 1500 on and validation on WebShop's test goals, 0 to 499; with fewer goals the
            first
            fifth is for validation and the rest for training.
        observation_mode: `text` ("... [SEP] ...") or `text_rich` (one thing per line, marked
            buttons).
        show_attributes: products have a page of their attributes, which makes the task easier.
        list_actions: end each observation with the available actions.
        results_per_page: WebShop's is 10.
        search_results: maximum number of results of a search.
        instruction: text of the first prompt; the default explains the task.
    """

    def __init__(
        self,
        *,
        items: str | None = None,
        attributes: str | None = None,
        human_instructions: str | None = None,
        reviews: str | None = None,
        num_products: int | None = None,
        goals: GoalKind = "human",
        train_goals: Sequence[int] | None = None,
        validation_goals: Sequence[int] | None = None,
        observation_mode: ObservationMode = "text",
        show_attributes: bool = False,
        list_actions: bool = True,
        results_per_page: int = 10,
        search_results: int = 50,
        instruction: str = INSTRUCTION,
    ) -> None:
        if items is None and (attributes or human_instructions or reviews):
            raise ValueError("items is missing: the other files belong to it")
        if goals not in ("human", "synthetic"):
            raise ValueError(f"goals must be human or synthetic, not {goals!r}")
        if observation_mode not in ("text", "text_rich"):
            raise ValueError(f"observationMode must be text or text_rich, not {observation_mode!r}")
        for key, number in (
            ("numProducts", num_products),
            ("resultsPerPage", results_per_page),
            ("searchResults", search_results),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{key} must be at least 1, not {number}")
        self.instruction = instruction
        self._shop = shared_shop(
            Files(items, attributes, human_instructions, reviews, num_products),
            goals,
            search_results,
        )
        self._split = Split.of(len(self._shop.goals), train_goals, validation_goals)
        self._mode = observation_mode
        self._show_attributes = show_attributes
        self._list_actions = list_actions
        self._per_page = results_per_page
        self.blocking = len(self._shop.products) > FAST_CATALOGUE
        self._visit = self._visit_for(self._split.train.start)
        self._page = self._visit.page()

    def reset(self, seed: int, split: Stream) -> str:
        """Begin with one of the split's goals, all equally likely.

        Deterministic in (seed, split, configuration).
        """
        goals = self._split.validation if split is Stream.VALIDATION else self._split.train
        self._visit = self._visit_for(goals[int(np.random.default_rng(seed).integers(len(goals)))])
        self._page = self._visit.page()
        return self._observation()

    def step(self, action: str) -> StepResult:
        """Search or click; see `StepResult`.

        An action that the page does not have changes nothing. Buying ends the episode.
        """
        before = self._page
        valid = self._act(action)
        self._page = self._visit.page()
        bought = self._visit.bought
        return StepResult(
            self._observation(),
            bought.total if bought else 0.0,
            terminated=bought is not None,
            metrics={
                "action_is_valid": float(valid),
                "action_is_effective": float(self._page != before),
                "num_actions": 1.0,
                "bought": float(bought is not None),
                "success": float(bought is not None and bought.total == 1),
            },
            info={"reward": bought} if bought else {},
        )

    def valid_actions(self) -> list[str]:
        """Return every click, or on the search page searches for words of the instruction.

        Searches are one word or two neighbouring ones.
        """
        if not self._page.has_search_bar:
            return [f"click[{target}]" for target in self._page.clickables()]
        wish = self._visit.goal.instruction.lower().partition(PRICE_LIMIT)[0]
        words = [word for word in re.findall(r"\w+", wish) if word not in FUNCTION_WORDS]
        return [
            f"search[{query}]" for query in dict.fromkeys([*words, *map(" ".join, pairwise(words))])
        ]

    def vocabulary(self) -> list[str]:
        """Return the words of the shop, if it is small enough for a tiny model."""
        return (
            shop_words(self._shop, self._mode)
            if len(self._shop.products) <= LARGEST_VOCABULARY
            else []
        )

    def _visit_for(self, goal: int) -> Visit:
        shop = self._shop
        return Visit(
            shop.goals[goal], shop.products, shop.engine, self._per_page, self._show_attributes
        )

    def _act(self, action: str) -> bool:
        """Do what the answer says. Returns False if the page has no such action."""
        match = ACTION.match(action)
        if match is None or self._visit.bought is not None:
            return False
        target = match[2].lower()
        if match[1].lower() == "search":
            self._visit.search(target)
            return True
        if target not in self._page.clickables():
            return False
        self._visit.click(target)
        return True

    def _observation(self) -> str:
        text = self._page.write(self._mode)
        if not self._list_actions or self._visit.bought is not None:
            return text
        actions = (
            ["search[words]"]
            if self._page.has_search_bar
            else [f"click[{target}]" for target in self._page.clickables()]
        )
        return f"{text}\nAvailable actions: {', '.join(actions)}"


def shop_words(shop: Shop, mode: ObservationMode) -> list[str]:
    """Return the pieces that form every page and every action of this shop.

    They are words, with and without the space before them, as they stand and in lower case, and
    every
    single character that may occur.
    """
    written = [pages.search_page(goal.instruction) for goal in shop.goals]
    written.append(pages.done_page(0.0))
    for product in shop.products:
        written.append(pages.results_page("", [product], 2, 0, {product.asin}))
        written.append(pages.item_page("", product, {}, show_attributes=True))
        written += [pages.sub_page("", product, name) for name in pages.SUB_PAGES]
    texts = [page.write(mode) for page in written]
    found: dict[str, None] = dict.fromkeys(string.printable)
    for text in [*texts, "search click Available actions clicked You have"]:
        for case in (text, text.lower()):
            found |= dict.fromkeys(case)
            for piece in re.findall(r" ?[^\W_]+", case):
                found |= {piece: None, piece.lstrip(): None}
    return list(found)
