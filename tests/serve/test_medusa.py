"""Our Medusa heads against vLLM's module, which runs on the CPU of its own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compile.tiny import write_medusa
from tests.model.test_medusa import heads_of
from tests.serve.server import NO_VLLM

pytestmark = pytest.mark.skipif(bool(NO_VLLM), reason=NO_VLLM)


@pytest.mark.parametrize("shared", [True, False], ids=["shared projection", "a projection each"])
def test_logits_are_those_of_vllm(tmp_path: Path, shared: bool) -> None:
    folder = write_medusa(tmp_path / "heads", 3, heads=5, layers=2, shared=shared, scale=0.3)
    states_RE = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    save_file({"states": states_RE}, folder / "states.safetensors")
    command = [sys.executable, "-m", "tests.serve.run_medusa", str(folder)]
    # the platform that vLLM chooses before it asks any plugin, ours among them
    subprocess.run(command, check=True, env=os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"})
    expected = load_file(folder / "logits.safetensors")["logits"]
    with torch.no_grad():
        logits = heads_of(folder).logits(states_RE[:, None], 5)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 1, "logits that are all alike would prove nothing"
