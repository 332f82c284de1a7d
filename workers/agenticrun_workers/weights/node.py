"""NodeWeights: one actor per node that holds the policy's weights in its shared memory, for all engines there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agenticrun_workers.storage import Folder
from agenticrun_workers.weights import disk
from agenticrun_workers.weights.buckets import Bucket
from agenticrun_workers.weights.disk import Published
from agenticrun_workers.weights.receiver import Receiver
from agenticrun_workers.weights.shared_folder import SharedFolder
from agenticrun_workers.weights.written import delta_file


class NodeWeights:
    """Owns a folder of buckets in shared memory, which goes when this process does.

    On the first trainer's node, the trainer writes into it. Elsewhere the buckets come through `receive` or `fetch`.

    Args:
        run: the run's name, for the folder's.
    """

    def __init__(self, run: str, buckets: tuple[Bucket, ...]) -> None:
        self._shared = SharedFolder(run)
        self._buckets = buckets
        self._receiver = Receiver(self._shared.path, buckets)

    def folder(self) -> str:
        """Where the buckets are."""
        return str(self._shared.path)

    def read(self, index: int, delta: bool) -> NDArray[np.uint8]:
        """A bucket's data, or what changed in it at the last sync."""
        if delta:
            return np.fromfile(delta_file(self._shared.path, self._buckets[index]), np.uint8)
        return self._receiver.data(index)

    def receive(self, index: int, payload: NDArray[np.uint8], delta: bool) -> None:
        """Take what another node's `read` gave."""
        if delta:
            self._receiver.patch(index, payload)
        else:
            self._receiver.write(index, payload)

    def publish(self, uri: str, index: int, delta: bool) -> Published:
        """Write what `read` gives into the folder of a version."""
        return disk.publish(Folder(uri), index, self.read(index, delta), delta=delta)

    def seal(self, uri: str, files: list[Published]) -> None:
        """Make these files a version."""
        disk.seal(Folder(uri), files)

    def fetch(self, uri: str) -> None:
        """Take a sealed version."""
        for published, payload in disk.fetch(Folder(uri)):
            self.receive(published.index, payload, published.delta)

    def delete(self, uri: str) -> None:
        """Delete a folder that `publish` made, or all of a run's."""
        Folder(uri).delete()

    def release(self) -> None:
        """Free the memory now."""
        self._shared.delete()
