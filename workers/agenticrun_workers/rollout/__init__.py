"""Rollout: env workers run episodes, trainer pods store them, the driver schedules and counts."""
