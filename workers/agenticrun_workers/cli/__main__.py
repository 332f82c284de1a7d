"""Entry point of `python -m agenticrun_workers.cli`."""

from agenticrun_workers.cli.app import main

main()
