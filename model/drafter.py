"""The protocol of drafters: the proposer of a step's k drafts, its state for the next step, and the facts of its kind.

`Pair.step` of `model/speculative.py` calls `propose`, then the target on the N = k + 1 ids, then `update`. A drafter
samples with the noise of the positions that it drafts for, so that drafts are accepted at temperatures above 0 too. A
step's rows begin at the input id's position p. `update` advances the state by the count of accepted ids, so that
`propose` finds the same shape at every step, and no offset in a graph depends on how many were accepted.

docs/drafters.md has a table of the drafters; a new one is one file and a line in `model/drafters/registry.py`.
"""

from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import AttentionMetadata, Cache
from model.config import Qwen3Config
from model.ops import iota
from model.sampling import SamplingParams
from model.weights import Packing, Weight

# a GEMM of one row may sum in a different order than one of several rows
MIN_TARGET_ROWS = 2


class StepRows(NamedTuple):
    """k + 1 rows of each sequence; the target's pass, and `meta`, have at least MIN_TARGET_ROWS."""

    k: int
    meta: AttentionMetadata

    @classmethod
    def of(cls, k: int, positions_B: Tensor, block_table_BL: Tensor) -> Self:
        """The rows of a step whose input ids are at these positions."""
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), positions_B)
        return cls(k, AttentionMetadata(positions_B[:, None] + rows_N, block_table_BL))

    @property
    def sample_positions_BN(self) -> Tensor:
        """The positions of the tokens that the k + 1 rows sample."""
        return self.meta.positions_BN[:, : self.k + 1] + 1

    def pad(self, ids_BN: Tensor) -> Tensor:
        """The ids of the target's pass."""
        return F.pad(ids_BN, (0, self.meta.positions_BN.shape[1] - self.k - 1))


class DraftState(NamedTuple):
    """A drafter's state between steps, on the device: its caches, and tensors (B, K, F) whose row b is slot b's."""

    caches: list[Cache]
    slots: tuple[Tensor, ...] = ()


class PrefillChunk(NamedTuple):
    """Rows of a sequence's prompt, `length` of them valid; the id after them; the tapped states; the slot."""

    ids_1S: Tensor
    meta: AttentionMetadata
    length_1: Tensor
    next_11: Tensor
    taps_1SF: Any
    slot_1: Tensor


class VerifyResult(NamedTuple):
    """A verified step: the input id and drafts, the first `count` of them accepted; the id sampled after these, which
    is the next input id; and the target's states of the rows, if the drafter taps any."""

    rows: StepRows
    ids_BN: Tensor
    count_B1: Tensor
    next_B1: Tensor
    taps_BNF: Any


class StateSpec(NamedTuple):
    """A tensor of a drafter's state: its axes, B slots, K the most drafts of a step, H the draft's width; its dtype, by
    default the weights'. It has three axes: no output of ids has its shape, by which a tracer finds its alias."""

    name: str
    axes: str
    dtype: str = ""


class Drafter:
    """Proposes the host's drafts, which came with the input id; in a step without speculation there are none."""

    name: ClassVar[str] = "none"
    # the frozen dataclass of its model's configuration, and the model of one rank; None without a model
    config_type: ClassVar[type[Any] | None] = None
    model_type: ClassVar[Any] = None
    state_spec: ClassVar[tuple[StateSpec, ...]] = ()
    # the k of a build that names none: the best for the 32B by `bench.tune`; of several the server chooses
    default_ks: ClassVar[tuple[int, ...]] = ()
    # the most drafts of a step; 0 is as many as kernels take rows
    max_k: ClassVar[int] = 0
    # the first passes that read the verified rows: where a step is in halves, they belong to the second
    verify_passes: ClassVar[int] = 0
    # whether these run in steps of k 0 too
    runs_without_drafts: ClassVar[bool] = False
    # whether its model is a Qwen3 with the target's tokenizer, and whether packed kernels support its attention
    is_causal_lm: ClassVar[bool] = False
    packs_attention: ClassVar[bool] = True
    # a tensor that its checkpoint may lack: those of the target's, of which the first that exists is taken
    tied_to_target: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, model: Any = None) -> None:
        # the target's hidden states that `update` and `prefill` get, as transformers counts them
        self.model, self.taps = model, getattr(getattr(model, "config", None), "taps", ())

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        """(B, N) the input ids and k drafts after them; T is 1, or N where the host drafts."""
        return ids_BT, state

    def update(self, result: VerifyResult, state: DraftState) -> DraftState:
        """The state after a step."""
        return state

    def prefill(self, chunk: PrefillChunk, state: DraftState) -> DraftState:
        """The state with a prompt's rows in its slot."""
        return state

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        """Whether a checkpoint's config.json describes its model."""
        return False

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        """The configuration that a checkpoint's config.json describes; UserError for what is not supported."""
        raise NotImplementedError

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        """Each weight's name, its checkpoint's tensors and how ranks divide them."""
        raise NotImplementedError

    @classmethod
    def rename_weight(cls, config: Any, name: str) -> str:
        """The table's name of a checkpoint's tensor, "" for one that is not needed."""
        return name


def write_slot(old_BKF: Tensor, new_1KF: Tensor, slot_1: Tensor) -> Tensor:
    """The tensor with one slot's rows replaced."""
    here_B = iota(old_BKF.shape[0], slot_1) == slot_1
    return torch.where(here_B[:, None, None], new_1KF, old_BKF)
