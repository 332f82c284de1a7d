"""Property tests run on shared, busy machines: no deadline per example."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
