"""Speed of conversations: the piece between two turns, its share of a run, and parts of an answer.

    python benchmarks/chat.py [--quick] [--json FILE]

A conversation of an outside agent has 128 turns and 69,000 tokens: each turn is a tool
call of the policy and a result of 2,000 bytes. `turn_<n>_ms` is the median time of the endpoint to
make the prompt of turn n from the client's messages: find the recorded answers, render and tokenise
what is new. `piece_...` is the part of it that renders and tokenises. `whole_ms` renders and
tokenises the whole conversation, which is what others do for each turn. `parse_...` reads an answer
of 4,000 tokens (16,000 characters) into content, reasoning and calls.

`generation_s` is the time in which the embedded engine samples all answers of the conversation, by
a model so small (two layers of 128) that the text around it counts most. `bridge_share` is the time
of all prompts relative to that, `render_share` that of rendering and tokenising the conversation
again for each turn (every eighth turn is measured).

`--quick`: fewer repetitions, and an eighth of the turns for the shares.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from record import write_record
from transformers import LlamaConfig, LlamaForCausalLM

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.agents.chat_families import AnswerReader, find_family
from agenticrun_workers.agents.outside.messages import ChatMessage, ToolCall
from agenticrun_workers.agents.outside.session import Answer, RecordedAnswers, Setting
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.inference.transformers.engine import TransformersEngine
from agenticrun_workers.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    IntArray,
    SamplingParams,
)

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from byte_level import byte_level_tokenizer
from outside_agents import CHATML_WITH_TOOLS

TURNS = 128
TOKENS = 69_000
ANSWER_CHARACTERS = 16_000
RENDERED_TURNS = 8
"""One of so many turns is rendered whole."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
        },
    }
]
CORPUS = "system\nuser\nassistant\ntool_response tool_call name arguments the output of a command "


class Conversation:
    """A conversation of one policy and its tools, turn by turn."""

    def __init__(self) -> None:
        self.tokenizer = byte_level_tokenizer(CORPUS, CHATML_WITH_TOOLS)
        self.chat = ChatFormat(self.tokenizer)
        self.recorded = RecordedAnswers(self.tokenizer, self.chat)
        self.setting = Setting(self.chat, TOOLS)
        self.messages = [ChatMessage("user", "Find the fault.")]
        result = "the output of a command "
        per_turn = TOKENS / TURNS + 15  # rounding to whole words loses some
        self.result = result * round(per_turn / len(self.chat.encode(result)))

    @property
    def call(self) -> str:
        """Arguments of the next call."""
        return f'{{"command": "step {len(self.recorded.answers)}"}}'

    def scripted_T(self) -> IntArray:
        """Return the tokens of the next call, int32 [T]."""
        return self.chat.answer(
            f'<tool_call>\n{{"name": "run", "arguments": {self.call}}}\n</tool_call>'
        )

    def add_turn(self, tokens_T: IntArray | None = None) -> int:
        """Add a call with these tokens, and its result. Return the tokens of the call's prompt."""
        prompt_T, parent = self.recorded.chat_prompt(self.messages, self.setting)
        number, arguments = len(self.recorded.answers), self.call
        tokens_T = self.scripted_T() if tokens_T is None else tokens_T
        count = len(tokens_T)
        sampled = Generation(
            tokens_T, np.zeros(count, np.float32), np.zeros(count, np.int32), FinishReason.STOP
        )
        message = ChatMessage("assistant", "", (ToolCall(f"c{number}", "run", arguments),))
        self.recorded.add(
            Answer(
                str(number),
                0,
                Sampled(prompt_T, sampled, parent.sampled if parent else None),
                parent,
                (*self.messages, message),
                True,
            ),
            to=self.setting,
        )
        result = ChatMessage("tool", f"{self.result}{number}", tool_call_id=f"c{number}")
        self.messages += [message, result]
        return len(prompt_T)

    def prompt(self) -> IntArray:
        """Make the next prompt from the client's messages, as the endpoint does. int32 [T]."""
        prompt_T, matched = self.recorded.chat_prompt(self.messages, self.setting)
        self.recorded.parent_of(prompt_T, matched)
        return prompt_T

    def render(self) -> None:
        """Render and tokenise the whole conversation."""
        self.chat.conversation([message.for_template for message in self.messages], TOOLS)


