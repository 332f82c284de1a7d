r"""Record a command on a terminal as an animated picture.

    pip install pyte
    python tools/docs/recording.py --after tok/s docs/images/run.gif \
        agenticrun run -f examples/frozen-lake.yaml --set pipeline.maxSteps=25

The command really runs, on a pseudo terminal of its own. The picture shows what it printed, faster
than it was printed: `--seconds` is the length of the picture. `--after TEXT` shows all that was
printed before TEXT, such as a warm-up, in the first second. Needs the font DejaVu Sans Mono
(Debian: fonts-dejavu-core).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import shlex
import struct
import termios
import time
from pathlib import Path
from typing import Any

import pyte  # type: ignore[import-not-found]
from PIL import Image, ImageDraw, ImageFont

COLUMNS, LINES = 100, 34
FONT = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono.ttf"
FONT_SIZE = 14
PAPER, INK = "#1b1f27", "#e9edf2"
COLORS = {
    "default": INK, "black": "#59636e", "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341",
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": INK,
}  # fmt: skip
FIRST_SECONDS, LAST_SECONDS = 1.0, 4.0
FRAME_SECONDS = 0.25

Outputs = list[tuple[float, bytes]]
Screen = list[list[Any]]
"""Characters of pyte, by line and column."""


def run(command: list[str]) -> tuple[Outputs, int]:
    """Run a command on a terminal; return what it printed and when, and its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    began = time.monotonic()
    outputs: Outputs = []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        outputs.append((time.monotonic() - began, data))
    return outputs, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def moments(outputs: Outputs, after: str, frames: int) -> list[float]:
    """Return when to look at the screen: in the first second, up to the text `after`."""
    end = outputs[-1][0]
    begin = next((at for at, data in outputs if after and after.encode() in data), 0.0)
    first = round(FIRST_SECONDS / FRAME_SECONDS) if begin else 0
    rest = frames - first
    return [
        *(begin * n / first for n in range(first)),
        *(begin + (end - begin) * n / rest for n in range(rest + 1)),
    ]


def screens(outputs: Outputs, command: list[str], times: list[float]) -> list[Screen]:
    """Return the screen at these times."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {shlex.join(command)}\r\n".encode())
    found, waiting = [], list(outputs)
    for time_of_frame in times:
        while waiting and waiting[0][0] <= time_of_frame:
            stream.feed(waiting.pop(0)[1])
        found.append([[screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)])
    return found


def draw(screen: Screen, font: ImageFont.FreeTypeFont) -> Image.Image:
    """Draw a screen."""
    width, height = round(font.getlength("m")), FONT_SIZE + 4
    image = Image.new("RGB", (COLUMNS * width + 24, LINES * height + 20), PAPER)
    pen = ImageDraw.Draw(image)
    for y, line in enumerate(screen):
        for x, char in enumerate(line):
            if char.data != " ":
                color = COLORS.get(char.fg, f"#{char.fg}" if len(char.fg) == 6 else INK)
                pen.text((12 + x * width, 10 + y * height), char.data, color, font)
    return image


def main() -> None:
    """Record the command of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--after", default="")
    parser.add_argument("picture", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    outputs, status = run(options.command)
    # The first and the last picture stand still for a time of their own.
    frames = round((options.seconds - LAST_SECONDS) / FRAME_SECONDS) - 1
    shown = screens(outputs, options.command, moments(outputs, options.after, frames))
    font = ImageFont.truetype(FONT, FONT_SIZE)
    palette = draw(shown[-1], font).quantize(32)
    images = [
        draw(screen, font).quantize(palette=palette, dither=Image.Dither.NONE) for screen in shown
    ]
    times = [round(FRAME_SECONDS * 1000)] * (len(images) - 1) + [round(LAST_SECONDS * 1000)]
    # A reader that shows no animation shows the first picture.
    images, times = [images[-1], *images], [round(FRAME_SECONDS * 1000), *times]
    more: dict[str, Any] = {
        "append_images": images[1:],
        "duration": times,
        "loop": 0,
        "optimize": True,
    }
    images[0].save(options.picture, save_all=True, **more)
    size = options.picture.stat().st_size / 1024
    print(
        f"{options.picture}: {size:.0f} KiB, {sum(times) / 1000:.0f} s of a run"
        f" of {outputs[-1][0]:.0f} s, status {status}"
    )


if __name__ == "__main__":
    main()
