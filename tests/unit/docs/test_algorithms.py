"""Check docs/algorithms.md: its recipes are valid runs, and it explains every field.

Also check the YAML of the pages beside it.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agenticrun_api import algorithm as api
from agenticrun_api import parse_run
from agenticrun_api.base import Model
from runs import MINIMAL

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "algorithms.md").read_text()
YAML = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIELD_AND_NUMBER = re.compile(r"`([A-Za-z0-9.]+)` (?:\| )?\(?(\d+(?:\.\d+)?)[,)\s]")
HEADINGS_AND_YAML = re.compile(
    r"^#+ (?P<heading>[^\n]+)$|^```yaml\n(?P<yaml>.*?)^```$", re.MULTILINE | re.DOTALL
)


def _recipes() -> dict[str, dict[str, Any]]:
    """The YAML blocks by the heading that they stand under."""
    found, heading = {}, ""
    for match in HEADINGS_AND_YAML.finditer(PAGE):
        heading = match["heading"] or heading
        if match["yaml"]:
            found[heading] = yaml.safe_load(match["yaml"])
    return found


def _neighbours() -> dict[str, dict[str, Any]]:
    """The YAML blocks of pages whose blocks begin at `spec` or `pipeline`, by page and number."""
    texts = {name: (DOCS / name).read_text() for name in ("checkpoints.md", "deterministic.md")}
    blocks = {
        f"{name}-{n}": yaml.safe_load(text)
        for name, page in texts.items()
        for n, text in enumerate(YAML.findall(page))
    }
    return {name: block.get("spec", block) for name, block in blocks.items()}


def _merged(base: Any, change: Any) -> Any:
    """`change` over `base`, mapping by mapping."""
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    return {
        key: _merged(base.get(key), change[key]) if key in change else base[key]
        for key in base | change
    }


RECIPES = _recipes()


def test_there_is_a_recipe_for_each_method() -> None:
    names = (
        "PPO with GAE",
        "GRPO",
        "DAPO-like",
        "Dr. GRPO",
        "RLOO",
        "REINFORCE++",
        "StarPO",
        "StarPO-S",
        "GiGPO",
        "GSPO",
    )
    assert [name for name in names if name not in RECIPES] == []
    assert len(RECIPES) == PAGE.count("```yaml")


@pytest.mark.parametrize(
    "block", [*RECIPES.values(), *_neighbours().values()], ids=[*RECIPES, *_neighbours()]
)
def test_what_the_page_shows_is_a_valid_run(block: dict[str, Any]) -> None:
    parse_run({**MINIMAL, "spec": _merged(copy.deepcopy(MINIMAL["spec"]), block)})


@pytest.mark.parametrize(
    "model",
    [value for value in vars(api).values() if isinstance(value, type) and issubclass(value, Model)],
)
def test_every_field_of_the_algorithm_is_explained(model: type[Model]) -> None:
    named_elsewhere: dict[type[Model], set[str]] = {
        api.Guards: {"maxLogprobGap", "minEntropy", "maxZeroVarianceShare", "patience", "action"}
    }  # docs/tracking.md
    fields = {str(info.alias) for info in model.model_fields.values()} - named_elsewhere.get(
        model, set()
    )
    missing = [field for field in sorted(fields) if not re.search(rf"\b{field}\b", PAGE)]
    assert missing == [], f"explain {missing} in docs/algorithms.md"


def _defaults() -> dict[str, Any]:
    """Of the fields of the algorithm, as the page names them."""
    models: dict[str, type[Model]] = {"": api.Algorithm}
    for model in (api.Algorithm, api.TrainInferCorrection):
        models |= {
            f"{info.alias}.": part
            for info in model.model_fields.values()
            for part in (info.annotation, *get_args(info.annotation))
            if isinstance(part, type) and issubclass(part, Model)
        }
    return {
        f"{prefix}{info.alias}": info.default
        for prefix, model in models.items()
        for info in model.model_fields.values()
    }


def test_the_defaults_that_the_page_gives_are_the_models() -> None:
    defaults = _defaults()
    given = [
        (name, float(number)) for name, number in FIELD_AND_NUMBER.findall(PAGE) if name in defaults
    ]
    assert len(given) >= 20
    assert [(name, number) for name, number in given if number != defaults[name]] == []


@pytest.mark.parametrize("name", [*api.ESTIMATORS, *api.LOSSES])
def test_every_estimator_and_every_loss_has_a_row(name: str) -> None:
    assert re.search(rf"\n\| `{name}`( \(default\))? \|", PAGE)
