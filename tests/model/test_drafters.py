"""Every drafter emits the target's tokens: whatever it proposes, at every k, batch and rank count, greedy and drawn.

Pairs of options, not all products: each drafter meets several k, both dtypes or a batch alone, and ranks that split its
target, its own layers and the caches' positions. test_invariance.py has the chain on one rank, test_ngram.py the host.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from compile.build import build
from compile.doctor import findings
from compile.spec import BuildSpec
from model.bundle.contract import declared
from model.bundle.manifest import canonical_hash, parse_manifest
from model.bundle.opening import read_bundle
from model.errors import UserError
from model.graph_key import GraphKey, Stage
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.serving.slots import Slot
from model.serving.step_k import Always
from tests.compile.tiny import spec, write_medusa, write_model
from tests.last_few import last_few
from tests.model.heads import write_head

MASK = 61
_PLAIN = str.maketrans("(), ", "____")
# of each drafter: the flags that are its own
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {"k": 0},
    "chain": {"draft": "chain"},
    "parallel": {"draft": "parallel"},
    "eagle3": {"draft": "eagle3"},
    "medusa": {"draft": "medusa"},
    "ngram": {"drafter": "ngram"},
}
# what else a bundle may differ in
CASES = [
    ("chain", {"k": 3, "tp": 2, "draft_tp": 1}),
    ("parallel", {"k": 16, "batch": 1}), ("parallel", {"k": "1,6", "dtype": "bf16"}),
    ("parallel", {"k": 3, "tp": 2, "kv_shard": "sequence", "max_len": 256}),
    ("parallel", {"k": 3, "tp": 2, "draft_tp": 1}),
    ("eagle3", {"k": 1, "dtype": "bf16"}), ("eagle3", {"k": "2,6"}),
    ("eagle3", {"k": 2, "tp": 2, "kv_shard": "sequence", "max_len": 256}),
    ("eagle3", {"k": 3, "tp": 2, "draft_tp": 1, "batch": 1}),
    ("medusa", {"k": "1,5", "dtype": "bf16", "batch": 1}),
    ("medusa", {"k": 3, "tp": 2, "draft_tp": 1}),
    ("medusa", {"k": 2, "tp": 2, "kv_shard": "sequence", "max_len": 256}),
    ("ngram", {"k": 3, "tp": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and a draft of each kind: a chain is always right; masks' rows and untrained heads seldom are."""
    folder = tmp_path_factory.mktemp("drafters")
    alike = {"seed": 1, "scale": 0.12, "eos_token_id": None, "num_key_value_heads": 1}
    write_model(folder / "target", **alike)
    write_model(folder / "chain", **alike)
    write_model(folder / "parallel", **alike, pard_token=MASK)
    write_head(folder / "eagle3", folder / "target", taps=(0, 1), num_key_value_heads=1)
    write_medusa(folder / "medusa", 5, heads=5)
    return folder


def _spec(folder: Path, drafter: str, **changes: Any) -> BuildSpec:
    flags = dict(DRAFTERS[drafter])
    # the host drafts where there is no folder: the spec then names the default, which a build ignores
    flags["draft"] = str(folder / flags["draft"]) if "draft" in flags else BuildSpec.draft
    name = "-".join([drafter, *(f"{k}{Path(str(v)).name}" for k, v in changes.items())]).translate(_PLAIN)
    return spec(folder, name, **{"batch": 3} | flags | changes)


@last_few
def _graphs(folder: Path, drafter: str, changes: tuple[tuple[str, Any], ...] = ()) -> Graphs:
    return Graphs(read_bundle(build(_spec(folder, drafter, **dict(changes)))))


def _requests(count: int, seed: int, filters: bool) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        by = (rng.choice([9, 40]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.02])) if filters else (0, 1.0, 0.0)
        params = Params(rng.choice([0.7, 1.2] if filters else [0.0, 0.7, 1.2]), *by, rng.getrandbits(64))
        # now and then an id alone, and one that meets the context's end
        length = rng.choice([1, 2, 5, 17, 60, 118])
        requests.append(Request(tuple(rng.randrange(64) for _ in range(length)), params, rng.choice([3, 12, 20])))
    return requests


def _run(graphs: Graphs, requests: list[Request], speculative: bool = True) -> list[Result]:
    return Engine(graphs, shape_of(graphs.bundle), speculative).run(requests)


def _name(case: Any) -> str:
    return case if isinstance(case, str) else ",".join(f"{k}={v}" for k, v in case.items())


@pytest.mark.parametrize(("drafter", "changes"), CASES, ids=_name)
def test_tokens_are_the_targets(folder: Path, drafter: str, changes: dict[str, Any]) -> None:
    """The requests of every other case filter: XLA compiles one graph of a step for each, and that takes the time.

    Ids that are drawn freely repeat too seldom for a look-up.
    """
    requests = _requests(12, len(str(changes)), drafter != "ngram" and CASES.index((drafter, changes)) % 2 == 0)
    same = {n: changes[n] for n in ("dtype", "max_len") if n in changes}
    expected = [r.ids for r in _run(_graphs(folder, "none", tuple(same.items())), requests)]
    graphs = _graphs(folder, drafter, tuple(changes.items()))
    assert not findings(graphs.bundle)
    results = _run(graphs, requests)
    assert [r.ids for r in results] == expected
    assert sum(map(sum, (r.accepted for r in results))) > 0, "a test of acceptance must accept"
    if drafter != "chain":
        assert any(sum(r.accepted) < sum(r.drafted) for r in results), "and refuse"


