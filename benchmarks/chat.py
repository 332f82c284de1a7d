"""Speed of conversations: the piece between two turns, and the parts of an answer.

    python benchmarks/chat.py [--quick] [--json FILE]

One core. A conversation of an outside agent has 128 turns and 69,000 tokens: each turn is a tool
call of the policy and a result of 2,000 bytes. `turn_<n>_ms` is the median time of the endpoint to
make the prompt of turn n from the client's messages: find the recorded answers, render and tokenise
what is new. `piece_...` is the part of it that renders and tokenises. `whole_ms` renders and
tokenises the whole conversation, which is what others do for each turn. `parse_...` reads an answer
of 4,000 tokens (16,000 characters) into content, reasoning and calls.

`--quick`: fewer repetitions, the same sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from record import write_record

from agenticrun_workers.agents import ChatFormat
from agenticrun_workers.agents.chat_families import AnswerReader, find_family
from agenticrun_workers.agents.outside.messages import ChatMessage, ToolCall
from agenticrun_workers.agents.outside.session import Answer, RecordedAnswers, Setting
from agenticrun_workers.agents.sampled_tree import Sampled
from agenticrun_workers.types import FinishReason, Generation

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
from byte_level import byte_level_tokenizer
from outside_agents import CHATML_WITH_TOOLS

TURNS = 128
TOKENS = 69_000
ANSWER_CHARACTERS = 16_000
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

    def add_turn(self) -> int:
        """Sample a call, add its result, and return the number of tokens of the next prompt."""
        prompt_T, parent = self.recorded.chat_prompt(self.messages, self.setting)
        number = len(self.recorded.answers)
        arguments = f'{{"command": "step {number}"}}'
        text = f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
        tokens_T = self.chat.answer(text)
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

    def prompt(self) -> None:
        """Make the next prompt from the client's messages, as the endpoint does."""
        prompt_T, matched = self.recorded.chat_prompt(self.messages, self.setting)
        self.recorded.parent_of(prompt_T, matched)


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
    whole = [message.for_template for message in talk.messages]
    figures["whole_ms"] = milliseconds(
        lambda: talk.chat.conversation(whole, TOOLS), max(3, repetitions // 10)
    )
    figures["piece_share"] = figures[f"piece_{TURNS}_ms"] / figures["whole_ms"]
    return figures


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
    for name, value in figures.items():
        print(f"{name:>20} {value:.3f}")
    if options.json:
        write_record(options.json, figures)


if __name__ == "__main__":
    main()
