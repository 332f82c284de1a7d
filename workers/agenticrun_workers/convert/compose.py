"""Read a ROLL configuration: Hydra's `defaults:` composed, interpolations resolved. Offline."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_VARIABLE = re.compile(r"\$\{([^${}:]+)\}")


@dataclass(frozen=True)
class Composition:
    """A configuration with everything resolved."""

    config: dict[str, Any]
    variables: frozenset[str]
    """Names that interpolations (`${name}`) read: such a key has a use even where it is no field of ROLL."""


class ConvertError(Exception):
    """A file that is no ROLL configuration. The message names the file and what is wrong."""


def compose(file: Path, config_dir: Path | None = None) -> Composition:
    """The resolved configuration.

    Args:
        file: the YAML that ROLL's launcher would be given as --config_name.
        config_dir: a folder where entries of `defaults:` are looked for too, beside the file's own.

    Raises:
        ConvertError: no YAML, a missing default, an interpolation that cannot be resolved.
    """
    overrides = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    try:
        with (
            warnings.catch_warnings(),
            initialize_config_dir(str(file.parent.resolve()), version_base="1.3"),
        ):
            warnings.simplefilter("ignore")  # Hydra's, about _self_: a file's own values win
            composed = hydra_compose(file.stem, overrides)
            variables = _VARIABLE.findall(OmegaConf.to_yaml(composed, resolve=False))
            config = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ConvertError(f"{file}: {error}") from error
    if not isinstance(config, dict) or not config:
        raise ConvertError(f"{file}: holds no settings")
    settings = {str(key): value for key, value in config.items() if key != "hydra"}
    return Composition(settings, frozenset(variable.split(".")[0] for variable in variables))
