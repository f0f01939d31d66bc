"""A tree of candidates emits what a chain and the target alone do: bits, tokens and the law of the text."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

from compile.build import build
from compile.doctor import findings
from compile.graph.torchax_seam import interop
from compile.graph.trace import TracedOps
from compile.spec import BuildSpec
from model import attention
from model.bundle.manifest import canonical_hash, manifest_digest, parse_manifest, read_bundle
from model.cache import Cache, Paths, Placement
from model.errors import UserError
from model.ops import iota
from model.serving.engine import Engine
from model.serving.pjrt import SAME_BITS
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.tree import Tree, parse_tree
from model.window import TreeWindow
from tests.compile.tiny import write_medusa, write_model
from tests.last_few import last_few
from tests.model.heads import write_head

MASK, LENGTH = 61, 256
TREE = "0,0,0,1,1,2,4"
# where a draft reads the best ones before it
LEAVES = "0,0,0,1,1,4,4"
# (B, G, H / G, D): sequences, kv heads, query heads of each, their width
SIZES = [(4, 4, 2, 32), (1, 1, 4, 64), (3, 2, 1, 32), (2, 8, 8, 128)]
SHAPES = ["0,0", "0,1,2", TREE, "0,0,1,1,2,3,3,5,6,7"]


def test_a_text_is_a_tree() -> None:
    tree = parse_tree(TREE)
    assert (tree.rows, tree.k, tree.width) == (8, 3, 3)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3)
    assert tree.ranks == (0, 0, 1, 2, 0, 1, 0, 0)
    assert tree.branches == ((0, 3), (0, 1, 5), (0, 2, 6), (0, 1, 4, 7))
    assert tree.paths == ((0, 3, 0, 0), (0, 1, 5, 0), (0, 2, 6, 0), (0, 1, 4, 7))
    assert [sum(tree.paths, ())[place] for place in tree.places] == list(range(8))
    assert tree.cut(2) == Tree((0, 0, 0, 1, 1, 2))
    assert tree.cut(1) == Tree((0, 0, 0))
    assert str(tree) == TREE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no list of rows"), ("0,x", "no list of rows"), ("0,2", "row 2 hangs from row 2"),
        (",".join(["0"] * 32), "has 33 rows"),
        (",".join(map(str, [*range(15), *[0] * 16])), "17 paths of 16 rows"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_tree_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_tree(text)


@cache
def _of_tree(tree: Tree) -> Any:
    """Attention of a tree's rows, compiled: (B, H, N, D), over the keys of the bucket."""

    def run(q: Tensor, k: Tensor, v: Tensor, cached_k: Tensor, cached_v: Tensor, position_B1: Tensor) -> Tensor:
        rows, places, depths = (
            torch.tensor(t, dtype=torch.int32, device=q.device) for t in (tree.paths, tree.places, tree.depths)
        )
        placement = Placement(position_B1 + depths, iota(LENGTH, q), paths=Paths(rows, places))
        q, k, v = (placement.by_path(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v))
        cache = Cache(cached_k, cached_v)
        out, _ = attention.verify_attention(TracedOps(1), q, (k, v), cache, placement.of_paths())
        return placement.by_row(out.transpose(1, 2)).transpose(1, 2)

    return jax.jit(lambda *arrays: interop.call_torch(run, *arrays), compiler_options=SAME_BITS)


@cache
def _of_chain(length: int) -> Any:
    """Attention of a chain's rows, compiled: (B, H, L, D)."""

    def run(q: Tensor, k: Tensor, v: Tensor, cached_k: Tensor, cached_v: Tensor, position_B1: Tensor) -> Tensor:
        placement = Placement(position_B1 + iota(length, q), iota(LENGTH, q))
        return attention.verify_attention(TracedOps(1), q, (k, v), Cache(cached_k, cached_v), placement)[0]

    return jax.jit(lambda *arrays: interop.call_torch(run, *arrays), compiler_options=SAME_BITS)


def _attended(tree: Tree, arrays: list[Any]) -> np.ndarray:
    """Each path has a cache of its own."""
    caches = (jnp.repeat(x, len(tree.branches), 0) for x in arrays[3:5])
    return np.asarray(_of_tree(tree)(*arrays[:3], *caches, arrays[5]).astype(jnp.float32))


def _attended_as_chain(branch: tuple[int, ...], arrays: list[Any]) -> np.ndarray:
    """Of the rows of one path alone."""
    of_path = (x[:, :, jnp.asarray(branch)] for x in arrays[:3])
    return np.asarray(_of_chain(len(branch))(*of_path, *arrays[3:]).astype(jnp.float32))


