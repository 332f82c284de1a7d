"""Environments of OpenEnv: over the network (`server.py`), or in process by their class."""

from agenticrun_workers.envs.openenv.adapter import OpenEnvClass, OpenEnvServer, make_openenv

__all__ = ["OpenEnvClass", "OpenEnvServer", "make_openenv"]
