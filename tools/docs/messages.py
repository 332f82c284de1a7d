"""Generate docs/messages.md: every message that the product prints, and what to do about it.

    python tools/docs/messages.py > docs/messages.md

The messages are read from the source code: the texts of the exceptions that it raises, the calls
that tools/docs/messages.yaml names, and the rules of the CRD. That file also says in which section
a message belongs, and, where a message does not say it itself, what to do. Values that the code
puts into a message are shown as `…`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from agenticrun_api import Reason
from agenticrun_api.crd import custom_resource_definition

ROOT = Path(__file__).parents[2]
PACKAGES = ("crds/agenticrun_api", "operator/agenticrun_operator", "workers/agenticrun_workers")
GAP = "…"
_MOST_TEXTS = 16
"""Texts of one message that differ in more than values, such as hints for several causes."""
_LONGEST_CHAIN = 4
"""Steps from a message back through variables and functions of its module."""

_REMEDY = re.compile(
    r"(?:^|[:;,.(]|\bor|\band|\bthen|\binstead) +(?:to )?(?:first )?"
    r"(add|accept|apply|ask|call|change|choose|check|copy|correct|create|delete|draw|end|give|import|"
    r"install|leave|list|look|make|move|name|pass|play|put|raise|remove|rename|return|send|see|set|"
    r"start|train|try|upgrade|use|write)\b"
    r"|\bmust\b|\bhas to be\b|\bis expected\b|\bare expected\b|\bneeds?\b|\bare needed\b"
    r"|\(known\b|; known |known are|are known|offered are|\bit has\b|; there are|docs/|`agenticrun "
    r"|^use |^set |^write |^choose "
)
"""What the text of a message has if it says what to do, or which values are right."""


FINDINGS = ("failed", "warning")
"""Functions of `agenticrun_workers.findings`: what was found, and what to do about it."""


@dataclass
class Message:
    """One message of the product: its text, with `…` for what varies."""

    text: str
    advises: bool = False
    """True if its second sentence is advice."""
    fields: list[str] = field(default_factory=list)
    """Fields of the run, for a rule of the CRD."""

    @property
    def says_what_to_do(self) -> bool:
        """Return True if a reader needs no other advice."""
        return self.advises or bool(_REMEDY.search(self.text))


@dataclass
class Section:
    """One table of the page."""

    title: str
    text: str
    sources: list[dict[str, Any]]
    messages: dict[str, Message] = field(default_factory=dict)


@dataclass(frozen=True)
class Printed:
    """An expression in the code that prints messages."""

    file: str
    """Its file; the field for a rule of the CRD."""
    line: int
    name: str
    """The exception that is raised or the function that is called; `rule` for a rule of the CRD."""
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Catalogue:
    """All messages, by section, and the advice about them."""

    sections: list[Section]
    advice: dict[str, str]
    expected: frozenset[str]
    """Messages of a run in which nothing is wrong."""
    unplaced: list[Printed]
    """Printed by the code, but neither in a section nor named as internal."""

    @property
    def messages(self) -> list[Message]:
        return [message for section in self.sections for message in section.messages.values()]

    @property
    def silent(self) -> list[str]:
        """Return the messages about which neither the text nor messages.yaml says what to do."""
        return [
            message.text
            for message in self.messages
            if not message.says_what_to_do
            and message.text not in self.advice
            and message.text not in self.expected
        ]

    @property
    def stale(self) -> list[str]:
        """Return the messages of messages.yaml that the code does not print."""
        named = self.advice.keys() | self.expected
        return sorted(named - {message.text for message in self.messages})


class Module:
    """The source of one module, and what its names stand for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        self.functions = {
            node.name: node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    def function_around(self, node: ast.AST) -> ast.AST:
        """Return the innermost function that contains the node, or the module."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return node
        return self.tree

    def constant(self, name: str) -> str | None:
        """Return the text or number that a name of the module stands for, imported or not."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return self._literal(node.value)
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {alias.asname or alias.name: alias.name for alias in node.names}
                file = _file_of(node.module)
                if name in names and file:
                    return module_of(file).constant(names[name])
        return None

    def _literal(self, value: ast.expr) -> str | None:
        if isinstance(value, ast.Constant) and isinstance(value.value, str | int | float):
            return str(value.value)
        if isinstance(value, ast.JoinedStr | ast.BinOp):
            (text, *others) = self.texts(value)
            return text if not others and GAP not in text else None
        return None

    def texts(self, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the texts that an expression can have; `…` for what only a run can tell."""
        found = [GAP]
        if depth > _LONGEST_CHAIN:
            return found
        match node:
            case ast.Constant():
                found = [str(node.value)]
            case ast.JoinedStr():
                found = _joined([self.texts(value, depth) for value in node.values])
            case ast.FormattedValue():
                found = self._inserted(node.value, depth)
            case ast.BinOp(op=ast.Add()):
                found = _joined([self.texts(node.left, depth), self.texts(node.right, depth)])
            case ast.IfExp():
                found = [*self.texts(node.body, depth), *self.texts(node.orelse, depth)]
            case ast.BoolOp(values=several) | ast.List(elts=several):
                found = [text for value in several for text in self.texts(value, depth)]
            case ast.Subscript(value=whole, slice=ast.Slice()):
                found = self.texts(whole, depth)
            case ast.Name():
                found = self._of_name(node, depth)
            case ast.Call():
                found = self._of_call(node, depth)
            case ast.Attribute():
                found = self._of_attribute(node, depth)
        return found

    def _inserted(self, value: ast.expr, depth: int) -> list[str]:
        """Return what a `{value}` of an f-string stands for: constants and choices are shown."""
        if isinstance(value, ast.Name):
            local = _assigned(self.function_around(value), value.id)
            texts = [self.texts(part) for part in local if isinstance(part, ast.Constant)]
            if len(local) == 1 and texts and has_words(texts[0][0]):
                return texts[0]
            chosen = [text for part in local for text in self._looked_up(part)]
            if chosen:
                return chosen
            found = self.constant(value.id)
            return [found] if found else [GAP]
        if isinstance(value, ast.IfExp | ast.Constant):
            return self.texts(value, depth + 1)
        return [GAP]

    def _looked_up(self, value: ast.expr) -> list[str]:
        """Return what an expression may take from a mapping of the module; nothing for others.

        It is either `MAPPING.get(key)`, or `next((f"..." for ... in MAPPING.items() if ...), "")`.
        """
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=mapping), attr="get"), args=[_]):
                return self._values_of(mapping)
            case ast.Call(
                func=ast.Name(id="next"),
                args=[
                    ast.GeneratorExp(
                        elt=ast.JoinedStr(values=parts),
                        generators=[
                            ast.comprehension(
                                iter=ast.Call(
                                    func=ast.Attribute(value=ast.Name(id=mapping), attr="items")
                                )
                            )
                        ],
                    ),
                    default,
                ],
            ):
                values = self._values_of(mapping)
                texts = [
                    values if isinstance(part, ast.FormattedValue) else self.texts(part)
                    for part in parts
                ]
                return [*self.texts(default), *_joined(texts)]
        return []

    def _values_of(self, mapping: str) -> list[str]:
        for value in _assigned(self.tree, mapping):
            if isinstance(value, ast.Dict):
                return [text for item in value.values for text in self.texts(item)]
        return []

    def _of_attribute(self, node: ast.Attribute, depth: int) -> list[str]:
        """Return the name of a reason, or what the module assigns to an attribute of `self`."""
        owner = ast.unparse(node.value)
        if owner == "Reason":
            return [Reason[node.attr].value]
        values = _assigned(self.tree, ast.unparse(node)) if owner == "self" else []
        found = [text for value in values for text in self.texts(value, depth + 1)]
        return [text for text in found if has_words(text)] or [GAP]

    def _of_name(self, node: ast.Name, depth: int) -> list[str]:
        around = self.function_around(node)
        values = _assigned(around, node.id)
        if around is not self.tree and values:
            return [text for value in values for text in self.texts(value, depth + 1)]
        found = self.constant(node.id)
        return [found] if found else [GAP]

    def _of_call(self, node: ast.Call, depth: int) -> list[str]:
        name = _called(node)
        if name == "str" or name not in self.functions:
            return [GAP]
        returned = [
            child.value
            for child in ast.walk(self.functions[name])
            if isinstance(child, ast.Return) and child.value is not None
        ]
        return [text for value in returned for text in self.texts(value, depth + 1)]


def _assigned(within: ast.AST, target: str) -> list[ast.expr]:
    """Return the values that are assigned to a variable or attribute."""
    assignments = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
    return [
        node.value
        for node in ast.walk(within)
        if isinstance(node, assignments) and node.value is not None
        if target
        in map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])
    ]


@cache
def module_of(path: Path) -> Module:
    """Return the module in a file."""
    return Module(path)


def _file_of(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    folder = next((ROOT / known for known in PACKAGES if known.endswith(f"/{package}")), None)
    if folder is None:
        return None
    place = folder / rest.replace(".", "/") if rest else folder
    return next(
        (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None
    )


def _joined(parts: Iterable[list[str]]) -> list[str]:
    """Return all texts that choices of each part can make; never very many."""
    found = ["".join(choice) for choice in product(*parts)]
    return found[:_MOST_TEXTS]


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def shortened(text: str) -> str:
    """Return a text on one line, with one `…` for adjacent values."""
    text = " ".join(text.split())
    return re.sub(rf"'?{GAP}'?(?:[ ,.:']*'?{GAP}'?)*", GAP, text).strip(" ;,").removeprefix(": ")


def has_words(text: str) -> bool:
    """Return True if a text says anything apart from the values in it."""
    return len(re.findall(r"[A-Za-z]{2,}", text.replace(GAP, " "))) >= 2


def printed_in(path: Path, arguments: dict[str, list[int | str]]) -> Iterator[Printed]:
    """Yield the messages of a module: of its `raise` statements, and of calls of these functions.

    Args:
        path: the module's file.
        arguments: the arguments that make the message, by the function or exception, as positions
            or keywords; exceptions that are not named have it in their first one.
    """
    module = module_of(path)
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        raised = isinstance(module.parents.get(node), ast.Raise)
        if not raised and (name not in arguments or _is_log(node)):
            continue
        given = dict(enumerate(node.args)) | {word.arg: word.value for word in node.keywords}
        parts = [module.texts(given[key]) for key in arguments.get(name, [0]) if key in given]
        finding = name in FINDINGS
        separator = ". " if finding else ": "
        said = [
            choice for choice in product(*parts) if choice and (finding or has_words(choice[-1]))
        ]
        texts = {shortened(separator.join(choice)) for choice in said}
        told = tuple(sorted(text for text in texts if has_words(text)))
        if told:
            yield Printed(str(path.relative_to(ROOT)), node.lineno, name, told)


def _is_log(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "log"


def rules() -> Iterator[tuple[str, str]]:
    """Yield field and message of each rule of the CRD."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield from _rules_of("", schema)


def _rules_of(path: str, node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for rule in node.get("x-kubernetes-validations", ()):
        text = rule.get("message") or ""
        expression = rule.get("messageExpression")
        if expression:
            text = "".join(
                part[1:-1] if part.startswith("'") else GAP
                for part in re.findall(r"'(?:[^'\\]|\\.)*'|[^'+]+", expression)
                if part.strip()
            )
        yield (path + rule.get("fieldPath", "")).lstrip("."), shortened(text)
    for name, child in node.get("properties", {}).items():
        yield from _rules_of(f"{path}.{name}", child)
    for child, mark in ((node.get("items"), "[]"), (node.get("additionalProperties"), ".*")):
        if isinstance(child, dict):
            yield from _rules_of(path + mark, child)


@cache
def document() -> dict[str, Any]:
    """Return what messages.yaml says."""
    loaded: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "messages.yaml").read_text())
    return loaded


def printed() -> Iterator[Printed]:
    """Yield what the whole product prints."""
    for path, message in rules():
        yield Printed(path, 0, "rule", (message,))
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield from printed_in(file, document()["arguments"])


def catalogue() -> Catalogue:
    """Return all messages of the code, in the sections of messages.yaml."""
    sections = [
        Section(item["title"], item["text"], item["from"]) for item in document()["sections"]
    ]
    unplaced = []
    for item in printed():
        if any(_matches(source, item) for source in document()["internal"]):
            continue
        home = next(
            (part for part in sections if any(_matches(source, item) for source in part.sources)),
            None,
        )
        if home is None:
            unplaced.append(item)
            continue
        for text in map(_grouped, item.texts):
            message = home.messages.setdefault(text, Message(text, item.name in FINDINGS))
            if item.name == "rule":
                message.fields.append(item.file)
    return Catalogue(sections, document()["advice"], frozenset(document()["expected"]), unplaced)


def _grouped(text: str) -> str:
    for pattern, replacement in document()["groups"]:
        text = re.sub(pattern, replacement, text)
    return text


def _matches(source: dict[str, Any], item: Printed) -> bool:
    """Return True if a source of messages.yaml names this message."""
    names = source.get("names")
    if item.name == "rule":
        return bool(names == ["rule"])
    return (
        re.fullmatch(source.get("files", ""), item.file) is not None
        and (names is None or item.name in names)
        and all(re.fullmatch(source.get("texts", ".*"), text) for text in item.texts)
    )


def page(found: Catalogue) -> str:
    """Return the page."""
    parts = [document()["page"].rstrip()]
    for section in found.sections:
        messages = sorted(section.messages.values(), key=lambda item: item.text.lower())
        faults = [message for message in messages if message.text not in found.expected]
        news = [message for message in messages if message.text in found.expected]
        rows = [
            f"| {_code(message)} | {advice} |" if advice else f"| {_code(message)} | |"
            for message in faults
            for advice in [found.advice.get(message.text)]
        ]
        table = "\n".join(["| message | do |", "|---|---|", *rows])
        parts.append(f"## {section.title}\n\n{section.text.rstrip()}\n\n{table}")
        if news:
            lines = "\n".join(f"- {_code(message)}" for message in news)
            parts.append(f"### {section.title}: nothing is wrong\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def _code(message: Message) -> str:
    """Return a message as code, after its field if a rule of the CRD names only one."""
    text = message.text.replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    inner = f" {text} " if "`" in (text[0], text[-1]) else text
    field_ = f"`{message.fields[0]}`: " if len(message.fields) == 1 and message.fields[0] else ""
    return f"{field_}{fence}{inner}{fence}"


if __name__ == "__main__":
    sys.stdout.write(page(catalogue()))
