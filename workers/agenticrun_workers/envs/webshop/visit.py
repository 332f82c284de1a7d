"""A customer's visit to the shop: its state, and how searches and clicks change it.

The moves are WebShop's. Among them: a search works on every page; going back from a product forgets
its options; going back to the search forgets everything; there is always one more page of results,
which may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agenticrun_workers.envs.webshop import pages
from agenticrun_workers.envs.webshop.goals import Goal
from agenticrun_workers.envs.webshop.pages import Page
from agenticrun_workers.envs.webshop.products import Product
from agenticrun_workers.envs.webshop.reward import Reward, reward
from agenticrun_workers.envs.webshop.shop import SearchEngine


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
            self._click_result(target)
        elif target == pages.BUY.lower():
            self.bought = reward(self.product, self.goal, self.options)
        elif target == pages.PREVIOUS.lower():
            self._back()
        elif target in names:
            self.sub_page = names[target]
        else:
            name = [name for name, values in self.product.options.items() if target in values][-1]
            self.options[name] = target

    def _click_result(self, target: str) -> None:
        if target == pages.NEXT.lower():
            self.page_number += 1
        elif target == pages.PREVIOUS.lower():
            self.page_number -= 1
        else:
            self.product = next(
                product for product in self._found() if product.asin.lower() == target
            )
            self.seen.add(self.product.asin)

    def _back(self) -> None:
        if self.sub_page is not None:
            self.sub_page = None
        else:
            self._leave_product()

    def _leave_product(self) -> None:
        self.product, self.sub_page, self.options = None, None, {}

    def _found(self) -> list[Product]:
        first = (self.page_number - 1) * self.per_page
        return [
            self.products[position]
            for position in (self.results or ())[first : first + self.per_page]
        ]
