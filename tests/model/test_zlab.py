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

from model.drafters.dflash import DFlashModel
from tests.compile.tiny import write_model
from tests.model.drafted import pair_of
from tests.model.heads import write_block
from tests.model.paged import empty, rows
from tests.model.test_dflash import MASK

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

    caches = empty(model.config, 1, LENGTH)
    caches = model.context(states_1SF[:, : POSITIONS[0]], caches, rows(0, POSITIONS[0], 1, LENGTH))
    for n, position in enumerate(POSITIONS):
        meta = rows(position, position + BLOCK, 1, LENGTH)
        x_1NE, caches, _ = model.hidden(ids_1N, caches, meta._replace(attend_to_B1=meta.positions_BN[:, -1:]))
        ours = model.norm(x_1NE)[0]
        assert torch.allclose(ours, theirs[str(n)], atol=1e-4, rtol=0)
        assert torch.equal(model.lm_head(ours).argmax(-1), model.lm_head(theirs[str(n)]).argmax(-1))
        # rows behind those that are kept hold garbage
        verified_1NF = states_1SF[:, position : position + BLOCK].clone()
        kept = POSITIONS[n + 1] - position if n + 1 < len(POSITIONS) else BLOCK
        verified_1NF[:, kept:] = 1e3
        caches = model.context(verified_1NF, caches, meta)
