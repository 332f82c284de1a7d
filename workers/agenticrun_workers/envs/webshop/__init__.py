"""WebShop: find and buy the product that an instruction describes, page by page, as text."""

from agenticrun_workers.envs.webshop.webshop import WebShop

__all__ = ["WebShop"]
