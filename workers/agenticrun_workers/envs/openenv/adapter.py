"""`type: openenv`: environments of OpenEnv as text in and text out.

The JSON schema of its action says how to answer (`actions.py`). An environment whose action is a
call of a tool is asked for its tools, and an answer is a call (`tool_calls.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import string
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError

from agenticrun_api.base import clean_text
from agenticrun_workers.envs.env import AtCapacity, EnvFault, StepResult, register_env
from agenticrun_workers.envs.gym import Success, placeholders
from agenticrun_workers.envs.openenv.actions import ActionForm, Schema
from agenticrun_workers.envs.openenv.server import (
    INVALID_ACTION,
    SESSION_ENDED,
    Refused,
    Server,
    Session,
)
from agenticrun_workers.envs.python_tool import shortened
from agenticrun_workers.envs.remote import Patience, checked_url, with_secrets
from agenticrun_workers.envs.tool_calls import Invalid, Tool, ToolBox, as_json, as_text
from agenticrun_workers.plugins import imported
from agenticrun_workers.seeds import VALIDATION_SEEDS
from agenticrun_workers.types import StopReason, Stream

OBSERVATION_CHARACTERS = 20_000
"""Default of `observationCharacters`: about 5,000 tokens."""

MCP_TYPES = "openenv.core.env_server.mcp_types"

POLICY_FAULTS = ("tool_not_found", "invalid_args")
"""Errors of tool calls that the policy caused. Others cost the episode, or are results to read."""
SERVER_FAULTS = ("transport_error", "timeout")

UNREPORTED = "Unable to serialize unknown type"
"""OpenEnv 0.10 ends the session with this error if a validator of the action raises ValueError,
because it cannot send that error. The policy caused it, so the episode is not repeated."""

NO_CALL = "This has no tool call."


@register_env("openenv")
def make_openenv(
    *,
    url: str | None = None,
    environment: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    action: str | None = None,
    headers: Mapping[str, str] | None = None,
    actions: Mapping[str, Any] | Sequence[Any] | None = None,
    action_fields: Mapping[str, Any] | None = None,
    valid_actions: str | None = None,
    observation: str | None = None,
    hide: Sequence[str] = (),
    observation_characters: int = OBSERVATION_CHARACTERS,
    reset: Mapping[str, Any] | None = None,
    splits: Mapping[str, str] | None = None,
    instruction: str | None = None,
    success: Success = "reward",
) -> OpenEnvServer | OpenEnvClass:
    """Return the environment at a URL, or one in this process.

    Args:
        url: address of a server; each episode has a session of its own.
        environment: `module:Class` to run in this process instead.
        kwargs: arguments of that class.
        action: `module:Class` of its actions, if the annotations of `step` do not name it.
        headers: of requests to the server; `${NAME}` is an environment variable.
        actions, action_fields: see `ActionForm`.
        valid_actions: field of observations that lists the valid values of the action's field.
        observation: template with fields of the observation in braces. Default: all fields.
        hide: fields that the default leaves out.
        observation_characters: shown of an observation; the middle of more is left out.
        reset: more arguments of `reset`.
        splits: the environment's names of the splits train and validation, if it has tasks.
        instruction: text of the first prompt, before the question. Default: the question alone.
        success: `reward` (the episode ends with a positive last reward) or `end` (it ends).

    Raises:
        ValueError: an argument has no meaning.
        PluginImportError: the class cannot be imported.
    """
    if (url is None) == (environment is None):
        raise ValueError("config needs either url (a server) or environment (module:Class)")
    text = _Text(
        actions=actions,
        action_fields=action_fields,
        valid_field=valid_actions,
        template=observation,
        hidden=(*hide, "metadata", "done", "reward"),
        characters=observation_characters,
        reset=reset or {},
        splits=splits,
        task=instruction or "",
        success=success,
    )
    if url is not None:
        if kwargs or action:
            raise ValueError("kwargs and action are for environment, not for url")
        return OpenEnvServer(_server(checked_url(url), with_secrets(headers or {})), text)
    if headers:
        raise ValueError("headers are for url, not for environment")
    return OpenEnvClass(str(environment), dict(kwargs or {}), action, text)


@dataclass
class _Text:
    """The text form of one environment, and the state of its episode; see `make_openenv`."""

    actions: Mapping[str, Any] | Sequence[Any] | None
    action_fields: Mapping[str, Any] | None
    valid_field: str | None
    template: str | None
    hidden: Sequence[str]
    characters: int
    reset: Mapping[str, Any]
    splits: Mapping[str, str] | None
    task: str
    success: Success
    item: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the next `reset`, from the data set."""
    form: ActionForm | None = None
    tools: ToolBox | None = None
    shown: str = ""
    """The newest observation."""
    valid: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.success not in get_args(Success):
            raise ValueError(f"success must be reward or end, not {self.success!r}")
        if self.characters < 1:
            raise ValueError(f"observationCharacters must be at least 1, not {self.characters}")
        if self.splits is not None and set(self.splits) != {"train", "validation"}:
            raise ValueError("splits must name a split for train and one for validation")
        placeholders(self.template or "")

    @property
    def instruction(self) -> str:
        """The task and how to answer."""
        question = self.tools or self.form
        return "\n".join(filter(None, [self.task, question.question() if question else ""]))

    def arguments(self, seed: int, split: Stream, tasks: int) -> dict[str, Any]:
        """Return the arguments of `reset`; `tasks` is the number of tasks of the split."""
        levels = VALIDATION_SEEDS if split is Stream.VALIDATION else 0
        chosen = {"seed": seed % VALIDATION_SEEDS + levels, **self.reset, **self.item}
        if self.splits:
            chosen |= {"split": self.splits[split.value], "index": seed % tasks}
        return chosen

    def learn_schema(self, schema: Schema) -> bool:
        """Take note of the action's schema. Return True if its actions are calls of tools.

        Raises:
            ValueError: `actions` do not fit it.
        """
        calls = schema.get("properties", {}).get("type", {}).get("const") == "call_tool"
        if calls or (schema.get("title") == "Action" and self.actions is None):
            return True
        self.form = ActionForm(schema, self.actions, self.action_fields)
        return False

    def learn_tools(self, data: Mapping[str, Any]) -> None:
        """Take note of the tools that an environment lists. Raises `EnvFault` without any."""
        listed = _observation(data).get("tools") or ()
        self.tools = ToolBox(
            Tool(each["name"], each.get("description", ""), each.get("input_schema", {}))
            for each in listed
        )
        if not listed:
            raise _fault(f"the environment lists no tools: {as_json(data)[:200]}")

    def action(self, answer: str) -> dict[str, Any] | Invalid:
        """Return the action of an answer."""
        if self.tools is not None:
            call = self.tools.parse(answer)
            if call is None or isinstance(call, Invalid):
                return call or Invalid(NO_CALL)
            return {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        assert self.form is not None, "reset was called"
        return self.form.parse(answer)

    def begin(self, data: Mapping[str, Any]) -> str:
        """Return the first observation."""
        self._show(data)
        return self.shown

    def invalid(self, why: Invalid) -> StepResult:
        """Return the step of an answer that was not played.

        It shows the same observation again, below the reason if the answer is more than one word.
        """
        metrics = {"action_is_valid": 0.0, "num_actions": 1.0, "success": 0.0}
        simple = self.form is not None and self.form.answers()
        shown = self.shown if simple else f"{clean_text(why.reason)}\n{self.shown}"
        return StepResult(shown, 0.0, False, metrics=metrics, info={"reason": why.reason})

    def step(self, data: Mapping[str, Any]) -> StepResult:
        """Return the step of an action that was played. Raises `EnvFault`."""
        observation = _observation(data)
        error = observation.get("error") if self.tools is not None else None
        if isinstance(error, Mapping) and error.get("error_type") in POLICY_FAULTS:
            return self.invalid(Invalid(str(error.get("message", ""))))
        if isinstance(error, Mapping) and error.get("error_type") in SERVER_FAULTS:
            raise _fault(f"a tool call failed: {error.get('message', '')}")
        self._show(data)
        reward, done = data.get("reward"), data.get("done", False)
        reward = 0.0 if reward is None else reward
        over = done is True and (self.success == "end" or _positive(reward))
        metrics = {"action_is_valid": 1.0, "num_actions": 1.0, "success": float(over)}
        if self.tools is not None:
            metrics |= {"tool_calls": 1.0, "tool_errors": float(error is not None)}
        return StepResult(self.shown, reward, done, metrics=metrics)

    def valid_answers(self) -> list[str]:
        """Return the answers that are valid now; empty if they cannot be listed."""
        return self.valid or (self.form.answers() if self.form is not None else [])

    def vocabulary(self) -> list[str]:
        """Return printable characters and the words of the config."""
        words = [] if self.actions is None else list(map(as_text, self.actions))
        return [*string.printable, *words]

    def _show(self, data: Mapping[str, Any]) -> None:
        """Write an observation as text."""
        observation = _observation(data)
        if self.template is not None:
            try:
                text = self.template.format_map(
                    {name: _Shown(value) for name, value in observation.items()}
                )
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                raise _fault(
                    f"observation {self.template!r} does not fit: {type(error).__name__}: {error} "
                    f"(the observation has: {', '.join(observation)})"
                ) from None
        elif self.tools is not None and "tool_name" in observation:
            text = _tool_result(observation)
        else:
            text = self._default(observation)
        self.shown = clean_text(shortened(text, self.characters))
        listed = observation.get(self.valid_field) if self.valid_field else None
        self.valid = (
            [self.form.answer_of(value) for value in listed]
            if isinstance(listed, list) and self.form is not None
            else []
        )

    def _default(self, observation: Mapping[str, Any]) -> str:
        shown = {
            name: value
            for name, value in observation.items()
            if name not in self.hidden and value is not None
        } or {
            name: value
            for name, value in (observation.get("metadata") or {}).items()
            if name not in self.hidden
        }
        if len(shown) == 1:
            return as_text(next(iter(shown.values())))
        return "\n".join(f"{name}: {as_text(value)}" for name, value in shown.items())


class OpenEnvServer:
    """An environment on a server. An instance plays one episode, in a session of its own.

    The server has to answer a connection and have a place for the session within
    `PATIENCE_SECONDS`; then the run's `stepTimeoutSeconds` bounds every answer.
    """

    reusable = False
    may_ignore_seeds = True

    def __init__(self, server: Server, text: _Text) -> None:
        self._server = server
        self._text = text
        self._session: Session | None = None

    @property
    def instruction(self) -> str:
        """The task; how to answer is known after `reset`."""
        return self._text.instruction

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set arguments of the next `reset`."""
        self._text.item = item

    async def reset(self, seed: int, split: Stream) -> tuple[str, dict[str, Any]]:
        """Open a session and begin the episode. Raises `EnvFault`."""
        calls = self._text.learn_schema(await self._server.schema())
        name = self._text.splits[split.value] if self._text.splits else ""
        tasks = await self._server.number_of_tasks(name) if name else 0
        began = await self._begin(self._text.arguments(seed, split, tasks))
        if calls:
            self._text.learn_tools(await self._played({"type": "list_tools"}))
        return self._text.begin(began), {"env_instruction": self._text.instruction}

    async def step(self, action: str) -> StepResult:
        """Play the action of an answer; see `StepResult`. Raises `EnvFault`."""
        played = self._text.action(action)
        if isinstance(played, Invalid):
            return self._text.invalid(played)
        try:
            return self._text.step(await self._played(played))
        except Refused as refused:
            if refused.code == INVALID_ACTION:
                return self._text.invalid(Invalid(refused.message))
            if refused.code == SESSION_ENDED and UNREPORTED in refused.message:
                return replace(self._text.invalid(Invalid(refused.message)), truncated=True)
            raise _fault(str(refused)) from refused

    def valid_actions(self) -> list[str]:
        """Return the answers that are valid now; empty if they cannot be listed."""
        return self._text.valid_answers()

    def vocabulary(self) -> list[str]:
        """Return printable characters and the words of the config."""
        return self._text.vocabulary()

    async def close(self) -> None:
        """Close the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _begin(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Open a session, once the server has a place for it, and reset its environment."""
        patience = Patience()
        while True:
            await self.close()
            self._session = await self._server.open()
            try:
                return await self._session.ask("reset", arguments)
            except AtCapacity:
                if patience.over:
                    raise
            except Refused as refused:
                raise _fault(f"reset: {refused}") from refused
            await asyncio.sleep(patience.pause())

    async def _played(self, action: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise _fault("there is no session: reset was not called")
        return await self._session.ask("step", action)


class OpenEnvClass:
    """An environment in this process, without a server.

    Args:
        name: `module:Class`.
        kwargs: arguments of the class.
        action: `module:Class` of its actions; None: as annotated.
        text: its text form.

    Raises:
        ValueError: it is not an environment of OpenEnv, or its actions are unknown.
    """

    def __init__(self, name: str, kwargs: dict[str, Any], action: str | None, text: _Text) -> None:
        made = _imported("environment", name)
        self._env = made(**kwargs)
        self._text = text
        self._action: Any = (
            _imported("action", action) if action else _action_class(type(self._env))
        )
        calls = self._action is None or text.learn_schema(self._action.model_json_schema())
        self._calls = (
            {
                "list_tools": imported(MCP_TYPES, "ListToolsAction"),
                "call_tool": imported(MCP_TYPES, "CallToolAction"),
            }
            if calls
            else {}
        )
        self._reset, self._step = (
            getattr(self._env, f"{call}_async")
            if _overrides(type(self._env), f"{call}_async")
            else getattr(self._env, call)
            for call in ("reset", "step")
        )

    @property
    def instruction(self) -> str:
        """The task and how to answer; the tools of an environment are known after `reset`."""
        return self._text.instruction

    def set_item(self, item: Mapping[str, Any]) -> None:
        """Set arguments of the next `reset`."""
        self._text.item = item

    def reset(self, seed: int, split: Stream) -> Any:
        """Begin an episode."""
        name = self._text.splits[split.value] if self._text.splits else ""
        tasks = int(self._env.num_tasks(name)) if name else 0
        arguments = self._text.arguments(seed, split, tasks)
        parameters = inspect.signature(self._reset).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            arguments = {key: value for key, value in arguments.items() if key in parameters}
        began = self._reset(**arguments)
        return self._begun_later(began) if inspect.isawaitable(began) else self._begun(began)

    def step(self, action: str) -> Any:
        """Play the action of an answer; see `StepResult`."""
        played = self._text.action(action)
        if isinstance(played, Invalid):
            return self._text.invalid(played)
        made = self._action if not self._calls else self._calls["call_tool"]
        try:
            model = made.model_validate(played)
        except ValidationError as error:
            reasons = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
            )
            return self._text.invalid(Invalid(reasons))
        result = self._step(model)
        if inspect.isawaitable(result):
            return _after(result, lambda done: self._text.step(_dumped(done)))
        return self._text.step(_dumped(result))

    def valid_actions(self) -> list[str]:
        """Return the answers that are valid now; empty if they cannot be listed."""
        return self._text.valid_answers()

    def vocabulary(self) -> list[str]:
        """Return printable characters and the words of the config."""
        return self._text.vocabulary()

    def close(self) -> Any:
        """Close the environment, if it can be closed."""
        return getattr(self._env, "close", lambda: None)()

    def _begun(self, began: Any) -> tuple[str, dict[str, Any]] | Awaitable[Any]:
        if self._calls:
            listed = self._step(self._calls["list_tools"]())
            if inspect.isawaitable(listed):
                return _after(listed, partial(self._with_tools, began))
            return self._with_tools(began, listed)
        return self._text.begin(_dumped(began)), {"env_instruction": self._text.instruction}

    async def _begun_later(self, began: Awaitable[Any]) -> Any:
        begun = self._begun(await began)
        return await begun if inspect.isawaitable(begun) else begun

    def _with_tools(self, began: Any, listed: Any) -> tuple[str, dict[str, Any]]:
        self._text.learn_tools(_dumped(listed))
        return self._text.begin(_dumped(began)), {"env_instruction": self._text.instruction}


class _Shown:
    """A value in a template: text as it is, the rest as JSON; parts by `{board[0]}`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> _Shown:
        return _Shown(self._value[key])

    def __format__(self, form: str) -> str:
        return format(self._value, form) if form else as_text(self._value)


async def _after(awaitable: Awaitable[Any], then: Any) -> Any:
    return then(await awaitable)


def _observation(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of an observation; a bare value has the name `observation`."""
    observation = data.get("observation")
    if isinstance(observation, Mapping):
        return observation
    return {} if observation is None else {"observation": observation}


def _dumped(observation: Any) -> dict[str, Any]:
    """Return what a server would send of an observation. Raises `EnvFault`."""
    if not isinstance(observation, BaseModel):
        raise _fault(f"it returned {type(observation).__name__}, not an Observation")
    return {
        "observation": observation.model_dump(exclude={"reward", "done"}),
        "reward": getattr(observation, "reward", None),
        "done": getattr(observation, "done", False),
    }


def _tool_result(observation: Mapping[str, Any]) -> str:
    """Return the text of a tool's result, or of its error."""
    error, result = observation.get("error"), observation.get("result")
    if isinstance(error, Mapping):
        return f"Error: {error.get('message', '')}"
    if isinstance(result, Mapping) and isinstance(result.get("content"), Iterable):
        texts = [
            as_text(part.get("text", part)) if isinstance(part, Mapping) else as_text(part)
            for part in result["content"]
        ]
        return "\n".join(texts)
    return as_text(result)


def _positive(reward: Any) -> bool:
    return isinstance(reward, int | float) and reward > 0


def _imported(key: str, name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{key}: {name!r} is not module:Class")
    return imported(module, attribute)


def _action_class(environment: type) -> Any:
    """Return the class that annotates the action of `step`; None for the base class of actions.

    Raises:
        ValueError: there is none.
    """
    for name in ("step", "step_async"):
        try:
            found = get_type_hints(getattr(environment, name)).get("action")
        except (NameError, AttributeError, TypeError):
            continue
        if isinstance(found, type) and issubclass(found, BaseModel):
            return None if found.__name__ == "Action" else found
    for base in getattr(environment, "__orig_bases__", ()):
        for found in get_args(base)[:1]:
            if isinstance(found, type) and issubclass(found, BaseModel):
                return found
    raise ValueError(
        f"environment: {environment.__name__}.step does not say the type of its action: "
        "set action: module:Class"
    )


def _overrides(environment: type, name: str) -> bool:
    """Return True if a class, not OpenEnv's base class, defines a method."""
    return any(
        name in vars(each)
        for each in environment.__mro__
        if each.__module__ != "openenv.core.env_server.interfaces"
    )


_servers: dict[tuple[str, tuple[tuple[str, str], ...]], Server] = {}


def _server(url: str, headers: dict[str, str]) -> Server:
    """Return the server at an address: all environments of a process share what it answers."""
    return _servers.setdefault((url, tuple(sorted(headers.items()))), Server(url, headers))


def _fault(message: str) -> EnvFault:
    return EnvFault(StopReason.ENV_ERROR, message)
