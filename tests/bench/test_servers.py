"""What a server of a comparison is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serving.servers import Server, serving
from model.errors import UserError
from trnspec.runtime.products import ONEDNN_VARIABLE


@pytest.mark.parametrize("own_engine", [True, False])
def test_vllm_s_own_engine_is_not_held_back_by_what_our_graphs_need(
    own_engine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command prints its environment and ends."""
    command, log = tmp_path / "vllm", tmp_path / "log"
    command.write_text("#!/bin/sh\nenv\n")
    command.chmod(0o755)
    monkeypatch.setenv(ONEDNN_VARIABLE, "SSE41")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    with pytest.raises(UserError, match="ended while it started"), serving(Server(command, 8999, [], own_engine), log):
        pass
    variables = set(log.read_text().splitlines())
    assert (f"{ONEDNN_VARIABLE}=SSE41" in variables) == (not own_engine)
    assert ("VLLM_TARGET_DEVICE=cpu" in variables) == own_engine
    assert "NPROC=1" in variables
