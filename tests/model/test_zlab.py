"""Our DFlash holds against z-lab's own code, which runs in an environment of its own (tests/model/run_zlab.py).

Skipped where `TRNSPEC_ZLAB_PYTHON` names no Python that has z-lab's package `dflash` and zlab_requirements.txt.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.cache import Placement, empty_caches
from model.drafters.dflash import DFlashModel
from model.parallel import ONE_RANK
from tests.compile.tiny import write_model
from tests.model.heads import write_block
from tests.model.test_dflash import MASK, pair_of

PYTHON = os.environ.get("TRNSPEC_ZLAB_PYTHON", "")
LENGTH, BLOCK = 128, 6
# positions of the input ids of several steps, which kept 1 to 6 ids
POSITIONS = (7, 8, 14, 17, 19, 25)


@pytest.mark.skipif(not PYTHON, reason="TRNSPEC_ZLAB_PYTHON names no environment with z-lab's dflash")
@torch.no_grad()
def test_rows_are_those_of_zlab(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", 1, scale=0.4, num_hidden_layers=8)
    folder = write_block(tmp_path / "draft", target)
    pair = pair_of(target, folder)
    model = pair.draft_model
    assert isinstance(model, DFlashModel)
    generator = torch.Generator().manual_seed(6)
    states_1SF = torch.randn(1, LENGTH, 3 * 32, generator=generator)
    ids_1N = torch.tensor([[9, *[MASK] * (BLOCK - 1)]], dtype=torch.int32)
    embeds = model.embed_tokens(ids_1N)[0]
    steps = {"states": states_1SF[0], "embeds": embeds, "positions": torch.tensor(POSITIONS)}
    save_file(steps, folder / "steps.safetensors")
    subprocess.run([PYTHON, "tests/model/run_zlab.py", str(folder)], check=True, timeout=300)
    theirs = load_file(folder / "rows.safetensors")

    keys_S, caches = torch.arange(LENGTH), empty_caches(model.config, ONE_RANK, 1, LENGTH, torch.float32)
    caches = model.context(states_1SF[:, : POSITIONS[0]], caches, Placement(keys_S[None, : POSITIONS[0]], keys_S))
    for n, position in enumerate(POSITIONS):
        positions_1N = position + torch.arange(BLOCK, dtype=torch.int32)[None]
        placement = Placement(positions_1N, keys_S)
        passed = model.hidden(ids_1N, caches, placement._replace(last_B1=positions_1N[:, -1:]))
        rows = model.norm(passed.x_BNE)[0]
        assert torch.allclose(rows, theirs[str(n)], atol=1e-4, rtol=0)
        assert torch.equal(model.lm_head(rows).argmax(-1), model.lm_head(theirs[str(n)]).argmax(-1))
        # rows behind those that are kept hold garbage
        verified_1NF = states_1SF[:, position : position + BLOCK].clone()
        kept = POSITIONS[n + 1] - position if n + 1 < len(POSITIONS) else BLOCK
        verified_1NF[:, kept:] = 1e3
        caches = model.context(verified_1NF, passed.caches, placement)
