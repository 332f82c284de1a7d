"""Reporting: progress snapshots, the reporter sidecar, and metrics on disk. Imports neither torch nor Ray."""
