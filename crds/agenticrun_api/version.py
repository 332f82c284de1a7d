"""The version of AgenticRun, written only here.

The build reads it, `make generate` copies it into the chart, and images, which hold the code
without package metadata, import it.
"""

__version__ = "0.1.0"
