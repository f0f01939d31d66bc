"""A step in halves, drafts and verification by two graphs: the fused step's tokens and drafts, and who has halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.doctor import findings, summary
from compile.spec import BuildSpec
from model.bundle.manifest import Bundle, canonical_hash, manifest_digest, parse_manifest, read_bundle
from model.bundle.schema import DRAFT, FUSED, VERIFY, kind_of
from model.errors import UserError
from model.llm import LLM
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from tests.model.heads import write_family

PARAMS = [Params(), Params(0.9, seed=3), Params(1.1, top_k=9, top_p=0.9, seed=4)]
# of each drafter: its flags
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"draft": "chain"}, "parallel": {"draft": "parallel"}, "ngram": {"drafter": "ngram"},
    "eagle3": {"draft": "eagle3"},
    "two-ranks": {"draft": "chain", "tp": 2}, "eagle3-two-ranks": {"draft": "eagle3", "tp": 2},
    "kernels": {"draft": "parallel", "kernels": "nki", "k": 2, "fewer": ()},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("separate"))


def _bundle(folder: Path, drafter: str, **changes: Any) -> Bundle:
    flags = DRAFTERS[drafter] | changes
    if "draft" in flags:
        flags["draft"] = flags["draft_checkpoint"] = str(folder / flags["draft"])
        flags.setdefault("separate", True)
    target = str(folder / "target")
    values = {"target": target, "checkpoint": target, "tp": 1, "k": 3, "fewer": (1,), "batch": 3, "max_len": 128}
    return read_bundle(build(BuildSpec(**(values | {"dtype": "fp32", "out": str(folder / f"of-{drafter}")} | flags))))


def _requests() -> list[Request]:
    prompts = [(9, 2, 7), (4,), (1, 2, 3, 1, 2, 3, 1, 2)]
    requests = [Request(p, params, 20) for p in prompts for params in PARAMS]
    # one that meets the context's end, and limits that make steps of the smaller k
    return [*requests, Request(tuple(range(1, 60)) * 2, PARAMS[1], 30), Request((8, 8), PARAMS[1], 20, k_limit=1)]


class Counted:
    """Graphs, and how often each kind ran."""

    def __init__(self, graphs: Graphs) -> None:
        self.graphs, self.kinds = graphs, set[str]()

    def run(self, tag: str, *rest: Any) -> Any:
        self.kinds.add(kind_of(tag))
        return self.graphs.run(tag, *rest)

    def draft(self, tag: str, *rest: Any) -> Any:
        self.kinds.add(kind_of(tag))
        return self.graphs.draft(tag, *rest)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_halves_emit_and_accept_what_the_fused_step_does(folder: Path, drafter: str) -> None:
    graphs = Graphs(_bundle(folder, drafter))
    assert findings(graphs.bundle) == []
    requests, shape = _requests()[:: 5 if drafter == "kernels" else 1], shape_of(graphs.bundle)

    def served(**options: Any) -> tuple[list[Result], set[str]]:
        counted = Counted(graphs)
        return Engine(counted, shape, **options).run(requests), counted.kinds

    (fused, of_fused), (halves, of_halves), (alone, _) = served(), served(separate=True), served(speculative=False)
    # steps, drafts offered and kept, k of each, reasons: all of a result
    assert halves == fused
    assert [r.ids for r in halves] == [r.ids for r in alone]
    assert 0 < sum(sum(r.accepted) for r in halves) < sum(sum(r.drafted) for r in halves)
    if drafter != "ngram":
        assert of_halves & {DRAFT, VERIFY, FUSED} == {DRAFT, VERIFY}
        assert of_fused & {DRAFT, VERIFY, FUSED} == {FUSED}


def test_each_half_holds_what_it_reads(folder: Path) -> None:
    bundle = _bundle(folder, "parallel")
    assert (summary(bundle)["separate"], summary(bundle)["masks"]) == (True, "none")
    draft, verify = (bundle.graph(part, 128) for part in (DRAFT, VERIFY))
    assert {t.name.split(".")[0] for t in draft.weights} == {"draft_model"}
    assert {t.name.split(".")[0] for t in verify.weights} == {"target_model"}
    # what the drafter remembers of a step is kept where the step is verified
    assert [t.name for t in verify.state if t.name.startswith("draft_model")] == ["draft_model.kept.ids"]
    assert [t.name for t in draft.outputs] == ["candidates"]
    assert {t.name: t.shape for t in verify.inputs}["input_ids"] == (3, 4)


def test_the_front_door_runs_them_and_refuses_a_bundle_without(folder: Path) -> None:
    path = _bundle(folder, "chain").path
    with LLM(path, separate=True) as halves, LLM(path) as fused:
        for params in PARAMS:
            one, two = (llm.generate([3, 4], params, max_new_tokens=12) for llm in (halves, fused))
            assert (one.ids, one.drafts_kept) == (two.ids, two.drafts_kept)
    plain = _bundle(folder, "chain", separate=False, fewer=(), out=str(folder / "plain"))
    with pytest.raises(UserError, match="built without --separate"):
        LLM(plain.path, separate=True)


def test_a_manifest_must_list_halves_with_their_own_shapes(folder: Path) -> None:
    content = json.dumps(_bundle(folder, "chain").manifest)

    def refused(why: str, change: Any) -> None:
        manifest = json.loads(content)
        change(manifest, {g["tag"]: g for g in manifest["graphs"]})
        manifest["config_hash"] = canonical_hash([manifest["spec"], manifest["models"]])
        manifest["manifest_sha256"] = manifest_digest(manifest)
        with pytest.raises(UserError, match=why):
            parse_manifest(json.dumps(manifest).encode(), "manifest.json", Path())

    refused("graphs has", lambda m, g: m["spec"].update(separate=False))
    refused("graphs has", lambda m, g: m["graphs"].remove(g[VERIFY]))
    refused(f"{VERIFY}_bk128: input_ids has shape", lambda m, g: g[VERIFY]["inputs"][0].__setitem__(1, [3, 1]))
    refused(f"{DRAFT}_bk128: candidates has shape", lambda m, g: g[DRAFT]["outputs"][0].__setitem__(1, [3, 9]))
    refused(f"{DRAFT}_bk128: its caches", lambda m, g: g[DRAFT].update(state=g[VERIFY]["state"]))
    refused(f"{VERIFY}_bk128: target_model.embed", lambda m, g: g[VERIFY].update(weights=g[DRAFT]["weights"]))


@pytest.mark.parametrize("flags", [{"k": 0, "fewer": ()}, {"drafter": "ngram"}], ids=["alone", "ngram"])
def test_a_build_without_a_draft_s_model_has_no_halves(folder: Path, flags: dict[str, Any]) -> None:
    target = str(folder / "target")
    with pytest.raises(UserError, match="separate was given and"):
        BuildSpec(target=target, tp=1, **({"k": 3, "max_len": 128, "separate": True} | flags)).check()
