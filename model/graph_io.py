"""A graph's I/O signature: every input and output, declared once with its dtype and dims.

Dims are B sequences, T input ids of each (1 in a step, N where the host drafts, its rows in a prompt), L blocks of the
bucket and N = k + 1 rows; D = B in a step, F = 1 in a prompt; in full-sampling graphs W words of 32 ids each, A
penalties, M ids with a bias, C log-probabilities and, in a prompt, V ids. Tensors whose dims have no size are absent.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

from model.cache import Cache
from model.drafter import DraftState
from model.dtypes import BY_NAME
from model.filters import Filters
from model.graph_key import GraphKey, Stage
from model.graph_spec import TensorSpec
from model.sampling import SamplingParams


class StepInputs(NamedTuple):
    """The inputs of a graph: numpy arrays on the host, tensors in torch.

    Where the host drafts, input_ids are a token and its drafts. positions: the absolute position of the first row;
    num_tokens: the valid rows of a prompt's chunk; slots: its slot; sampling_params: top-k, top-p, temperature; seeds:
    two words each; k_limits: the most drafts of a step to accept; block_table: the block of each 128 positions, 0 where
    there is none; next_prompt_id: the id after a prompt's rows, -1 where it is to be sampled. Of full-sampling graphs
    (`model/logits_processors.py`): allowed has for each row a bit for each id, id 32 w + b in bit b of word w;
    prompt_token_counts has, in a prompt, how often each id has occurred.
    """

    input_ids: Annotated[Any, "int32 B T"]
    positions: Annotated[Any, "int32 B"]
    sampling_params: Annotated[Any, "float32 B 3"]
    min_p: Annotated[Any, "float32 B"]
    seeds: Annotated[Any, "int32 B 2"]
    block_table: Annotated[Any, "int32 B L"]
    k_limits: Annotated[Any, "int32 D"] = None
    num_tokens: Annotated[Any, "int32 F"] = None
    slots: Annotated[Any, "int32 F"] = None
    next_prompt_id: Annotated[Any, "int32 F"] = None
    allowed: Annotated[Any, "int32 B N W"] = None
    penalties: Annotated[Any, "float32 B A"] = None
    bias_ids: Annotated[Any, "int32 B M"] = None
    bias: Annotated[Any, "float32 B M"] = None
    prompt_token_counts: Annotated[Any, "int32 B V"] = None

    def graph(self, stage: Stage, k: int, bucket: int) -> GraphKey:
        """The graph of a stage that these numpy inputs need."""
        top_k, top_p, temperature = self.sampling_params.T
        filtering = Filters(top_k, top_p, self.min_p).active_R & (temperature > 0)
        # only a fused step has a graph without filters
        key = GraphKey(stage, k, bucket, stage is not Stage.STEP or bool(filtering.any()))
        return key._replace(rows=self.input_ids.shape[1]) if key.is_prefill else key

    def params(self, filters: bool = True) -> SamplingParams:
        """The sequences' sampling parameters, in torch; without `filters` in a graph for those that do not filter."""
        top_k, top_p, temperature = self.sampling_params.unbind(-1)
        return SamplingParams(temperature, self.seeds, Filters(top_k, top_p, self.min_p) if filters else None)


class StepOutputs(NamedTuple):
    """The outputs of a graph; `accepted_tokens` is padded with -1. State stays on the device.

    Scores are those of each accepted id, after a prompt those of its ids (`model/logprobs.py`).
    """

    accepted_tokens: Annotated[Any, "int32 B N"]
    next_ids: Annotated[Any, "int32 B 1"]
    next_positions: Annotated[Any, "int32 B"]
    scores: Annotated[Any, "float32 B N C"] = None
    draft_state: DraftState = DraftState([])
    target_caches: Sequence[Cache] = ()
    counts_B1V: Any = None

    @property
    def visible(self) -> tuple[Any, ...]:
        """The outputs that the host sees, in the graph's order."""
        return self[: 3 + (self.scores is not None)]


class DraftOutputs(NamedTuple):
    """Outputs of the first half of a step: the input ids and k drafts after them."""

    candidates: Annotated[Any, "int32 B N"]
    draft_state: DraftState = DraftState([])
    target_caches: Sequence[Cache] = ()
    counts_B1V: Any = None

    @property
    def visible(self) -> tuple[Any, ...]:
        """The output that the host sees."""
        return self[:1]


Outputs = StepOutputs | DraftOutputs


def _declared(signature: type[NamedTuple]) -> dict[str, str]:
    hints = get_type_hints(signature, include_extras=True).items()
    return {field: hint.__metadata__[0] for field, hint in hints if hasattr(hint, "__metadata__")}


# field -> its dtype and dims, in the graph's order
INPUTS, OUTPUTS, DRAFT_OUTPUTS = _declared(StepInputs), _declared(StepOutputs), _declared(DraftOutputs)
# the inputs that only full-sampling graphs have
FULL_SAMPLING = ("allowed", "penalties", "bias_ids", "bias", "prompt_token_counts")


def tensor_specs(declared: dict[str, str], **sizes: int) -> tuple[TensorSpec, ...]:
    """A graph's inputs or outputs, given the size of each dim."""
    specs = list[TensorSpec]()
    for field, (dtype, *dims) in ((field, text.split()) for field, text in declared.items()):
        if all(dim.isdigit() or dim in sizes for dim in dims):
            specs.append(TensorSpec(field, tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in dims), dtype))
    return tuple(specs)


def zeros_of(tensors: Sequence[TensorSpec]) -> StepInputs:
    """A graph's inputs of zeros, numpy arrays."""
    return StepInputs(**{t.name: np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in tensors})


def mask_words(vocabulary: int) -> int:
    """W: int32 words that hold a bit for each id."""
    return -(-vocabulary // 32)
