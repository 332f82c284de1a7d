"""Images of the source tree: build what changed and make it available to pods."""

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from email.message import Message

from devcluster.buildah import Buildah
from devcluster.console import progress, say
from devcluster.containerd import Containerd
from devcluster.recipes import Recipe
from devcluster.settings import Settings
from devcluster.shell import DevclusterError, exclusive, run, succeeds, write_if_changed

_KEPT_VERSIONS = 4
_REGISTRY_SECONDS = 120
"""Time limit of the registry: the disk that it reads may be busy with gigabytes of layers."""
_direct = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # the registry is on this machine: never by a proxy
_MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)


class NodeImages:
    """Images of the host cluster: built by buildah, pushed to our registry, pulled by the node."""

    def __init__(self, settings: Settings, containerd: Containerd) -> None:
        """Start nothing."""
        self._settings = settings
        self._buildah = Buildah(settings)
        self._containerd = containerd
        self._published = settings.cache / "images" / "published.json"

    def references(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """Return the references of these images of the source tree, and of the base, by name."""
        root = self._settings.repository
        references = {
            recipe.name: self._reference(recipe.repository, recipe.tag(root, self._buildah.base))
            for recipe in recipes
        }
        repository, tag = self._buildah.base.removeprefix("localhost/").split(":")
        return {**references, "base": self._reference(repository, tag)}

    def publish(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """Make these images and the base available to pods; return their references by name.

        Raises:
            DevclusterError: the cluster's registry does not answer.
            CommandFailed: a build, push or pull failed.
        """
        with exclusive(self._settings.cache / "images" / "lock"):
            references = self.references(recipes)
            present = self._containerd.images()
            if references["base"] not in present:
                self._buildah.make_base()
                self._deliver(self._buildah.base, references["base"])
            for recipe in recipes:
                reference = references[recipe.name]
                if reference not in present:
                    self._build_and_deliver(recipe, reference)
                self._forget_old(recipe, reference)
            return references

    def build(self, recipes: Sequence[Recipe]) -> None:
        """Build what changed into buildah's store, and nothing else: it needs no cluster."""
        with exclusive(self._settings.cache / "images" / "lock"):
            for recipe in recipes:
                self._build(recipe, _local(recipe, self.references([recipe])[recipe.name]))

    def pull_published(self) -> None:
        """Pull what was published last, so that pods start at once with a new image store."""
        present = self._containerd.images()
        for references in self._versions().values():
            if references[-1] not in present and self._in_registry(references[-1]):
                self._pull(references[-1])

    def _build_and_deliver(self, recipe: Recipe, reference: str) -> None:
        local = _local(recipe, reference)
        if not self._in_registry(reference):
            self._build(recipe, local)
        self._deliver(local, reference)

    def _build(self, recipe: Recipe, local: str) -> None:
        if not self._buildah.has(local):
            self._buildah.make_base()
            self._buildah.build(recipe, local)

    def _deliver(self, local: str, reference: str) -> None:
        if not self._in_registry(reference):
            self._buildah.push(local, reference)
        self._pull(reference)

    def _pull(self, reference: str) -> None:
        with progress(f"pulling {reference} into the node"):
            self._containerd.pull(reference)

    def _forget_old(self, recipe: Recipe, newest: str) -> None:
        """Keep the last versions and those in use.

        The registry drops the layers of the others at the next cold start.
        """
        versions = self._versions()
        versions[recipe.name], old = kept_and_old(
            versions.get(recipe.name, []), newest, self._containerd.images_in_use()
        )
        for reference in old:
            say(f"forgetting {reference}")
            self._containerd.remove_images([reference])
            local = _local(recipe, reference)
            if self._buildah.has(local):
                self._buildah.remove(local)
            self._delete_from_registry(reference)
        write_if_changed(self._published, json.dumps(versions, indent=2) + "\n")

    def _versions(self) -> dict[str, list[str]]:
        """Return the published references by image name, the newest last."""
        return dict(json.loads(self._published.read_text())) if self._published.exists() else {}

    def _reference(self, repository: str, tag: str) -> str:
        return f"{self._settings.registry}/{repository}:{tag}"

    def _in_registry(self, reference: str) -> bool:
        return self._digest(reference) is not None

    def _digest(self, reference: str) -> str | None:
        """Return the digest of a tag in the registry, None if it has no such tag."""
        headers = self._ask("HEAD", reference)
        return None if headers is None else str(headers["Docker-Content-Digest"])

    def _delete_from_registry(self, reference: str) -> None:
        digest = self._digest(reference)
        if digest is not None:
            image = reference.rpartition(":")[0]
            self._ask("DELETE", f"{image}:{digest}")

    def _ask(self, method: str, reference: str) -> Message | None:
        """Return the headers of the answer about a manifest, None if there is no such manifest.

        Raises:
            DevclusterError: the registry answers with another error, or not at all.
        """
        try:
            with _direct.open(
                self._request(method, reference), timeout=_REGISTRY_SECONDS
            ) as response:
                headers: Message = response.headers
                return headers
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise DevclusterError(f"the registry answers {error} for {reference}") from error
        except OSError as error:
            raise DevclusterError(
                f"the registry at {self._settings.registry} does not answer ({error});"
                " is the cluster up?"
            ) from error

    def _request(self, method: str, reference: str) -> urllib.request.Request:
        """Return a request about a manifest.

        Args:
            reference: registry/name:tag or registry/name:sha256:digest.
        """
        name, _, version = reference.removeprefix(f"{self._settings.registry}/").partition(":")
        url = f"http://{self._settings.registry}/v2/{name}/manifests/{version}"
        return urllib.request.Request(url, method=method, headers={"Accept": _MANIFEST_TYPES})


def _local(recipe: Recipe, reference: str) -> str:
    """Return the name in buildah's store of an image with this reference in the registry."""
    return f"localhost/{recipe.repository}:{reference.rpartition(':')[2]}"


def kept_and_old(
    known: Sequence[str], newest: str, in_use: Collection[str]
) -> tuple[list[str], list[str]]:
    """Split the versions of an image, the newest last, into those to keep and those to forget."""
    ordered = [*(reference for reference in known if reference != newest), newest]
    old = [reference for reference in ordered[:-_KEPT_VERSIONS] if reference not in in_use]
    return [reference for reference in ordered if reference not in old], old


_BASE = "python:3.11-slim-bookworm"  # the default of the Dockerfiles


class DockerImages:
    """Images in the store of Docker, named for the registry of IMAGE_REGISTRY if there is one."""

    def __init__(self, settings: Settings) -> None:
        """Start nothing."""
        self._settings = settings

    def build(self, recipes: Sequence[Recipe]) -> dict[str, str]:
        """Build what is not there yet; return references by image name."""
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