def milliseconds(work: Callable[[], object], repetitions: int) -> float:
    """Return the median time of some work."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times)


def conversation_figures(repetitions: int) -> dict[str, float]:
    """Return the times of a conversation that grows."""
    talk = Conversation()
    figures: dict[str, float] = {}
    for turn in range(1, TURNS + 1):
        figures["tokens"] = talk.add_turn()
        if turn in (2, TURNS):
            last, result = (message.for_template for message in talk.messages[-2:])
            answer_T = talk.recorded.answers[-1].sampled.generation.tokens_T
            piece = partial(
                talk.chat.bridge, answer_T, [result], calls=last["tool_calls"], tools=TOOLS
            )
            figures[f"turn_{turn}_ms"] = milliseconds(talk.prompt, repetitions)
            figures[f"piece_{turn}_ms"] = milliseconds(piece, repetitions)
    figures["whole_ms"] = milliseconds(talk.render, max(3, repetitions // 10))
    figures["piece_share"] = figures[f"piece_{TURNS}_ms"] / figures["whole_ms"]
    return figures


async def share_figures(turns: int) -> dict[str, float]:
    """Return what prompts cost relative to the answers that an engine samples for them."""
    talk = Conversation()
    config = LlamaConfig(
        vocab_size=len(talk.tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS + 1000,
    )
    engine = TransformersEngine(
        lambda: LlamaForCausalLM(config).eval(), max_length=TOKENS + 1000, max_sessions=1
    )
    await engine.start()
    bridging = rendering = sampling = 0.0
    try:
        for turn in range(turns):
            began = time.perf_counter()
            prompt_T = talk.prompt()
            bridged = time.perf_counter()
            params = SamplingParams(max_new_tokens=len(talk.scripted_T()))
            request = GenerationRequest(f"turn-{turn}", "talk", prompt_T, params, seed=turn)
            sampled = time.perf_counter()
            answer = await engine.generate(request)
            sampling += time.perf_counter() - sampled
            bridging += bridged - began
            if turn % RENDERED_TURNS == 0:
                rendering += milliseconds(talk.render, 1) / 1000 * RENDERED_TURNS
            talk.add_turn(answer.tokens_T)
    finally:
        await engine.stop()
    return {
        "generation_s": sampling,
        "bridge_share": bridging / sampling,
        "render_share": rendering / sampling,
    }


def parse_figures(repetitions: int) -> dict[str, float]:
    """Return the times to read long answers of several families."""
    words = "word " * (ANSWER_CHARACTERS // 5)
    xml = f"<tool_call>\n<function=run>\n<parameter=command>\n{words}\n</parameter>\n</function>"
    answers = {
        "hermes": '<tool_call>{"name": "run", "arguments": '
        f'{{"command": "{words}"}}}}</tool_call>',
        "qwen_xml": f"{xml}\n</tool_call>",
        "gpt_oss": f"<|channel|>analysis<|message|>{words}<|end|>"
        '<|start|>assistant to=functions.run<|channel|>commentary json<|message|>{"command": "x"}',
        "gemma4": f'<|tool_call>call:run{{command:<|"|>{words}<|"|>}}<tool_call|>',
        "text": words,
    }
    figures = {}
    for family, answer in answers.items():
        reader = AnswerReader(find_family(family, ""), "<think>", "")
        assert bool(reader.read(answer, ended=True, tools=TOOLS).calls) == (family != "text")
        read = partial(reader.read, answer, ended=True, tools=TOOLS)
        figures[f"parse_{family}_ms"] = milliseconds(read, repetitions)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    repetitions = 20 if options.quick else 200
    figures = conversation_figures(repetitions) | parse_figures(repetitions)
    figures |= asyncio.run(share_figures(TURNS // 8 if options.quick else TURNS))
    for name, value in figures.items():
        print(f"{name:>20} {value:.3f}")
    if options.json:
        write_record(options.json, figures)


if __name__ == "__main__":
    main()
