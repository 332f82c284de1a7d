"""The command line, `agenticrun`: one file per command.

Ray, torch and transformers take seconds to import, so each command imports what it needs.
"""

from agenticrun_workers.cli.app import app, main

__all__ = ["app", "main"]
