"""neuron_config.json against the file that NxDI itself wrote for the same options."""

import json
from pathlib import Path

from compile.neuron.config import render
from compile.spec import BuildSpec

GOLDEN = Path(__file__).parent / "golden" / "nxdi_neuron_config.qwen3-32b+1.7b.tp32.json"
# paths of the machine that wrote the golden file
PATHS = {"_name_or_path", "draft_model_path"}


def _flat(value: object, name: str = "") -> dict[str, object]:
    if isinstance(value, dict) and value:
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{name}/{key}").items()}
    return {name: value}


def _differing(ours: BuildSpec) -> set[str]:
    written, golden = _flat(json.loads(render(ours))), _flat(json.loads(GOLDEN.read_text(encoding="utf-8")))
    assert written.keys() == golden.keys()
    return {k for k in golden if golden[k] != written[k] and k.rsplit("/", 1)[1] not in PATHS}


def test_equal_to_nxdi_field_by_field() -> None:
    # NxDI's speculation_length 7 is six drafts and the target's own token
    assert _differing(BuildSpec(k=6, tp=32, batch=4, max_len=1024)) == set()


def test_another_k_and_batch_are_noticed() -> None:
    assert _differing(BuildSpec(k=7)) == {"/neuron_config/speculation_length"}
    assert "/fused_spec_config/draft_config/neuron_config/batch_size" in _differing(BuildSpec(k=6, batch=2))
