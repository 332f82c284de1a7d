"""A small catalogue of made-up products in WebShop's own format.

For tests, examples and tiny models. Twenty kinds of things, ten products each. Every product has
two of its kind's attributes, so that an instruction can name what distinguishes it from similar
products, and one or two options.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agenticrun_workers.envs.webshop.products import CATEGORY_SEPARATOR

PRODUCTS_PER_KIND = 10


class Kind(NamedTuple):
    """A kind of product: name, category, possible attributes, and options."""

    name: str
    category: str
    path: str
    attributes: str
    options: dict[str, str]


SIZES = {"size": "small, medium, large"}
KINDS = (
    Kind(
        "wool socks",
        "fashion",
        "Clothing > Men > Socks",
        "machine washable, cushioned sole, quick drying",
        SIZES | {"color": "grey, navy"},
    ),
    Kind(
        "running shoes",
        "fashion",
        "Clothing > Shoes > Running",
        "rubber sole, arch support, lace up",
        {"size": "8, 9, 10", "color": "black, red"},
    ),
    Kind(
        "rain jacket",
        "fashion",
        "Clothing > Women > Jackets",
        "water resistant, drawstring hood, light weight",
        SIZES | {"color": "teal, olive"},
    ),
    Kind(
        "linen shirt",
        "fashion",
        "Clothing > Men > Shirts",
        "button closure, long sleeve, hand wash",
        SIZES | {"color": "white, blue"},
    ),
    Kind(
        "green tea",
        "grocery",
        "Food > Beverages > Tea",
        "sugar free, caffeine free, individually wrapped",
        {"flavor name": "mint, lemon, jasmine"},
    ),
    Kind(
        "oat cookies",
        "grocery",
        "Food > Snacks > Cookies",
        "gluten free, low sodium, non gmo",
        {"flavor name": "chocolate, raisin, ginger"},
    ),
    Kind(
        "olive oil",
        "grocery",
        "Food > Pantry > Oils",
        "cold pressed, dairy free, fat free",
        {"size": "250 ml, 500 ml, 1 l"},
    ),
    Kind(
        "trail mix",
        "grocery",
        "Food > Snacks > Nuts",
        "high protein, artificial free, ready to eat",
        {"size": "pack of 1, pack of 6"},
    ),
    Kind(
        "hdmi cable",
        "electronics",
        "Electronics > Accessories > Cables",
        "gold plated, high speed, ultra hd",
        {"size": "3 feet, 6 feet, 10 feet"},
    ),
    Kind(
        "phone case",
        "electronics",
        "Electronics > Phones > Cases",
        "wireless charging, shock proof, easy to clean",
        {"color": "clear, black, pink"},
    ),
    Kind(
        "bluetooth speaker",
        "electronics",
        "Electronics > Audio > Speakers",
        "hands free, stereo sound, water proof",
        {"color": "red, black, blue"},
    ),
    Kind(
        "camera tripod",
        "electronics",
        "Electronics > Camera > Tripods",
        "carbon fiber, quick release, carrying case",
        {"size": "50 inch, 60 inch"},
    ),
    Kind(
        "face cream",
        "beauty",
        "Beauty > Skin > Creams",
        "paraben free, cruelty free, anti aging",
        {"size": "30 ml, 50 ml"},
    ),
    Kind(
        "shampoo bar",
        "beauty",
        "Beauty > Hair > Shampoo",
        "sulfate free, tea tree, argan oil",
        {"scent": "lavender, citrus, coconut"},
    ),
    Kind(
        "lip balm",
        "beauty",
        "Beauty > Makeup > Lips",
        "long lasting, fragrance free, seed oil",
        {"flavor name": "cherry, vanilla, mint"},
    ),
    Kind(
        "makeup brush",
        "beauty",
        "Beauty > Tools > Brushes",
        "synthetic hair, travel size, non slip",
        {"color": "gold, purple"},
    ),
    Kind(
        "table lamp",
        "home",
        "Home > Lighting > Lamps",
        "energy efficient, glass shade, brushed nickel",
        {"color": "bronze, white"},
    ),
    Kind(
        "throw blanket",
        "home",
        "Home > Bedding > Blankets",
        "super soft, double sided, eco friendly",
        {"size": "50 x 60 inch, 60 x 80 inch", "color": "ivory, rust"},
    ),
    Kind(
        "bar stool",
        "home",
        "Home > Furniture > Stools",
        "height adjustable, solid wood, easy assemble",
        {"color": "walnut, black, beige"},
    ),
    Kind(
        "storage basket",
        "home",
        "Home > Storage > Baskets",
        "space saving, heavy duty, hand woven",
        SIZES,
    ),
)
BRANDS = ("Alder", "Birch", "Cove", "Dune", "Ember", "Fjord", "Grove", "Heath", "Isle", "Juniper")
OPINIONS = (
    ("Good value", "5.0", "Just as described."),
    ("Not for me", "2.0", "It came late."),
    ("Would buy again", "4.0", "My second one."),
)


@dataclass
class Data:
    """The contents of WebShop's files."""

    items: list[dict[str, Any]] = field(default_factory=list)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    human_instructions: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    reviews: list[dict[str, Any]] = field(default_factory=list)


def catalogue() -> Data:
    """Return the whole catalogue, the same every time."""
    data = Data()
    rng = random.Random(2207)
    for kind in KINDS:
        for number in range(PRODUCTS_PER_KIND):
            _add(data, kind, number, rng)
    order = list(range(len(data.items)))
    rng.shuffle(order)
    data.items = [data.items[position] for position in order]
    return data


def _add(data: Data, kind: Kind, number: int, rng: random.Random) -> None:
    asin = f"B0MADE{len(data.items):04d}"
    everything = kind.attributes.split(", ")
    has = sorted(rng.sample(everything, 2))
    options = {name: values.split(", ") for name, values in kind.options.items()}
    price = rng.choice((4.99, 7.5, 12.0, 18.5, 23.99, 34.0, 49.95))
    data.items.append(
        {
            "asin": asin,
            "name": f"{BRANDS[number]} {kind.name.title()}, {has[0].title()}",
            "full_description": f"{kind.name.capitalize()} by {BRANDS[number]}.",
            "small_description": [text.capitalize() for text in has],
            "pricing": f"${price:.2f}" if number % 4 else f"${price:.2f} - ${price + 5:.2f}",
            "customization_options": {
                name: [{"value": value} for value in values] for name, values in options.items()
            },
            "category": kind.category,
            "query": kind.name,
            "product_category": kind.path.replace(">", CATEGORY_SEPARATOR),
            "images": [""],
        }
    )
    data.attributes[asin] = {
        "attributes": has,
        "instruction": f"Find me {' and '.join(has)} {kind.name}",
        "instruction_attributes": has,
    }
    wanted = [rng.choice(values) for values in options.values()]
    data.human_instructions[asin] = [
        {
            "asin": asin,
            "instruction": f"i need {kind.name} that are {' and '.join(has)}, "
            f"in {' and '.join(wanted)}.",
            "instruction_attributes": has,
            "instruction_options": wanted,
        }
    ]
    title, stars, body = OPINIONS[number % len(OPINIONS)]
    data.reviews.append(
        {
            "asin": asin,
            "average_rating": stars,
            "reviews": [{"title": title, "stars": stars, "review": body}],
        }
    )
