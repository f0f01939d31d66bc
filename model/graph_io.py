"""A graph's I/O signature: all inputs and outputs, declared once with dtype and dims.

Dims: B sequences; T input ids per sequence (1 in a step, N if the host drafts, the chunk's rows in a prefill); L blocks
of the bucket; N = k + 1 rows; D = B, in steps only; F = 1, in prefills only. In full-sampling graphs: W words of 32
ids, A penalties, M ids with a bias, C log-probabilities; in their prefills V ids. A tensor with a dim that the graph
does not define is omitted from its signature.
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
    """The inputs of a graph: NumPy arrays on the host, tensors in torch.

    input_ids: one token per sequence, and its drafts if the host drafts; positions: the absolute position of the first
    row; sampling_params: top-k, top-p, temperature; seeds: two words; block_table: the block of each 128 positions, 0
    if there is none; k_limits: the largest number of drafts to accept. Prefills: num_tokens, the valid rows of the
    chunk; slots, its slot; next_prompt_id, the id after the chunk, -1 to sample it. Full-sampling graphs
    (`model/logits_processors.py`): allowed, a bit per row and id, id 32 w + b in bit b of word w; in a prefill
    prompt_token_counts, how often each id has occurred.
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
        """The key of the graph of a stage that serves these NumPy inputs."""
        top_k, top_p, temperature = self.sampling_params.T
        filtering = Filters(top_k, top_p, self.min_p).active_R & (temperature > 0)
        # only fused steps have a variant without filters
        key = GraphKey(stage, k, bucket, stage is not Stage.STEP or bool(filtering.any()))
        return key._replace(rows=self.input_ids.shape[1]) if key.is_prefill else key

    def params(self, filters: bool = True) -> SamplingParams:
        """The sampling parameters of the sequences, in torch; `filters=False` in graphs without top-k, top-p, min-p."""
        top_k, top_p, temperature = self.sampling_params.unbind(-1)
        return SamplingParams(temperature, self.seeds, Filters(top_k, top_p, self.min_p) if filters else None)


class StepOutputs(NamedTuple):
    """The outputs of a graph; `accepted_tokens` is padded with -1. State stays on the device.

    `scores`: log-probabilities of the accepted ids, in a prefill of the prompt's ids (`model/logprobs.py`).
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
        """The outputs that the host reads, in the graph's order."""
        return self[: 3 + (self.scores is not None)]


class DraftOutputs(NamedTuple):
    """Outputs of the draft half of a split step; `candidates` are the input ids and their k drafts."""

    candidates: Annotated[Any, "int32 B N"]
    draft_state: DraftState = DraftState([])
    target_caches: Sequence[Cache] = ()
    counts_B1V: Any = None

    @property
    def visible(self) -> tuple[Any, ...]:
        """The output that the host reads."""
        return self[:1]


Outputs = StepOutputs | DraftOutputs


def _declared(signature: type[NamedTuple]) -> dict[str, str]:
    hints = get_type_hints(signature, include_extras=True).items()
    return {field: hint.__metadata__[0] for field, hint in hints if hasattr(hint, "__metadata__")}


# field -> its dtype and dims, in the graph's order
INPUTS, OUTPUTS, DRAFT_OUTPUTS = _declared(StepInputs), _declared(StepOutputs), _declared(DraftOutputs)
# inputs of full-sampling graphs only
FULL_SAMPLING = ("allowed", "penalties", "bias_ids", "bias", "prompt_token_counts")


def tensor_specs(declared: dict[str, str], **sizes: int) -> tuple[TensorSpec, ...]:
    """The specs of a graph's inputs or outputs, given the sizes of its dims."""
    specs = list[TensorSpec]()
    for field, (dtype, *dims) in ((field, text.split()) for field, text in declared.items()):
        if all(dim.isdigit() or dim in sizes for dim in dims):
            specs.append(TensorSpec(field, tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in dims), dtype))
    return tuple(specs)


def zeros_of(tensors: Sequence[TensorSpec]) -> StepInputs:
    """NumPy inputs of zeros."""
    return StepInputs(**{t.name: np.zeros(t.shape, BY_NAME[t.dtype].numpy) for t in tensors})


def mask_words(vocabulary: int) -> int:
    """W, the number of int32 words with a bit per id."""
    return -(-vocabulary // 32)
