"""The version of AgenticRun. Images hold the code without package metadata, so it stands here, and the build reads it."""

__version__ = "0.1.0"
