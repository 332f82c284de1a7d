"""Products, as WebShop's own data files describe them.

`items_shuffle*.json` is a list of scraped products, `items_ins_v2*.json` maps an ASIN to the
attributes found for it, and `reviews.json`, which is optional, is a list of reviews by ASIN. Fields
that the text mode never shows are dropped.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""WebShop's attributes of products without attributes."""

LONGEST_ASIN = 10

CATEGORY_SEPARATOR = "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}"


@dataclass(frozen=True, slots=True)
class Review:
    """A customer's review."""

    title: str
    score: str
    body: str


@dataclass(frozen=True, slots=True)
class Product:
    """One product on sale."""

    asin: str
    title: str
    description: str
    features: tuple[str, ...]
    price: float
    """Price of a purchase in dollars."""
    price_tag: str
    """Price on the pages: one price, or a range."""
    options: Mapping[str, tuple[str, ...]]
    """Values by name, all in lower case."""
    attributes: tuple[str, ...]
    category: str
    query: str
    """The search that the product was scraped with, which stands for its kind."""
    product_category: str
    """A path of categories, joined by `CATEGORY_SEPARATOR`."""
    rating: str = "N.A."
    reviews: tuple[Review, ...] = ()


def read_products(
    items: Iterable[Mapping[str, Any]],
    attributes: Mapping[str, Mapping[str, Any]],
    reviews: Iterable[Mapping[str, Any]] = (),
) -> list[Product]:
    """Return the products of WebShop's files, in order.

    Entries without a valid ASIN are left out, and so is a second entry with the same ASIN.
    """
    reviews_of = {entry["asin"]: entry for entry in reviews}
    products: dict[str, Product] = {}
    for item in items:
        asin = item["asin"]
        if asin != "nan" and len(asin) <= LONGEST_ASIN and asin not in products:
            products[asin] = _product(item, attributes.get(asin, {}), reviews_of.get(asin, {}))
    return list(products.values())


def draw(purpose: str, asin: str) -> float:
    """Return a number in [0, 1) that belongs to a product.

    WebShop draws such numbers again in every process.
    """
    digest = hashlib.sha256(f"webshop:{purpose}:{asin}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _product(
    item: Mapping[str, Any], attributes: Mapping[str, Any], reviews: Mapping[str, Any]
) -> Product:
    price, tag = _price(item["asin"], item.get("pricing") or "")
    features = item["small_description"]
    written = tuple(
        Review(
            title=str(each.get("title", "")),
            score=str(each.get("score", each.get("stars", ""))),
            body=str(each.get("review", each.get("body", ""))),
        )
        for each in reviews.get("reviews", ())
    )
    return Product(
        asin=item["asin"],
        title=item["name"],
        description=item["full_description"] or "",
        features=tuple(features if isinstance(features, list) else [features or ""]),
        price=price,
        price_tag=tag,
        options=_options(item.get("customization_options") or {}),
        attributes=tuple(attributes.get("attributes", NO_ATTRIBUTES)),
        category=item["category"],
        query=item["query"].lower().strip(),
        product_category=item["product_category"],
        rating=str(reviews.get("average_rating", "N.A.")),
        reviews=written,
    )


def _price(asin: str, pricing: str) -> tuple[float, str]:
    """Return price and price tag.

    `$10.00 - $20.00` becomes a price in between that is the same in every process.
    """
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:]]
    if not prices:
        return 100.0, "$100.0"
    if len(prices) == 1:
        return prices[0], f"${prices[0]}"
    low, high = prices[:2]
    return low + (high - low) * draw("price", asin), f"${low} to ${high}"


def _options(
    contents: Mapping[str, Sequence[Mapping[str, Any]] | None],
) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in contents.items()
        if values is not None
    }
