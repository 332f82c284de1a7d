"""A real Kubernetes with KubeRay for tests and the demo: `python3 tools/devcluster up`.

Standard library only: it runs before anything is installed. docs/devcluster.md explains it.
"""
