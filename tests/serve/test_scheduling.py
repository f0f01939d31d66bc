"""`python -m tests.serve.scheduling` on a small bundle: equal runs pass, and one bit of a prefill is noticed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.build import build
from tests.compile.tiny import spec, write_model
from tests.serve.server import OVER_HTTP
from trnspec.runtime.xla import XlaRunner

pytestmark = OVER_HTTP[:]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scheduling")
    for name, layers in (("target", 2), ("draft", 1)):
        write_model(folder / name, 1, head_dim=32, num_hidden_layers=layers)
    return build(spec(folder, batch=4, max_len=512, chunks=(128, 512)))


@pytest.mark.parametrize("fault", [False, True])
def test_one_bit_of_a_prefill_is_noticed(
    bundle: Path, fault: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.serve import scheduling

    run = XlaRunner.run

    def faulty(self: Any, key: Any, inputs: Any) -> Any:
        outputs = run(self, key, inputs)
        if not (fault and key.is_prefill):
            return outputs
        scores = np.array(outputs.scores)
        scores[..., 0] = np.nextafter(scores[..., 0], np.float32(0))
        return outputs._replace(scores=scores)

    monkeypatch.setattr(XlaRunner, "run", faulty)
    with pytest.raises(SystemExit, match="1") if fault else nullcontext():
        scheduling.main(["--bundle", str(bundle), "--requests", "96", "--tokens", "16", "--blocks", "5"])
    page = capsys.readouterr().out
    assert ("'different_ids': 0, 'different_logprobs': 0" in page) != fault
    assert ("scored, " in page) == fault
