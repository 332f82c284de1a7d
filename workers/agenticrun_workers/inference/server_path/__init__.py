"""Modules that engine servers import too. They have this folder on their PYTHONPATH."""
