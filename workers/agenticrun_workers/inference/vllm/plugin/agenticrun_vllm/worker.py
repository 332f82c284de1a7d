"""Methods of each vLLM worker for `POST /collective_rpc`: weights from files or a broadcast.

An update is `begin_weights`, any number of `load_weights_file` or `receive_weights`, and
`finish_weights`. The caller keeps the server paused until the last call has succeeded. During an
update and after a failure, the parameters are meaningless. A broadcast uses NCCL between GPUs, else
gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from .sampler import RequestSampler

dist: Any = torch.distributed
"""torch's type stubs lack the process groups."""

PREFIX = "agenticrun-weights"
TIMEOUT = timedelta(seconds=120)
"""For the rendezvous and for each tensor. As at the trainer's end, `weights.collective`."""


class WeightGroup:
    """A process group with the trainer, which is rank 0 and hosts the store.

    It is independent of torch.distributed's default group, which is vLLM's own.
    """

    def __init__(self, host: str, port: int, rank: int, world: int, device: torch.device) -> None:
        self._device = device
        self._store = dist.PrefixStore(PREFIX, dist.TCPStore(host, port, world, False, TIMEOUT))
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(self._store, rank, world, options)
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, world, TIMEOUT)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor of the trainer. Raises RuntimeError if it is gone or late."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()
        return tensor


# A process must ask Linux for AMX tiles before it uses them. vLLM's attention in bfloat16 does not
# ask, and would end with "Illegal instruction".
torch.cpu._init_amx()


def _pack_experts_again() -> None:
    """Let an update pack the experts of a mixture for the kernel of CPUs, as the start does.

    vLLM packs only the first ones. The kernel would read others, which are not packed, as if they
    were.
    """
    original = UnquantizedFusedMoEMethod._setup_kernel

    def set_up(method: Any, layer: Any, **weights: torch.Tensor) -> None:
        updated = method.moe_kernel is not None
        original(method, layer, **weights)
        if updated:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up


if current_platform.is_cpu():
    _pack_experts_again()


class Worker:
    """A mix-in of vLLM's worker class, which has these attributes."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    def sample_by_request(self) -> None:
        """Install our sampler."""
        self.model_runner.sampler = RequestSampler()

    def begin_weights(self) -> None:
        """Begin an update. A layer is processed and copied in place when it is complete."""
        with set_current_vllm_config(self.vllm_config):
            # Layers of an update that failed half-way must not count as loaded.
            finalize_layerwise_reload(self._model(), self.model_runner.model_config)
            initialize_layerwise_reload(self._model())

    def load_weights_file(self, path: str) -> None:
        """Load the parameters of a safetensors file. It must not change until `finish_weights`."""
        with set_current_vllm_config(self.vllm_config), safe_open(path, "pt") as file:
            names = file.keys()
            self._model().load_weights((name, file.get_tensor(name)) for name in names)

    def finish_weights(self) -> None:
        """Process the remaining layers and complete the update."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self._model(), self.model_runner.model_config)
            for module in self._model().modules():
                if isinstance(module, ParallelLMHead):
                    # A head that is tied to the embedding gets no weights of its own. On a CPU it
                    # would keep its packed copy of the old ones.
                    module.quant_method.process_weights_after_loading(module)

    def join_weight_group(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Join the collective of the trainer, which is rank 0, and leave an earlier one.

        The workers of this server have ranks from `first_rank`.
        """
        self.weight_group = WeightGroup(host, port, first_rank + self.rank, world, self.device)

    def receive_weights(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Load parameters that the trainer broadcasts in this order."""
        with set_current_vllm_config(self.vllm_config):
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                value = self.weight_group.receive(tuple(shape), getattr(torch, dtype))
                self._model().load_weights([(name, value)])

    def _model(self) -> Any:
        return self.model_runner.get_model()
