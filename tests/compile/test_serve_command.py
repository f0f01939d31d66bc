"""The serve command: what it prints for each platform, and one sentence where a bundle cannot be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile.serve_command import main as serve_command
from compile.serve_command import serve_command as command_of
from model.errors import UserError
from tests.compile.tiny import spec, write_model
from tests.model.family import untraced

CPU = "VLLM_PLUGINS=trnspec HF_HUB_OFFLINE=1 vllm serve {} --port 8000"
TRN = "VLLM_PLUGINS=trnspec HF_HUB_OFFLINE=1 NEURON_LOGICAL_NC_CONFIG=2 vllm serve {} --port 8000 --additional-config "


def _lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    serve_command(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_nrt_comes_first_then_pjrt_then_the_cpu(base: Path, compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = untraced(spec(base, "neffs", batch=1, k=1))
    nrt, neuron, cpu = _lines(capsys, str(out))
    assert nrt == TRN.format(out) + '\'{"platform": "nrt"}\''
    assert neuron == TRN.format(out) + '\'{"platform": "neuron"}\''
    assert cpu == CPU.format(out)
    assert _lines(capsys, str(out), "--platform", "cpu") == [cpu]


def test_a_platform_that_cannot_serve_it_is_a_comment_or_an_error(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, nki = untraced(spec(base, "plain", batch=1, k=1)), untraced(spec(base, "nki", kernels="nki", batch=1, k=1))
    nrt, *_ = _lines(capsys, str(plain))
    assert nrt == f"# nrt: no, it has no NEFFs (neff: none); run python -m compile.neuron {plain} where neuronx-cc is"
    nrt, neuron, cpu = _lines(capsys, str(nki))
    assert nrt.startswith("# nrt: no, its graphs call NKI kernels that were compiled for no device (kernels: none); b")
    assert neuron == "# neuron: no, PJRT runs no NKI kernels; build it with --kernels reference"
    assert cpu == CPU.format(nki)
    with pytest.raises(UserError, match=f"{nki} cannot be served on nrt: its graphs call NKI kernels"):
        serve_command([str(nki), "--platform", "nrt"])


def test_a_bundle_without_weights_is_refused(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", 1, weights=False)
    bare = untraced(spec(tmp_path, "bare", target=str(target), k=0, batch=1))
    with pytest.raises(UserError, match="cannot be served on nrt or neuron or cpu: it has no weights; build it from"):
        serve_command([str(bare)])


def test_the_command_of_a_folder_that_is_not_here() -> None:
    assert command_of("/bundle/x", "nrt", 80)[2:6] == ["/bundle/x", "--port", "80", "--additional-config"]
    assert command_of("/bundle/x", "cpu") == ["vllm", "serve", "/bundle/x", "--port", "8000"]
