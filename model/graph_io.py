"""A graph's border: every input and output, declared once with its shape and dtype.

The plan, the engine's inputs and the example inputs of a compiler follow from these declarations. Letters are B
sequences, T ids of each that come in (1 in a step, N where the host drafts, its rows in a prompt), L blocks of the
bucket and N = k + 1 rows; D = B in a step, F = 1 in a prompt; in asking graphs alone W words of 32 ids each, A
penalties, M ids with a bias, C scores and, in a prompt, V ids: a tensor that has a letter without a size is not at the
border.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from model.asks import Asks
from model.cache import Cache
from model.drafters import DraftState
from model.dtypes import BY_NAME
from model.filters import Filters
from model.graph_key import GraphKey, Stage
from model.graph_spec import TensorSpec
from model.sampling import Sampling


@dataclass(frozen=True)
class Port:
    """A tensor at the border: its axes, letters or numbers; its dtype."""

    axes: str
    dtype: str = "int32"

    @property
    def letters(self) -> set[str]:
        """The axes whose sizes must be known."""
        return {axis for axis in self.axes.split() if not axis.isdigit()}

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The axes as numbers, given each letter's size."""
        return tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in self.axes.split())


class StepInputs(NamedTuple):
    """The inputs of a graph: numpy arrays on the host, tensors in torch.

    Where the host drafts, input_ids are a token and its drafts. positions has the absolute position of the first row;
    num_tokens the valid rows of a prompt's chunk, slots its slot; sampling_params are top-k, top-p, temperature; seeds
    two words each; k_limits the most drafts of a step to accept. block_table has the block of each 128 positions, 0
    where there is none; next_prompt_id the id after a prompt's rows, -1 where it is to be drawn. The others are an
    asking graph's (`model/asks.py`): allowed has for each row a bit for each id that its token may be, id 32 w + b in
    bit b of word w; prompt_token_counts, in a prompt, how often each id has occurred.
    """

    input_ids: Annotated[Any, Port("B T")]
    positions: Annotated[Any, Port("B")]
    sampling_params: Annotated[Any, Port("B 3", "float32")]
    min_p: Annotated[Any, Port("B", "float32")]
    seeds: Annotated[Any, Port("B 2")]
    block_table: Annotated[Any, Port("B L")]
    k_limits: Annotated[Any, Port("D")] = None
    num_tokens: Annotated[Any, Port("F")] = None
    slots: Annotated[Any, Port("F")] = None
    next_prompt_id: Annotated[Any, Port("F")] = None
    allowed: Annotated[Any, Port("B N W")] = None
    penalties: Annotated[Any, Port("B A", "float32")] = None
    bias_ids: Annotated[Any, Port("B M")] = None
    bias: Annotated[Any, Port("B M", "float32")] = None
    prompt_token_counts: Annotated[Any, Port("B V")] = None

    def graph(self, stage: Stage, k: int, bucket: int) -> GraphKey:
        """The graph of a stage that these inputs need: a host's question, of numpy arrays."""
        top_k, top_p, temperature = self.sampling_params.T
        filtering = ((top_k > 0) | (top_p < 1) | (self.min_p > 0)) & (temperature > 0)
        # a prompt draws once: one graph serves it, whatever it filters
        asking, is_prefill = self.allowed is not None, stage is Stage.PREFILL
        filters = asking or is_prefill or bool(filtering.any())
        rows = self.input_ids.shape[1] if is_prefill else 0
        return GraphKey(stage, k, bucket, filters, asking, rows)

    def sampling(self, filters: bool = True, counts_B1V: Any = None) -> Sampling:
        """The sequences' sampling parameters, in torch; without `filters` in a graph for those that do not filter.

        An asking graph has the counts of ids.
        """
        top_k, top_p, temperature = self.sampling_params.unbind(-1)
        kept = Filters(top_k, top_p, self.min_p) if filters else None
        asks = None if counts_B1V is None else Asks(self.allowed, self.penalties, self.bias_ids, self.bias, counts_B1V)
        return Sampling(temperature, self.seeds, kept, asks)


class StepOutputs(NamedTuple):
    """The outputs of a graph; `accepted_tokens` is padded with -1. State stays with the device: a host sees none.

    Scores are those of each accepted id, after a prompt those of its ids (`model/scores.py`).
    """

    accepted_tokens: Annotated[Any, Port("B N")]
    next_ids: Annotated[Any, Port("B 1")]
    next_positions: Annotated[Any, Port("B")]
    draft_state: DraftState = DraftState([])
    target_caches: Sequence[Cache] = ()
    scores: Annotated[Any, Port("B N C", "float32")] = None
    counts_B1V: Any = None

    @classmethod
    def of(cls, visible: Sequence[Any]) -> StepOutputs:
        """The outputs that the host sees, as a run returns them."""
        accepted, next_ids, next_positions, *scores = visible
        return cls(accepted, next_ids, next_positions, scores=scores[0] if scores else None)

    @property
    def ready(self) -> bool:
        """Whether the graph has ended: reading them does not wait."""
        return not hasattr(self.accepted_tokens, "is_ready") or self.accepted_tokens.is_ready()

    @property
    def visible(self) -> tuple[Any, ...]:
        """The outputs that the host sees, in the graph's order."""
        return self[:3] if self.scores is None else (*self[:3], self.scores)


class DraftOutputs(NamedTuple):
    """Outputs of a graph of the draft alone: the input ids and k drafts after them.

    Its state stays with the device.
    """

    candidates: Annotated[Any, Port("B N")]
    draft_state: DraftState = DraftState([])
    target_caches: Sequence[Cache] = ()
    counts_B1V: Any = None

    @property
    def visible(self) -> tuple[Any, ...]:
        return self[:1]


Outputs = StepOutputs | DraftOutputs


def _ports(border: type[NamedTuple]) -> dict[str, Port]:
    hints = get_type_hints(border, include_extras=True).items()
    return {field: hint.__metadata__[0] for field, hint in hints if hasattr(hint, "__metadata__")}


# field -> its declaration, in the graph's order
INPUTS, OUTPUTS, DRAFTED = _ports(StepInputs), _ports(StepOutputs), _ports(DraftOutputs)
# the inputs of asking graphs alone
ASKS = ("allowed", "penalties", "bias_ids", "bias", "prompt_token_counts")


def tensor_specs(ports: dict[str, Port], **sizes: int) -> tuple[TensorSpec, ...]:
    """A graph's inputs or outputs as the bundle lists them, given the size of each letter."""
    here = ((field, port) for field, port in ports.items() if port.letters <= sizes.keys())
    return tuple(TensorSpec(field, port.shape(sizes), port.dtype) for field, port in here)


def zero_inputs(**sizes: int) -> StepInputs:
    """Inputs of zeros, numpy arrays to be filled in, given the size of each letter."""
    return zeros_of(_inputs_of(tuple(sizes.items())))


@functools.cache
def _inputs_of(sizes: tuple[tuple[str, int], ...]) -> tuple[TensorSpec, ...]:
    """A chunk's inputs take a quarter of a millisecond if they are derived anew."""
    return tensor_specs(INPUTS, **dict(sizes))


def zeros_of(tensors: Sequence[TensorSpec]) -> StepInputs:
    """A graph's inputs of zeros, numpy arrays."""
    return StepInputs(**{t.name: np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in tensors})


def words_of(vocabulary: int) -> int:
    """W: int32 words that hold a bit for each id."""
    return -(-vocabulary // 32)
