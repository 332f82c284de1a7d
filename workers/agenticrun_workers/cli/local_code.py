"""The files beside a run that it needs on a cluster: its modules, what they import, its data."""

from __future__ import annotations

import ast
import glob
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from agenticrun_api import AgenticRun

REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""`module:Class`."""
PLUG_IN_KEYS = ("type", "run", "name", "pgVariant", "custom")
"""Keys of the run whose value must be found, if it has the form of a reference."""
IMAGE_EXTRAS = ("workers", "megatron", "deepspeed")
"""Our own extras that the worker image installs."""


class PackagingError(Exception):
    """The code cannot be packaged. The message says what, where and what to do."""


@dataclass
class LocalCode:
    """Everything that a run needs from the folder of its file.

    Attributes:
        folder: the folder.
        files: who needs a file, by the file's path in the folder.
        references: `module:Class` of modules in the folder, by the first field that names it.
        installed: modules of installed packages, by name: the line that imports it.
        missing: modules that are not found, in the same form.
        fields: fields of the run that name something in the folder.
    """

    folder: Path
    files: dict[str, str] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)

    @property
    def not_in_image(self) -> dict[str, str]:
        """Return the imports that the worker image does not offer, as far as this machine knows."""
        # From a source tree nothing is known about the image: what is missing here is missing
        # there.
        shipped = shipped_distributions()
        if not shipped:
            return self.missing
        return self.missing | {
            module: place
            for module, place in self.installed.items()
            if not shipped & {normalized(name) for name in distributions().get(module, [])}
        }


def find_local_code(run: AgenticRun, folder: Path, extra: Set[str] = frozenset()) -> LocalCode:
    """Return the files in `folder` that a run needs. Nothing is imported.

    Args:
        run: the run.
        folder: the folder of its file.
        extra: distributions that the image installs in addition to its own.

    Raises:
        PackagingError: a module is not in the folder and not installed, lies outside of the
            folder, or is not Python.
    """
    # A notebook may have written a module since the last look.
    importlib.invalidate_caches()
    code = LocalCode(folder.resolve())
    tracker = run.spec.tracking.model_dump(by_alias=True, include={"custom", "custom_config"})
    for place, key, value in (
        *_strings(run.spec.pipeline.model_dump(by_alias=True), "spec.pipeline"),
        *_strings(tracker, "spec.tracking"),
    ):
        if REFERENCE.fullmatch(value):
            module = value.partition(":")[0]
            if _add_module(code, module, place, extra, required=key in PLUG_IN_KEYS):
                code.references.setdefault(value, place)
                code.fields.append(place)
        # The command of an agent that is a program: python -m MODULE.
        elif key == "-m":
            if _add_module(code, value, place, extra, required=False):
                code.fields.append(place)
        else:
            _add_data(code, value, place, is_path=place.endswith(".dataset.path"))
    return code


def _strings(value: Any, place: str, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield field, key and value of each string. The word after -m in a list has the key -m."""
    if isinstance(value, str):
        yield place, key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, f"{place}.{name}", str(name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            follows = index > 0 and value[index - 1] == "-m"
            yield from _strings(inner, f"{place}[{index}]", "-m" if follows else "")


def _add_module(code: LocalCode, module: str, place: str, extra: Set[str], required: bool) -> bool:
    """Add the files of a module of the folder, and what they import. Return False for others."""
    top = module.partition(".")[0]
    found = _in_folder(top, code.folder)
    if found is None:
        if required:
            _look_elsewhere(code, top, place, extra)
            if top in code.missing:
                raise PackagingError(
                    f"{place}: there is no {top}.py in {code.folder}, and no package {top} is "
                    "installed: correct the name, or move the module there"
                )
        return False
    for file in found:
        name = file.relative_to(code.folder).as_posix()
        if name not in code.files:
            code.files[name] = place
            if file.suffix == ".py":
                for imported, line in _imports(file, name):
                    if not _add_module(code, imported, f"{name}:{line}", extra, required=False):
                        _look_elsewhere(code, imported, f"{name}:{line}", extra)
    return True


def _in_folder(top: str, folder: Path) -> list[Path] | None:
    """Return the files of a top-level module or package in the folder, None if it has none."""
    # A file of the folder never hides one of these.
    if top in sys.builtin_module_names:
        return None
    spec = PathFinder.find_spec(top, [str(folder)])
    if spec is None:
        return None
    if spec.origin is not None and not spec.submodule_search_locations:
        return [Path(spec.origin)]
    # A package is taken whole: it may read data files, and import by name.
    files = _files_below(folder / top)
    if spec.origin is None:  # a folder without __init__.py: an installed package comes first
        has_python = any(file.suffix == ".py" for file in files)
        if not has_python or _elsewhere(top, folder) is not None:
            return None
    return files


def _files_below(folder: Path) -> list[Path]:
    """Return the files of a folder, without bytecode and hidden ones."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and not any(
            part.startswith(".") or part == "__pycache__"
            for part in file.relative_to(folder.parent).parts
        )
    ]


def _imports(file: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yield the top-level module and the line of each import of a file.

    Relative imports are left out: a package is taken whole.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=name)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise PackagingError(f"{name}:{line}: not Python: {error}") from error
    # Imports inside of functions, too: they fail only when the function runs.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno


def _look_elsewhere(code: LocalCode, top: str, place: str, extra: Set[str]) -> None:
    """Note a module that is not in the folder, unless every image has it.

    Raises:
        PackagingError: it is a file of this machine that no package brings along.
    """
    if (
        top in sys.stdlib_module_names
        or top in ("__future__", "__main__")
        or top.startswith("agenticrun_")
    ):
        return
    # A module and its distribution may have different names.
    names = {top, *distributions().get(top, [])}
    if extra & {normalized(name) for name in names}:
        return
    spec = _elsewhere(top, code.folder)
    if spec is None:
        code.missing.setdefault(top, place)
        return
    locations = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    on_path = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    sites = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *on_path}
    # It works here because of a path of this machine, and would be missing in the pods.
    if locations and not any(
        Path(location).resolve().is_relative_to(Path(site).resolve())
        for location in locations
        for site in sites
    ):
        raise PackagingError(
            f"{place} needs {top}, which is {locations[0]}, outside of {code.folder}: move it "
            "into that folder, or name its package in a requirements.txt there and use --image"
        )
    code.installed.setdefault(top, place)


def _elsewhere(top: str, folder: Path) -> ModuleSpec | None:
    """Return the spec of a module that this Python finds in other folders."""
    # Python itself looks into the folder of the run, too, and would find the module there.
    others = [path for path in sys.path if Path(path).resolve() != folder]
    kept, sys.path[:] = sys.path[:], others
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    finally:
        sys.path[:] = kept


def _add_data(code: LocalCode, value: str, place: str, is_path: bool) -> None:
    """Add the files that a string of the run names, if they lie in the folder.

    The path of a data set may be a folder or a glob. Other strings are paths of a file with a
    suffix, or they are something else.
    """
    path = Path(value)
    if "\n" in value or len(value) > 1024 or path.is_absolute() or not (is_path or path.suffix):
        return
    try:
        matches = (
            glob.glob(value, root_dir=code.folder)
            if is_path
            else [value] * (code.folder / path).is_file()
        )
    except (OSError, ValueError):
        return
    for match in sorted(matches):
        # `..` in a value may lead out of the folder.
        found = Path(os.path.normpath(code.folder / match))
        if found != code.folder and not found.is_relative_to(code.folder):
            raise PackagingError(
                f"{place}: {value} lies outside of {code.folder}: move it into that folder, or put "
                "it on a volume or into object storage and write its address there"
            )
        for file in _files_below(found) if found.is_dir() else [found]:
            code.files.setdefault(file.relative_to(code.folder).as_posix(), place)
        if found.suffix == ".py":
            _add_imports_of_script(code, found)
    if matches:
        code.fields.append(place)


def _add_imports_of_script(code: LocalCode, script: Path) -> None:
    """Add what a script of an agent's command imports. Python looks in the script's folder first.

    Raises:
        PackagingError: see `find_local_code`.
    """
    name = script.relative_to(code.folder).as_posix()
    for imported, line in _imports(script, name):
        beside = _in_folder(imported, script.parent) if script.parent != code.folder else None
        for file in beside or ():
            path = file.relative_to(code.folder).as_posix()
            if path not in code.files:
                code.files[path] = f"{name}:{line}"
                _add_imports_of_script(code, file)
        if beside is None and not _add_module(code, imported, f"{name}:{line}", set(), False):
            _look_elsewhere(code, imported, f"{name}:{line}", set())


def normalized(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions of each top-level module."""
    return packages_distributions()


@cache
def shipped_distributions() -> frozenset[str]:
    """Return the distributions in the worker image: what our own requires, and so on.

    Empty if AgenticRun itself runs from a source tree without having been installed.
    """
    from packaging.requirements import Requirement

    found: set[str] = set()
    left: list[tuple[str, tuple[str, ...]]] = [("agenticrun", IMAGE_EXTRAS)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    # Extras count: a distribution may come only with one of them.
    while left:
        name, extras = left.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            lines = []
        else:
            found.add(normalized(name))
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                found.add(normalized(requirement.name))
                left.append((requirement.name, tuple(sorted(requirement.extras))))
    return frozenset(found)
