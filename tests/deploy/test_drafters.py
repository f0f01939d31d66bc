"""Every drafter is a value: what it builds, what its pods ask for, and which engine refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.check import findings
from deploy.render import render
from model.drafting import KINDS
from model.errors import UserError
from tests.deploy.rendered import changed, container, flags

OURS: dict[str, Any] = {"images": {"server": "registry.internal/specdec-server:0.1.0"}, "server": {"engine": "trnspec"}}
FOLDER = "checkpoints/drafter"
DRAFTS = {
    "chain": "Qwen/Qwen3-1.7B",
    "parallel": "amd/PARD-Qwen3-0.6B",
    "eagle3": "RedHatAI/Qwen3-32B-speculator.eagle3",
    "medusa": "own/medusa-32b",
    "ngram": "none",
}


def model_of(drafter: str, **more: Any) -> dict[str, Any]:
    """The values of a drafter's model."""
    folder = FOLDER if KINDS[drafter].has_model else "none"
    return {"drafter": drafter, "draft": DRAFTS[drafter], "draft_folder": folder} | more


def test_every_drafter_is_here() -> None:
    assert {*DRAFTS, "none"} == KINDS.keys()


@pytest.mark.parametrize("drafter", DRAFTS)
def test_the_job_builds_it_and_the_server_asks_for_it(drafter: str, tmp_path: Path) -> None:
    values = changed(**OURS, model=model_of(drafter))
    render(values, tmp_path)
    built = flags(container(tmp_path, "compile-speculative", "build")["command"])
    mounted = built["checkpoint"].removesuffix(values.model.target_folder) + FOLDER
    drafts = {"draft": DRAFTS[drafter] if drafter == "chain" else mounted, "draft-checkpoint": mounted}
    assert {n: v for n, v in built.items() if n.startswith("draft")} == {"drafter": drafter} | (
        drafts if KINDS[drafter].has_model else {}
    )
    alone = flags(container(tmp_path, "compile-baseline", "build")["command"])
    assert not [name for name in alone if name.startswith("draft")]
    for owner, name in (("compile-speculative", "push"), ("-speculative", "fetch")):
        asked = flags(container(tmp_path, owner, name)["command"])
        assert (asked["drafter"], asked["k"]) == (drafter, "7")
    assert flags(container(tmp_path, "-baseline", "fetch")["command"])["drafter"] == "none"
    title = drafter if drafter == "ngram" else DRAFTS[drafter].rsplit("/", 1)[-1].lower()
    assert container(tmp_path, "-speculative", "server")["command"][2].startswith(f"/bundle/qwen3-32b-{title}-tp32")
    assert flags(container(tmp_path, "load-test", "load-test")["command"])["draft"] == values.model.draft_title


def test_the_cluster_is_asked_the_same_for_every_drafter() -> None:
    questions = {
        drafter: [f.question for f in findings(changed(**OURS, model=model_of(drafter)), lambda *_: None)]
        for drafter in DRAFTS
    }
    assert len({tuple(asked) for asked in questions.values()}) == 1


@pytest.mark.parametrize("drafter", [d for d in DRAFTS if d != "chain"])
def test_the_vendors_engine_refuses_what_it_cannot_load(drafter: str) -> None:
    with pytest.raises(UserError, match=f"engine is nxdi and model.drafter is {drafter}, which NxDI's loader cannot"):
        changed(model=model_of(drafter))


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (model_of("ngram", draft="Qwen/Qwen3-1.7B"), "ngram, which has no model, and model.draft is 'Qwen/Qwen3-1.7B'"),
        (model_of("ngram", draft_folder=FOLDER), "write none there and as model.draft_folder"),
        (model_of("chain", draft="amd/PARD-Qwen3-0.6B"), "model.draft is 'amd/PARD-Qwen3-0.6B'; it must be one of"),
        (model_of("eagle3", draft="none"), "it must be the name of a checkpoint that drafts by eagle3"),
        (model_of("medusa", draft="../heads"), "it must be the name of a checkpoint that drafts by medusa"),
        (model_of("parallel", k=17), "the drafter parallel drafts at most 16 in a step, lower k"),
        (model_of("eagle3", k=40), "model cannot be built: k is 40"),
        (model_of("chain") | {"drafter": "lookup"}, "model.drafter is 'lookup'; it must be one of chain, parallel"),
        (model_of("ngram") | {"drafter": "none"}, "model.drafter is 'none'; it must be one of"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(model: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        changed(**OURS, model=model)
