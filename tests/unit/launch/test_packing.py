"""Values with many small arrays on their way between actors."""

from __future__ import annotations

import pickle

import numpy as np

from agenticrun_workers.launch.packing import Block


def test_a_block_is_one_buffer_and_arrives_as_the_value_itself() -> None:
    arrays = [np.arange(size) for size in range(1, 100)]
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(Block(arrays), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    assert len(sent) < 100
    received = pickle.loads(sent, buffers=buffers)
    assert [array.tolist() for array in received] == [array.tolist() for array in arrays]
    received[0] += 1
    assert arrays[0].tolist() == [0], "the receiver has its own"
