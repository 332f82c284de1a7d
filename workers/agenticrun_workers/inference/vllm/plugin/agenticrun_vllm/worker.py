"""Methods that each vLLM worker gets, for `POST /collective_rpc`: new weights from files or from a trainer's broadcast.

An update is `begin_weights`, any number of `load_weights_file` or `receive_weights`, `finish_weights`. The caller holds the server
paused from before the first until the last has succeeded: in between, and after a failure, parameters hold nothing meaningful.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from .broadcast import WeightGroup
from .sampler import RequestSampler

# Linux lets a process use AMX tiles once it has asked, which vLLM's attention in bfloat16 does not: "Illegal instruction".
torch.cpu._init_amx()


class Worker:
    """Mixed into vLLM's worker class, whose attributes these are."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    def sample_by_request(self) -> None:
        """Sample and report log-probs as requests ask for it, from now on."""
        self.model_runner.sampler = RequestSampler()

    def begin_weights(self) -> None:
        """Collect new weights layer by layer; each layer is processed and copied in place when it is complete."""
        with set_current_vllm_config(self.vllm_config):
            # What an update that failed half-way had begun must not be counted as loaded.
            finalize_layerwise_reload(self._model(), self.model_runner.model_config)
            initialize_layerwise_reload(self._model())

    def load_weights_file(self, path: str) -> None:
        """Take the parameters of one safetensors file, which stays as it is until `finish_weights`."""
        with set_current_vllm_config(self.vllm_config), safe_open(path, "pt") as file:
            self._model().load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weights(self) -> None:
        """Process what is left. Returns when the model is whole."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self._model(), self.model_runner.model_config)
            for module in self._model().modules():
                if isinstance(module, ParallelLMHead):
                    # Tied to the embedding, it was given no weights, and on a CPU it would go on with its packed copy of the old ones.
                    module.quant_method.process_weights_after_loading(module)

    def join_weight_group(self, host: str, port: int, first_rank: int, world: int) -> None:
        """Meet the trainer (rank 0) at its port. Workers of this server have ranks from `first_rank`. An earlier group is left."""
        self.weight_group = WeightGroup(host, port, first_rank + self.rank, world, self.device)

    def receive_weights(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Take parameters that the trainer broadcasts in this order."""
        with set_current_vllm_config(self.vllm_config):
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                value = self.weight_group.receive(tuple(shape), getattr(torch, dtype))
                self._model().load_weights([(name, value)])

    def _model(self) -> Any:
        return self.model_runner.get_model()
