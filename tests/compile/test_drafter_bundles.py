"""A bundle of each drafter: what the doctor and the contract say of it, and NxDI's loaders."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile.doctor import findings, summary
from compile.doctor import main as doctor
from compile.serve_command import main as serve_command
from model.drafters.registry import DRAFTERS
from model.errors import UserError
from tests.model.family import graphs
from trnspec.bundle.contract import violations

REFUSED = {
    "parallel": "its drafter is parallel, and NxDI's loaders bring plain chains alone",
    "eagle3": "its drafter is eagle3, and NxDI's loaders bring plain chains alone",
    "dflash": "its drafter is dflash, and NxDI's loaders bring plain chains alone",
    "ngram": "its drafts come from the host, and NxDI's loader has none",
}


def test_every_drafter_but_a_chain_is_refused() -> None:
    assert REFUSED.keys() == DRAFTERS.keys() - {"chain", "none"}


@pytest.mark.parametrize("drafter", REFUSED)
def test_who_reads_a_bundle_knows_its_drafter(drafter: str, family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = graphs(family, drafter).bundle
    doctor([str(bundle.path)])
    out = capsys.readouterr().out
    assert f"drafter:    {drafter}\n" in out
    # a block of six rows was trained for five drafts, and these bundles draft three
    assert ("trained for k 5: with k 3 it is a different drafter" in out) == (drafter == "dflash")
    assert (summary(bundle)["drafter"], findings(bundle)) == (drafter, [])
    for graph in bundle.graphs:
        assert not violations(graph, (bundle.path / graph.file).read_bytes(), bundle.spec)
    with pytest.raises(UserError, match=f"cannot be loaded on Trainium: {REFUSED[drafter]}"):
        serve_command([str(bundle.path), "--engine", "v0"])
