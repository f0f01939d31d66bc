"""The facts of a kind of drafter: the one value that its file declares, and `model/drafters/registry.py` lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from model.backing import Backing
from model.config import ModelConfig, Qwen3Config
from model.cut import Weight
from model.graph_key import GraphKey
from model.packing import Packing
from model.parallel import Parallel
from model.rank_model import RankModel

if TYPE_CHECKING:
    from model.drafters import Drafter


class DraftPass(NamedTuple):
    """One pass of a draft's model in a step: rows of each sequence that go through its layers, ids drawn of them."""

    rows: int
    drawn: int


class Kept(NamedTuple):
    """A tensor of a drafter's state: its axes, B slots, K the most drafts of a step, H the draft's width; its dtype, by
    default that of the weights.

    It has three axes, so that it cannot be confused with an output of ids: a tracer finds the output that a state's
    tensor is aliased to by shape and dtype.
    """

    name: str
    axes: str
    dtype: str = ""


Counts = dict[str, int]


@dataclass(frozen=True)
class DraftModel:
    """The model of a drafter.

    - `config`: the frozen dataclass of its configuration, read strictly out of a manifest;
    - `claims(raw)`: whether a checkpoint's config.json is of this kind; `read(raw, where, target)`: its configuration;
    - `module(config, parallel, backing)`: its model on one rank, and `drafter(model, target)` the drafter that runs it;
    - `weights(config, packing)`: each weight's name, ours and the bundle's, its checkpoint's tensors and their cuts;
    - `packing(backing, config, ranks)`: the halves of its layers that a backing packs;
    - `collectives(config, parallel, passes)`: those of the passes' layers in a step, without the draws';
    - `unread(key, name)`: whether a graph need not read a weight;
    - `guesses(config)`: whether ranks with logits of their own join to guess the filters of its draws;
    - `stored_as(config, name)`: the table's name of a checkpoint's tensor, "" for one that is not needed;
    - `lent`: tensors that come from the target's checkpoint if its own lacks them: the name here, and those there, of
      which the first that exists is taken.
    """

    config: type[Any]
    claims: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], str, Qwen3Config], Any]
    module: Callable[[Any, Parallel, Backing], RankModel]
    drafter: Callable[[Any, Qwen3Config], Drafter]
    weights: Callable[[Any, Packing], list[Weight]]
    collectives: Callable[[Any, Parallel, tuple[DraftPass, ...]], Counts]
    packing: Callable[[Backing, Any, int], Packing] = lambda backing, config, ranks: Packing()
    unread: Callable[[GraphKey, str], bool] = lambda key, name: False
    guesses: Callable[[Any], bool] = lambda config: True
    stored_as: Callable[[Any, str], str] = lambda config, name: name
    lent: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _nothing(k: int, most: int) -> tuple[DraftPass, ...]:
    return ()


@dataclass(frozen=True)
class Kind:
    """A kind of drafter.

    `passes` of a step of k drafts, where the largest step of the bundle drafts `most`; `kept` are the tensors of its
    state beside caches; a step drafts at most `limit`, or as many as the kernels take rows if 0. The first `keeps`
    passes read the verified rows: where a step is in halves, they belong to the second, and with `follows` they run in
    steps of the target alone too. `decodes`: its model is a Qwen3 like the target, with the target's tokenizer.
    """

    name: str
    model: DraftModel | None = None
    passes: Callable[[int, int], tuple[DraftPass, ...]] = _nothing
    kept: tuple[Kept, ...] = ()
    limit: int = 0
    keeps: int = 0
    follows: bool = False
    decodes: bool = False

    @property
    def has_model(self) -> bool:
        """Whether it drafts by a model with weights; otherwise the host drafts, or there are no drafts."""
        return self.model is not None


def decoder_collectives(config: ModelConfig, parallel: Parallel, passes: int) -> Counts:
    """A decoder's: two all-reduces a layer, a gather an embedding."""
    if parallel.tp == 1:
        return {"all-reduce": 0, "all-gather": 0}
    return {"all-reduce": 2 * passes * config.num_hidden_layers, "all-gather": passes}