@pytest.mark.parametrize(
    ("drafter", "counts"),
    [
        # one pass whatever k, no completing one: two layers each, two all-reduces a layer; an embedding and a draw each
        ("parallel", {"all-reduce": 8, "all-gather": 4}),
        # the target's, then three passes of one layer; their embeddings, three draws, the projected states
        ("eagle3", {"all-reduce": 4 + 2 * 3, "all-gather": 2 + 3 + 3 + 1}),
    ],
)
def test_a_step_runs_the_collectives_of_its_passes(folder: Path, drafter: str, counts: dict[str, int]) -> None:
    bundle = _graphs(folder, drafter, (("k", 3), ("tp", 2))).bundle
    proto = bundle.read(bundle.plan.by_key[GraphKey(Stage.STEP, 3, 128)].file)
    assert {op: n for (op, _), n in declared(bytes(proto)).collectives.items()} == counts


def test_the_manifest_names_the_drafter_and_its_state(folder: Path) -> None:
    bundle = _graphs(folder, "parallel", (("k", "1,6"), ("dtype", "bf16"))).bundle
    assert (bundle.spec.drafter, bundle.spec.draft_config.mask_id) == ("parallel", MASK)
    kept = [t for t in bundle.plan.state if ".kept." in t.name]
    assert [(t.name, t.shape, t.dtype) for t in kept] == [("draft_model.kept.ids", (3, 6, 1), "int32")]


def test_a_manifest_with_another_drafter_is_refused(folder: Path) -> None:
    content = json.loads(_graphs(folder, "parallel", (("k", 16), ("batch", 1))).bundle.content)
    for changes, why in (
        ({"drafter": "chain"}, "draft_config.mask_id is no field"),
        ({"drafter": "ngram"}, "the drafter|drafter is ngram"),
        ({"drafter": "oracle"}, "drafter is oracle"),
        ({"draft_config": content["spec"]["draft_config"] | {"mask_id": -2}}, "mask_id is -2"),
    ):
        manifest = {n: v for n, v in content.items() if n != "manifest_sha256"} | {"spec": content["spec"] | changes}
        manifest["manifest_sha256"] = canonical_hash(manifest)
        with pytest.raises(UserError, match=why):
            parse_manifest(json.dumps(manifest).encode(), "manifest.json")


@pytest.mark.parametrize("drafter", ["parallel", "eagle3", "medusa"])
def test_kernels_serve_a_draft(folder: Path, drafter: str) -> None:
    """On the simulator: rows of a pass begin at the text's begin, within a tile and behind several steps."""
    requests = [Request((7,), max_new_tokens=5), Request(tuple(range(1, 12)), Params(0.8, seed=5), max_new_tokens=5)]
    expected = [r.ids for r in _run(_graphs(folder, "none"), requests)]
    graphs = _graphs(folder, drafter, (("k", 2), ("batch", 2), ("kernels", "nki")))
    assert not findings(graphs.bundle)
    results = _run(graphs, requests)
    assert [r.ids for r in results] == expected
    assert sum(sum(r.accepted) for r in results) > 0 or drafter == "eagle3"


def test_a_draft_that_the_host_runs_drafts_what_the_fused_chain_does(folder: Path) -> None:
    """Vanilla speculation, draft and target as graphs of their own, is the reference: steps accept the same."""
    other = str(write_model(folder / "other", 2, scale=0.12, eos_token_id=None, num_hidden_layers=1))
    requests = [Request((5, 9, 2), Params(t, seed=n), 24) for n, t in enumerate((0.0, 0.8, 1.5))]
    fused = Graphs(read_bundle(build(_spec(folder, "chain", k=3, draft=other))))
    draft = Graphs(read_bundle(build(_spec(folder, "none", target=other, batch=1))))
    target = _graphs(folder, "ngram", (("k", 3), ("tp", 2)))

    def draws(slot: Slot, most: int) -> list[int]:
        asked = Request(slot.ids, slot.request.params, most)
        return Engine(draft, shape_of(draft.bundle), False).run([asked])[0].ids

    expected = _run(fused, requests)
    assert Engine(target, shape_of(target.bundle), propose=draws).run(requests) == expected
    assert all(0 < sum(r.accepted) < sum(r.drafted) for r in expected[1:])


def test_a_head_that_steps_of_the_target_left_behind_changes_no_token(folder: Path) -> None:
    """Steps of six drafts, of two and of none in turn."""
    requests = _requests(6, 5, filters=False)
    expected = [r.ids for r in _run(_graphs(folder, "none"), requests)]
    graphs = _graphs(folder, "eagle3", (("k", "2,6"),))
    engine, results, ks = Engine(graphs, shape_of(graphs.bundle)), dict[int, Result](), set[int]()
    for request in requests:
        engine.add(request)
    for most in itertools.cycle((6, 0, 2, 0)):
        engine.step_k = Always(most)
        events = engine.step()
        ks |= {e.k for e in events}
        results |= {e.number: e.result for e in events if e.result}
        if not engine.busy:
            break
    assert [results[n].ids for n in range(len(requests))] == expected
    assert {0, 2, 6} <= ks
