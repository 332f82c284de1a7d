"""A run file has the same values on a laptop as under kubectl."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from kubectl_yaml import READ_BY_KUBECTL
from testcluster import Cluster


def read_plainly(text: str) -> object:
    """Return what PyYAML reads; None if it cannot."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def test_kubectl_reads_the_values_that_we_read(api: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    values = "".join(f"- {text}\n" for text, _ in READ_BY_KUBECTL)
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: x}}\nvalues:\n{values}")
    read = json.loads(api.kubectl("annotate", "--local", "-f", str(file), "a=b", "-o", "json"))
    expected = [value for _, value in READ_BY_KUBECTL]
    assert read["values"] == expected
    # Else the test would show nothing.
    assert [read_plainly(text) for text, _ in READ_BY_KUBECTL] != expected
