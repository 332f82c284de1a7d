"""Progress snapshots, the reporter sidecar, and trackers of metrics; without torch and Ray."""
