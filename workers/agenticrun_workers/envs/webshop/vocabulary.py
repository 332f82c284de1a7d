"""The words of a small shop, so that a tiny model can be made for it."""

from __future__ import annotations

import re
import string

from agenticrun_workers.envs.webshop import pages
from agenticrun_workers.envs.webshop.pages import ObservationMode
from agenticrun_workers.envs.webshop.shop import Shop


def shop_words(shop: Shop, mode: ObservationMode) -> list[str]:
    """Pieces that every page and every action of this shop is a concatenation of: words, with and without the space before
    them, as they stand and in lower case, and every single character that may occur.
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
