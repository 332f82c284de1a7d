"""Building the images with Docker, where the cluster is kind or somebody else's."""

from collections.abc import Sequence

from devcluster.console import progress
from devcluster.recipes import Recipe
from devcluster.settings import Settings
from devcluster.shell import run, succeeds

_BASE = "python:3.11-slim-bookworm"  # the default of the Dockerfiles


class DockerImages:
    """Images in Docker's own store, named for the registry of IMAGE_REGISTRY if there is one."""

    def __init__(self, settings: Settings) -> None:
        """Starts nothing."""
        self._settings = settings

    def build(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """Builds what is not there yet; returns references by image name."""
        return {recipe.name: self._build(recipe) for recipe in recipes}

    def _build(self, recipe: Recipe) -> str:
        root = self._settings.repository
        name = f"{recipe.repository}:{recipe.tag(root, _BASE)}"
        reference = (
            f"{self._settings.image_registry}/{name}" if self._settings.image_registry else name
        )
        if not succeeds(["docker", "image", "inspect", reference]):
            with progress(f"building the {recipe.name} image"):
                run(
                    [
                        "docker",
                        "build",
                        "--file",
                        recipe.dockerfile,
                        *recipe.build_arguments(),
                        "--tag",
                        reference,
                        ".",
                    ],
                    cwd=root,
                    env={"DOCKER_BUILDKIT": "1"},
                )
        return reference
