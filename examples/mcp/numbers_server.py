"""An MCP server: a hidden number, a tool that shows it, and two tools that only the run calls."""

import random

from mcp.server.mcpserver import MCPServer

HIGHEST = 3

server = MCPServer("numbers", log_level="WARNING")
secret = 0
shown = False


@server.tool()
def begin(seed: int) -> str:
    """Choose a number. The run calls this at the start of an episode (startTool)."""
    global secret, shown
    secret, shown = random.Random(seed).randint(0, HIGHEST), False
    return "Look, then name the number."


@server.tool()
def look() -> int:
    """Show the number."""
    global shown  # noqa: PLW0603
    shown = True
    return secret


@server.tool()
def score(answer: str) -> float:
    """Return the reward: 0 for a guess. The run calls this with the final answer (rewardTool)."""
    return float(shown and answer == str(secret))


if __name__ == "__main__":
    server.run()
