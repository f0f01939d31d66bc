"""Trees through the NKI kernels: each path is a sequence of its own, so a row has the bits of a chain's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compile.build import build
from compile.doctor import findings
from compile.spec import BuildSpec
from model.bundle.manifest import read_bundle
from model.cache import Cache, Copies, Paths, Placement, empty_caches
from model.ops import EAGER
from model.parallel import Parallel
from model.qwen3 import Qwen3
from model.serving.engine import Engine
from model.serving.ready import shape_of
from model.serving.request import Params, Request, Result
from model.serving.runtime import Graphs
from model.tree import Tree, parse_tree
from tests.compile.tiny import write_model
from tests.last_few import last_few
from tests.model.test_layer_kernels import CONFIG, models

LENGTH, MASK = 256, 61
TREE = parse_tree("0,0,1,1,4")
# within a tile, and across two
POSITIONS = [40, 126]


def _ints(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _text(dtype: torch.dtype, model: Qwen3) -> list[Cache]:
    """Caches of two sequences with a text in them."""
    torch.manual_seed(2)
    caches = empty_caches(CONFIG, Parallel(), len(POSITIONS), LENGTH, dtype, model.backing.layout)
    return [Cache(*(torch.randn(x.shape).to(dtype) for x in cache)) for cache in caches]


def _pass(model: Qwen3, tree: Tree, ids_BN: Tensor, caches: list[Cache]) -> tuple[Tensor, list[Cache]]:
    """A tree's rows after all layers, and the caches of its paths."""
    paths = Paths(_ints(tree.paths), _ints(tree.places))
    placement = Placement(_ints(POSITIONS)[:, None] + _ints(tree.depths), torch.arange(LENGTH), paths=paths)
    caches = [Cache(*(x.repeat_interleave(len(tree.paths), 0) for x in cache)) for cache in caches]
    return model.hidden(ids_BN, caches, placement)


def _as_chain(model: Qwen3, branch: tuple[int, ...], ids_BN: Tensor, caches: list[Cache]) -> tuple[Tensor, list[Cache]]:
    """The same of one path's rows alone."""
    placement = Placement(_ints(POSITIONS)[:, None] + torch.arange(len(branch)).int(), torch.arange(LENGTH))
    return model.hidden(ids_BN[:, list(branch)], caches, placement)


def _written(cache: Cache, sequence: int, count: int) -> Tensor:
    """Keys and values of a sequence as far as `count` rows of the step reach."""
    end = POSITIONS[sequence] + count
    return torch.stack((cache.k[:, :, :, :end].transpose(2, 3), cache.v[:, :, :end]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_row_of_a_tree_has_the_bits_of_a_chain(dtype: torch.dtype) -> None:
    """Through fused layers; then the kept path's keys and values, and no other's, are in all caches of a sequence."""
    model = models(dtype)[1]
    text, ids_BN = _text(dtype, model), torch.randint(512, (len(POSITIONS), TREE.rows)).int()
    x_BNE, after = _pass(model, TREE, ids_BN, text)
    chains = [_as_chain(model, branch, ids_BN, text) for branch in TREE.branches]
    for branch, (chain_BLE, _) in zip(TREE.branches, chains, strict=True):
        assert torch.equal(x_BNE[:, list(branch)], chain_BLE), branch
    # row 5 hangs from row 3 instead of row 4, its sibling
    wrong_BNE, _ = _pass(model, parse_tree("0,0,1,1,3"), ids_BN, text)
    assert torch.equal(wrong_BNE[:, :5], x_BNE[:, :5])
    assert not torch.equal(wrong_BNE[:, 5], x_BNE[:, 5])
    _check_kept(model, after, [c for _, c in chains])


def _check_kept(model: Qwen3, after: list[Cache], chains: list[list[Cache]]) -> None:
    count, kept = len(TREE.branches), (2, 1)
    copies = Copies(count, model.backing.layout)
    places_BL = _ints(POSITIONS)[:, None] + torch.arange(TREE.k + 1).int()
    for layer, held in enumerate(after):
        alike = copies.alike(EAGER, held, _ints([0, 1]), _ints(kept), places_BL)
        for sequence, path in enumerate(kept):
            rows = len(TREE.branches[path])
            expected = _written(chains[path][layer], sequence, rows)[:, sequence]
            others = [p for p in range(count) if p != path]
            for copy in range(count):
                of_copy = _written(alike, sequence, rows)[:, sequence * count + copy]
                assert torch.equal(of_copy, expected), (layer, sequence, copy)
            before = _written(held, sequence, rows)
            assert not any(torch.equal(before[:, sequence * count + p], expected) for p in others)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the fused kernels' sizes, and drafts of it that are right now and then, whose attention is plain."""
    folder = tmp_path_factory.mktemp("trees")
    alike = {"eos_token_id": None, "num_key_value_heads": 1, "num_attention_heads": 2, "num_hidden_layers": 1}
    write_model(folder / "target", 1, 0.06, **alike, hidden_size=128, head_dim=128, intermediate_size=128)
    write_model(folder / "chain", 3, 0.12, **alike, head_dim=64)
    write_model(folder / "parallel", 3, 0.12, **alike, head_dim=64, pard_token=MASK)
    return folder


@last_few
def _graphs(folder: Path, changes: tuple[tuple[str, Any], ...]) -> Graphs:
    target, flags = str(folder / "target"), dict(changes)
    draft = str(folder / flags.pop("draft")) if "draft" in flags else ""
    drafts = {"draft": draft, "draft_checkpoint": draft, "k": 2} if draft else {"k": 0}
    values = {"target": target, "checkpoint": target, "tp": 1, "batch": 2, "max_len": 128, "kernels": "nki"}
    out = "-".join(f"{k}{v}" for k, v in changes).replace(",", "_") or "alone"
    return Graphs(read_bundle(build(BuildSpec(**(values | {"out": str(folder / out)} | drafts | flags)))))


def _results(folder: Path, requests: list[Request], **changes: Any) -> list[Result]:
    graphs = _graphs(folder, tuple(changes.items()))
    assert not findings(graphs.bundle)
    return Engine(graphs, shape_of(graphs.bundle)).run(requests)


def _requests() -> list[Request]:
    """Greedy, drawn and filtered; an id alone, and one that meets the context's end."""
    rng = random.Random(5)
    ways = [((0.0, 0, 1.0, 0.0), 5), ((0.9, 0, 1.0, 0.0), 1), ((0.0, 0, 1.0, 0.0), 118), ((1.1, 9, 0.9, 0.02), 17)]
    return [
        Request(tuple(rng.randrange(64) for _ in range(length)), Params(*asked, rng.getrandbits(64)), 12)
        for asked, length in ways
    ]


CASES = [
    {"draft": "parallel", "dtype": "fp32"}, {"draft": "chain", "dtype": "bf16"},
    {"draft": "parallel", "dtype": "bf16", "tp": 2},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()))
def test_tokens_are_the_chains_and_the_targets(folder: Path, case: dict[str, Any]) -> None:
    requests, of_target = _requests(), {name: value for name, value in case.items() if name != "draft"}
    expected = [r.ids for r in _results(folder, requests, **of_target)]
    results = _results(folder, requests, **case, tree="0,0,1,1")
    assert [r.ids for r in results] == expected
    chain = _results(folder, requests, **case)
    assert [r.ids for r in chain] == expected
    # a test of trees whose siblings nobody took would prove nothing
    assert sum(sum(r.accepted) for r in results) > sum(sum(r.accepted) for r in chain)
