"""Drafts in groups of ranks, executed on 8 virtual ranks: same tokens, promised caches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from model.weights import shard_file
from tests.compile.run_sharded import RANKS, requests
from tests.compile.tiny import write_model
from trnspec.bundle.opening import damage, read_bundle
from trnspec.bundle.spec import BundleSpec

pytestmark = pytest.mark.released_code

ROOT = Path(__file__).resolve().parents[2]
# ids of each slot whose rows every run has written
KNOWN = [len(request.ids) for request in requests()]
OF_HEAD = ("draft_model.lm_head.weight", "draft_model.rank_util.rank")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


class Found:
    """Tokens and caches of every run."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.compile.run_sharded", str(folder)]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        self.folder, self.runs = folder, json.loads(done.stdout.splitlines()[-1])

    def __getitem__(self, name: str) -> Any:
        return self.runs[name]

    def caches(self, name: str) -> dict[str, np.ndarray]:
        """(ranks, B, G, S, D) by name."""
        return dict(np.load(self.folder / f"{name}.npz"))


def same(one_BGSD: np.ndarray, other_BGSD: np.ndarray) -> bool:
    """Whether two caches of a rank are equal where the prompts are."""
    return all(np.array_equal(a[:, :n], b[:, :n]) for a, b, n in zip(one_BGSD, other_BGSD, KNOWN, strict=False))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("sharded")
    write_model(folder / "target", 1, 0.2, num_attention_heads=8, **SIZES)
    changes = {"num_attention_heads": 4, "num_hidden_layers": 1, "tie_word_embeddings": True}
    write_model(folder / "draft", 2, 0.2, **changes, **SIZES)
    return Found(folder)


@pytest.mark.parametrize("name", ["two", "pairs", "fours"])
def test_tokens_are_those_of_one_rank(found: Found, name: str) -> None:
    """Greedy and sampled, to the end of the context; the one rank has another k and batch."""
    assert found[name]["ids"] == found["one"]["ids"]
    assert found[name]["reason"] == "context"
    assert len({tuple(ids[:8]) for ids in found[name]["ids"]}) == 3


def test_what_the_devices_hand_from_one_step_to_the_next_is_on_all_of_them(found: Found) -> None:
    assert found["ahead"]["ids"] == found["one"]["ids"]
    assert found["ahead"]["followed"] > 2


def test_a_group_has_the_bits_of_a_world_of_its_size(found: Found) -> None:
    """A draft in groups of 2 inside of 8 ranks writes the caches of a draft on 2 ranks, in every group."""
    alone, grouped, rotated = (found.caches(name) for name in ("two", "pairs", "rotated"))
    names = [n for n in alone if n.startswith("draft_model.kv.")]
    assert len(names) == 2
    for name in names:
        for rank in range(RANKS):
            assert same(grouped[name][rank], alone[name][rank % 2])
            assert not same(rotated[name][rank], alone[name][rank % 2]), "a wrong shard must show"
    # what is emitted is the target's whatever the draft; how many steps it takes is not
    assert found["rotated"]["ids"] == found["one"]["ids"]
    assert found["pairs"]["steps"] == found["two"]["steps"]


def test_a_bundle_says_how_the_draft_is_split(found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    # as run_sharded plans
    monkeypatch.setattr(BundleSpec, "buckets", property(lambda self: (self.max_len,)))
    path = found.folder / "pairs"
    bundle = read_bundle(path)
    assert (bundle.spec.tp, bundle.spec.draft_ranks) == (8, 2)
    assert damage(bundle) == []
    shards = [load_file(path / shard_file(rank)) for rank in range(RANKS)]
    for rank, shard in enumerate(shards):
        # the draft's number is that among the ranks of its head
        assert (shard["target_model.rank_util.rank"], shard["draft_model.rank_util.rank"]) == (rank, rank)
        for name in (n for n in shard if n.startswith("draft_model") and n not in OF_HEAD):
            assert np.array_equal(shard[name], shards[rank % 2][name])
    config = json.loads((path / "neuron_config.json").read_text(encoding="utf-8"))
    draft = config["fused_spec_config"]["draft_config"]["neuron_config"]
    assert [config["neuron_config"][n] for n in ("tp_degree", "world_size", "local_ranks_size")] == [8, 8, 8]
    assert [draft[n] for n in ("tp_degree", "world_size", "local_ranks_size")] == [2, 8, 8]
    recipes = [read_bundle(found.folder / n).files[shard_file(3)].recipe for n in ("pairs", "fours")]
    assert len(set(recipes)) == 2, "drafts on 2 and 4 ranks are cut anew"
