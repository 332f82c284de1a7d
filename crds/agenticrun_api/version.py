"""The version of AgenticRun, the only place where it is written.

The build reads it, `make generate` copies it into the chart, and images, which hold the code without
package metadata, import it.
"""

__version__ = "0.1.0"
