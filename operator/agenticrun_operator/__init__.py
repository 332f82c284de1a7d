"""The AgenticRun operator: watch -> queue -> observe -> plan -> apply."""
