"""Hook of mkdocs.yml: adds the pages of outside_pages.py, and refuses what needs a network."""

from __future__ import annotations

from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel
from pymdownx.slugs import slugify

from outside_pages import DOCS, loaded_from_elsewhere, moved, outside_pages


def on_config(config: Any) -> Any:
    """Make the anchors of headings as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/."""
    for name, text in outside_pages().items():
        files.append(
            File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        )
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead the links of docs/ out of it to these pages."""
    source = DOCS / page.file.src_uri
    return moved(markdown, source) if source.exists() else markdown


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Refuse a page that loads something from another host.

    Raises:
        PluginError: the page does.
    """
    if tag := loaded_from_elsewhere(output):
        raise PluginError(
            f"{page.file.src_uri}: {tag} loads from another host, but the site has to work "
            "without network: put the file into docs/images, or write a link"
        )
    return output
