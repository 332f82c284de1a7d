"""The embedded engine names engines that serve the types which it refuses."""

from __future__ import annotations

import re

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agenticrun_workers.inference.server_process import engines_folder
from agenticrun_workers.inference.transformers.parity import OTHER_ENGINES

LISTS = {
    "vllm": ("vllm/model_executor/models/registry.py", r'^ +"(\w+)": (?=\(|\[|$)'),
    "sglang": ("sglang/srt/models/*.py", r"^EntryClass = (?:\[([^\]]*)\]|(\w+))"),
}
"""Files of an engine that name the classes of models which it serves, and how."""


def served_by(engine: str) -> set[str]:
    pattern, names = LISTS[engine]
    packages = engines_folder(engine) / engine
    files = list(packages.glob(f"lib/python*/site-packages/{pattern}"))
    assert files, f"{engine} is not installed in {packages}"
    found = (
        part for file in files for part in re.findall(names, file.read_text(), flags=re.MULTILINE)
    )
    return {name for part in found for name in re.findall(r"\w+", "".join(part))}


def test_the_engines_that_are_named_serve_the_type() -> None:
    served = {engine: served_by(engine) for engine in LISTS}
    assert all("LlamaForCausalLM" in names for names in served.values())
    for model_type, engines in OTHER_ENGINES.items():
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        assert engines == tuple(e for e, names in served.items() if name in names), model_type
