"""Rollout: many episodes at once, played by env workers, stored on trainer pods, counted in the driver."""