def _arrays(sizes: tuple[int, int, int, int], rows: int, dtype: str, positions: list[int]) -> list[Any]:
    batch, heads, group, dim = sizes
    rng = np.random.default_rng(rows)
    shapes = [(batch, heads * group, rows, dim), *[(batch, heads, rows, dim)] * 2, *[(batch, heads, 512, dim)] * 2]
    return [*(jnp.asarray(rng.normal(0, 1, s), dtype) for s in shapes), jnp.asarray(positions, jnp.int32)[:, None]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "B{}-G{}-R{}-D{}".format(*s))
def test_a_row_of_a_tree_has_the_bits_of_a_chain(sizes: tuple[int, int, int, int], dtype: str) -> None:
    """At the text's begin, within a tile, across two and at the bucket's end."""
    for number, text in enumerate(SHAPES):
        tree = parse_tree(text)
        positions = [(0, 57, 126, LENGTH - tree.k - 1)[(number + b) % 4] for b in range(sizes[0])]
        arrays = _arrays(sizes, tree.rows, dtype, positions)
        together = _attended(tree, arrays)
        for branch in tree.branches:
            alone = _attended_as_chain(branch, arrays)
            assert np.array_equal(together[:, :, np.array(branch)], alone), (text, positions, branch)


def test_a_wrong_ancestor_has_other_bits() -> None:
    tree = parse_tree(TREE)
    arrays = _arrays(SIZES[0], tree.rows, "float32", [0, 57, 126, 250])
    # row 7 hangs from row 5 instead of row 4, its sibling
    wrong = _attended(Tree((0, 0, 0, 1, 1, 2, 5)), arrays)
    assert not np.array_equal(wrong[:, :, 7], _attended_as_chain((0, 1, 4, 7), arrays)[:, :, 3])
    assert np.array_equal(wrong[:, :, :7], _attended(tree, arrays)[:, :, :7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and drafts of it that are right now and then."""
    folder = tmp_path_factory.mktemp("trees")
    alike = {"scale": 0.12, "eos_token_id": None, "num_key_value_heads": 1}
    write_model(folder / "target", 1, **alike)
    write_model(folder / "chain", 3, **alike)
    write_model(folder / "parallel", 3, **alike, pard_token=MASK)
    write_head(folder / "eagle3", folder / "target", taps=(0, 1), num_key_value_heads=1)
    write_medusa(folder / "medusa", 5)
    return folder


def _spec(folder: Path, **changes: Any) -> BuildSpec:
    target, draft = str(folder / "target"), changes.pop("draft", "")
    name = "-".join(f"{k}{v}" for k, v in {"draft": draft, **changes}.items()).translate(str.maketrans("(), ", "____"))
    drafts = {"draft": str(folder / draft), "draft_checkpoint": str(folder / draft)} if draft else {}
    values = {"target": target, "checkpoint": target, "tp": 1, "batch": 4, "max_len": 128, "dtype": "fp32"}
    return BuildSpec(**(values | {"out": str(folder / name), "k": 3 if draft else 0} | drafts | changes))


@last_few
def _graphs(folder: Path, changes: tuple[tuple[str, Any], ...]) -> Graphs:
    return Graphs(read_bundle(build(_spec(folder, **dict(changes)))))


def _results(folder: Path, requests: list[Request], **changes: Any) -> list[Result]:
    graphs = _graphs(folder, tuple(changes.items()))
    assert not findings(graphs.bundle)
    return Engine(graphs, shape_of(graphs.bundle)).run(requests)


def _requests(count: int, seed: int) -> list[Request]:
    """Greedy, drawn and filtered; now and then an id alone, and one that meets the context's end."""
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        asked = rng.choice([0.0, 0.0, 0.7, 1.2]), rng.choice([0, 0, 9]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.02])
        ids = tuple(rng.randrange(64) for _ in range(rng.choice([1, 2, 5, 17, 60, 118])))
        requests.append(Request(ids, Params(*asked, rng.getrandbits(64)), rng.choice([3, 12, 20])))
    return requests


CASES = [
    {"draft": "parallel"}, {"draft": "chain"}, {"draft": "parallel", "dtype": "bf16"}, {"draft": "chain", "tp": 2},
    {"draft": "chain", "batch": 1, "dtype": "bf16"}, {"draft": "parallel", "tp": 2, "draft_tp": 1},
    {"draft": "eagle3"}, {"draft": "medusa"}, {"draft": "medusa", "dtype": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_tokens_are_the_chains_and_the_targets(folder: Path, case: dict[str, Any]) -> None:
    requests = _requests(10, len(str(case)))
    of_target = {"dtype": case["dtype"]} if "dtype" in case else {}
    expected = [r.ids for r in _results(folder, requests, **of_target)]
    results = _results(folder, requests, **case, tree=TREE if case["draft"] in ("parallel", "medusa") else LEAVES)
    assert [r.ids for r in results] == expected
    chain = _results(folder, requests, **case)
    assert [r.ids for r in chain] == expected
    # a test of trees whose siblings nobody took would prove nothing
    assert sum(sum(r.accepted) for r in results) > sum(sum(r.accepted) for r in chain)


def test_a_smaller_k_has_a_smaller_tree(folder: Path) -> None:
    requests = _requests(8, 5)
    graphs = _graphs(folder, (("draft", "chain"), ("tree", LEAVES), ("fewer", (1, 2))))
    expected = [r.ids for r in _results(folder, requests)]
    for most in (1, 2, 3):
        engine, ids = Engine(graphs, shape_of(graphs.bundle)), {}
        numbers = [engine.add(r) for r in requests]
        while engine.busy:
            for event in engine.step(most):
                ids.setdefault(event.number, []).extend(event.ids)
        assert [ids[n] for n in numbers] == expected


def _keys_of_one_path(window: TreeWindow, ops: Any, caches: Any, walk: Any) -> Any:
    """Keys and values of the first path's rows, whatever was kept."""
    return _KEPT(window, ops, caches, walk._replace(path_B=torch.zeros_like(walk.path_B)))


def _keys_of_each_path(window: TreeWindow, ops: Any, caches: Any, walk: Any) -> Any:
    """Each path's own keys and values: the caches of a sequence no longer hold the same."""
    return caches


def _noise_of_next_position(window: TreeWindow, draw: Any) -> Any:
    """The noise of the position behind a row's own, for rows deeper than the first."""
    assert window.tree is not None
    later = [min(depth + 1, window.k) for depth in window.tree.depths]
    return draw.rows(window._constant(later), window.k + 1)


_KEPT = TreeWindow.kept
FAULTS = [("kept", _keys_of_one_path), ("kept", _keys_of_each_path), ("target_draw", _noise_of_next_position)]


@pytest.mark.parametrize(("stage", "fault"), FAULTS, ids=lambda f: getattr(f, "__name__", ""))
def test_a_fault_changes_tokens(folder: Path, stage: str, fault: Any) -> None:
    requests = _requests(8, 3)
    with mock.patch.object(TreeWindow, stage, fault):
        # a name of its own: what is built with the fault serves nobody else
        results = _results(folder, requests, draft="chain", tree=LEAVES, out=str(folder / fault.__name__))
    assert [r.ids for r in results] != [r.ids for r in _results(folder, requests)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tree": "0,3"}, "row 2 hangs from row 3"),
        ({"tree": "0,0,1"}, "the tree is 2 deep and k is 3; give --k 2"),
        ({"kernels": "nki", "batch": 16}, "5 paths of 4 rows are 80 sequences and 320 rows"),
        ({"kv_shard": "sequence", "tp": 2, "max_len": 256}, "leave --kv-shard sequence out"),
        ({"drafter": "ngram", "draft": ""}, "the drafter ngram proposes one candidate a position"),
        ({"tree": TREE}, "the drafter chain reads its best drafts"),
    ],
)  # fmt: skip
def test_what_a_tree_cannot_be_built_with_is_refused(folder: Path, changes: dict[str, Any], why: str) -> None:
    spec = _spec(folder, **({"draft": "chain", "k": 3, "tree": LEAVES} | changes))
    with pytest.raises(UserError, match=why):
        spec.check()


def test_the_manifest_names_the_tree_and_a_chain_has_none(folder: Path) -> None:
    manifest = _graphs(folder, (("draft", "chain"), ("tree", LEAVES))).bundle.manifest
    assert manifest["spec"]["tree"] == LEAVES
    assert "tree" not in _graphs(folder, (("draft", "chain"),)).bundle.manifest["spec"]
    for text, why in (("0,5", "row 2 hangs from row 5"), ("0,1", "k is 3"), (TREE, "reads its best drafts")):
        changed = json.loads(json.dumps(manifest))
        changed["spec"]["tree"] = text
        changed["config_hash"] = canonical_hash([changed["spec"], changed["models"]])
        changed["manifest_sha256"] = manifest_digest(changed)
        with pytest.raises(UserError, match=why):
            parse_manifest(json.dumps(changed).encode(), "manifest.json", Path())
