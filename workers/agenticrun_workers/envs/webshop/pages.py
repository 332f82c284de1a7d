"""The shop's pages and their text form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from agenticrun_workers.envs.webshop.products import Product

ObservationMode = Literal["text", "text_rich"]
Kind = Literal["text", "button", "product", "option"]

BACK_TO_SEARCH = "Back to Search"
PREVIOUS = "< Prev"
NEXT = "Next >"
BUY = "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")


@dataclass(frozen=True, slots=True)
class Piece:
    """An element of a page. All but text can be clicked."""

    kind: Kind
    text: str
    clicked: bool = False
    """True for a chosen option, or a product that was opened."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page, from top to bottom."""

    pieces: tuple[Piece, ...]
    has_search_bar: bool = False

    def clickables(self) -> list[str]:
        """Return what can be clicked, in lower case: buttons and products, then options.

        The order is WebShop's.
        """
        if self.has_search_bar:
            return []
        links = [piece.text.lower() for piece in self.pieces if piece.kind in ("button", "product")]
        return list(
            dict.fromkeys(
                [*links, *(piece.text for piece in self.pieces if piece.kind == "option")]
            )
        )

    def write(self, mode: ObservationMode) -> str:
        """Return the page as an observation."""
        pieces = [piece for piece in self.pieces if piece.text]
        if mode == "text":
            return " [SEP] ".join(piece.text.strip() for piece in pieces)
        clicked = [piece.text for piece in pieces if piece.kind == "option" and piece.clicked]
        lines = [f"You have clicked {text}.\n" for text in reversed(clicked)]
        for piece in pieces:
            line = piece.text
            if piece.kind != "text":
                button = "clicked button" if piece.clicked else "button"
                before = {"button": "", "product": "\n", "option": "  "}[piece.kind]
                line = f"{before}[{button}] {piece.text} [{button}_]"
            lines.append(f"{line}\n")
        return "".join(lines)


def search_page(instruction: str) -> Page:
    """Return the page on which an episode begins."""
    return Page(
        (Piece("text", "WebShop"), *_instruction(instruction), Piece("button", "Search")),
        has_search_bar=True,
    )


def results_page(
    instruction: str, products: Iterable[Product], page: int, total: int, seen: Set[str]
) -> Page:
    """Return one page of search results, counted from 1. `seen`: ASINs that were opened."""
    turn = [PREVIOUS, NEXT] if page > 1 else [NEXT]
    pieces = [
        *_instruction(instruction),
        Piece("button", BACK_TO_SEARCH),
        Piece("text", f"Page {page} (Total results: {total})"),
        *(Piece("button", text) for text in turn),
    ]
    for product in products:
        pieces += [
            Piece("product", product.asin, product.asin in seen),
            Piece("text", product.title),
            Piece("text", product.price_tag),
        ]
    return Page(tuple(pieces))


def item_page(
    instruction: str, product: Product, chosen: Mapping[str, str], show_attributes: bool
) -> Page:
    """Return the page of a product and its options."""
    pieces = _under(instruction)
    for name, values in product.options.items():
        pieces.append(Piece("text", name))
        pieces += [Piece("option", value, chosen.get(name) == value) for value in values]
    pieces += [
        Piece("text", product.title),
        Piece("text", f"Price: {product.price_tag}"),
        Piece("text", f"Rating: {product.rating}"),
        *(Piece("button", text) for text in (SUB_PAGES if show_attributes else SUB_PAGES[:3])),
        Piece("button", BUY),
    ]
    return Page(tuple(pieces))


def sub_page(instruction: str, product: Product, name: str) -> Page:
    """Return one of `SUB_PAGES`."""
    return Page((*_under(instruction), *(Piece("text", text) for text in _content(product, name))))


def done_page(score: float) -> Page:
    """Return the page after the purchase."""
    texts = ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", str(score))
    return Page(tuple(Piece("text", text) for text in texts))


def _content(product: Product, name: str) -> Sequence[str]:
    if name == "Description":
        return [product.description]
    if name == "Features":
        return product.features
    if name == "Reviews":
        return [
            text
            for review in product.reviews
            for text in (f'"{review.title}"', review.score, review.body)
        ]
    return [*product.attributes, product.category, product.query, product.product_category]


def _instruction(text: str) -> list[Piece]:
    return [Piece("text", "Instruction:"), Piece("text", text)]


def _under(instruction: str) -> list[Piece]:
    return [*_instruction(instruction), Piece("button", BACK_TO_SEARCH), Piece("button", PREVIOUS)]
