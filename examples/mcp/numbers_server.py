"""An MCP server: a number to find, tools to find it with, and two tools that only the run calls."""

import random

from mcp.server.mcpserver import MCPServer

HIGHEST = 9

server = MCPServer("numbers", log_level="WARNING")
secret = 0


@server.tool()
def begin(seed: int) -> str:
    """Choose a number. The run calls this at the start of an episode (startTool)."""
    global secret  # noqa: PLW0603
    secret = random.Random(seed).randint(0, HIGHEST)
    return f"Find a number from 0 to {HIGHEST}."


@server.tool()
def compare(number: int) -> str:
    """Say whether the secret number is higher, lower or equal."""
    return "equal" if secret == number else "higher" if secret > number else "lower"


@server.tool()
def score(answer: str) -> float:
    """Return the reward. The run calls this with the final answer (rewardTool)."""
    return float(answer == str(secret))


if __name__ == "__main__":
    server.run()
