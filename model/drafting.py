"""The kinds of drafters as values: what a build, a manifest and a tuner must know of each; no torch.

How a kind drafts is its module's in model/drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class DraftPass(NamedTuple):
    """One pass of a draft's model in a step: rows of each sequence that go through its layers, ids drawn of them."""

    rows: int
    drawn: int


class Kept(NamedTuple):
    """A tensor of a drafter's state: its axes, B slots, K the most drafts of a step, H the draft's width; its dtype, by
    default that of the weights.

    It has three axes, which no ids of a graph's outputs have: a tracer finds the output that a state's tensor is
    aliased to by shape and dtype.
    """

    name: str
    axes: str
    dtype: str = ""


LEAVES, ANY_TREE = "leaves", "any"


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of drafter.

    `passes` of a step of k drafts, where the largest step of the bundle drafts `most`; `kept` are the tensors of its
    state beside caches; `decoder` says that its model is a Qwen3 like the target, otherwise it has `head_layers`.
    """

    passes: Callable[[int, int], tuple[DraftPass, ...]]
    has_model: bool = True
    decoder: bool = False
    head_layers: int = 0
    kept: tuple[Kept, ...] = ()
    # drafts a step at most, as many rows as the kernels take; 0 leaves it to them
    limit: int = 0
    # the passes, the first ones, that keep what was verified: where a step is in halves, the second half's
    keeps: int = 0
    # the trees that it gives candidates for: none; those whose second best drafts are leaves, where a draft reads the
    # best ones before it; or any
    tree: str = ""

    def refusal(self, leaves_only: bool) -> str:
        """Why it cannot draft for a tree, of which second best drafts are leaves or not; nothing if it can."""
        if not self.tree:
            return "proposes one candidate a position"
        return "" if leaves_only or self.tree == ANY_TREE else "reads its best drafts: others can have no children"


def _chain(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(2, 1), *(DraftPass(1, 1) for _ in range(k - 1)))


def _parallel(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(most + k, k),)


def _eagle3(k: int, most: int) -> tuple[DraftPass, ...]:
    # the verified rows and the first draft, then one row for each draft more
    return (DraftPass(k + 1, 1), *(DraftPass(1, 1) for _ in range(k - 1)))


def _medusa(k: int, most: int) -> tuple[DraftPass, ...]:
    return (DraftPass(1, k),)


def _nothing(k: int, most: int) -> tuple[DraftPass, ...]:
    return ()


KINDS = {
    "chain": Kind(_chain, decoder=True, kept=(Kept("ids", "B 1 1", "int32"),), tree=LEAVES),
    "parallel": Kind(_parallel, decoder=True, kept=(Kept("ids", "B K 1", "int32"),), limit=16, tree=ANY_TREE),
    "eagle3": Kind(_eagle3, head_layers=1, kept=(Kept("state", "B 1 H"),), keeps=1, tree=LEAVES),
    "medusa": Kind(_medusa, kept=(Kept("state", "B 1 H"),), tree=ANY_TREE),
    "ngram": Kind(_nothing, has_model=False),
    "none": Kind(_nothing, has_model=False),
}


@dataclass(frozen=True)
class Drafting:
    """The drafter of a build: its kind, and the id of a mask row where it has some."""

    kind: str
    mask_id: int | None = None

    @property
    def of_kind(self) -> Kind:
        return KINDS[self.kind]

    def as_json(self) -> dict[str, Any]:
        """As the manifest holds it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def recorded(manifest: dict[str, Any]) -> Drafting:
    """The drafter that a manifest names; one of an earlier build names none: a draft was a chain."""
    return Drafting(**manifest.get("drafter", {"kind": "chain" if manifest["k"] else "none"}))


# where a published checkpoint's config.json has the id of its mask rows; vLLM reads the same keys
# (vllm/v1/spec_decode/llm_base_proposer.py, _init_parallel_drafting_params)
_MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


def inferred(config: dict[str, Any]) -> Drafting:
    """The drafter that a checkpoint's config.json describes."""
    if config.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in config:
        return Drafting("eagle3")
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return Drafting("medusa")
    masks = [config[key] for key in _MASK_KEYS if config.get(key) is not None]
    return Drafting("parallel", masks[0]) if masks else Drafting("chain")
