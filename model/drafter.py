"""The interface of drafters: propose k drafts, update the state after verification, describe the checkpoint.

`Pair.step` of `model/speculative.py` calls `propose`, runs the target on the N = k + 1 ids, then calls `update`. A
drafter samples with the noise of the positions that it drafts for; otherwise drafts would rarely be accepted at
temperatures above 0. A step's rows begin at the input id's position p. `update` advances the state by the number of
emitted ids, so state shapes and graph offsets do not depend on how many drafts were accepted.

docs/drafters.md has a table of the drafters. To add one, write a file and its line in `model/drafters/registry.py`.
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
    """The rows of a step, k + 1 per sequence; `meta` and the target's pass have at least MIN_TARGET_ROWS."""

    k: int
    meta: AttentionMetadata

    @classmethod
    def of(cls, k: int, positions_B: Tensor, block_table_BL: Tensor) -> Self:
        """The rows of a step; `positions_B` are the positions of the input ids."""
        rows_N = iota(max(k + 1, MIN_TARGET_ROWS), positions_B)
        return cls(k, AttentionMetadata(positions_B[:, None] + rows_N, block_table_BL))

    @property
    def sample_positions_BN(self) -> Tensor:
        """The absolute positions of the tokens sampled after the k + 1 rows."""
        return self.meta.positions_BN[:, : self.k + 1] + 1

    def pad(self, ids_BN: Tensor) -> Tensor:
        """Pads the input ids and drafts to the rows of the target's pass."""
        return F.pad(ids_BN, (0, self.meta.positions_BN.shape[1] - self.k - 1))


class DraftState(NamedTuple):
    """A drafter's state on the device: KV caches, and per-slot tensors (B, K, F)."""

    caches: list[Cache]
    slots: tuple[Tensor, ...] = ()


class PrefillChunk(NamedTuple):
    """A prefill chunk of one prompt: S rows, `length` of them valid; the id after them; tapped states; the slot."""

    ids_1S: Tensor
    meta: AttentionMetadata
    length_1: Tensor
    next_11: Tensor
    taps_1SF: Any
    slot_1: Tensor


class VerifyResult(NamedTuple):
    """A verified step. `ids_BN`: the input id and drafts; the first `count` are part of the output. `next`: the next
    input id, sampled after them. `taps_BNF`: the target's tapped states, None if the drafter taps none."""

    rows: StepRows
    ids_BN: Tensor
    count_B1: Tensor
    next_B1: Tensor
    taps_BNF: Any


class StateSpec(NamedTuple):
    """A per-slot state tensor: its axes (B slots, K the largest k, H the draft's hidden size) and its dtype, by default
    that of the weights. It has three axes so that its shape differs from every output's: JAX aliases by shape."""

    name: str
    axes: str
    dtype: str = ""


class Drafter:
    """The base class, a drafter without a model: the host drafts (n-gram), or there are no drafts (k = 0)."""

    name: ClassVar[str] = "none"
    # the configuration's frozen dataclass and the module of one rank; None without a model
    config_type: ClassVar[type[Any] | None] = None
    model_type: ClassVar[Any] = None
    state_spec: ClassVar[tuple[StateSpec, ...]] = ()
    # the default k of a build: the best for the 32B by `bench.tune`; with several, the server chooses at run time
    default_ks: ClassVar[tuple[int, ...]] = ()
    # the largest supported k; 0: limited by the kernels' rows only
    max_k: ClassVar[int] = 0
    # the first draft passes consume verified rows, so they run in the verify half of a split step
    verify_passes: ClassVar[int] = 0
    # whether these passes also run in k = 0 steps
    runs_without_drafts: ClassVar[bool] = False
    # whether the model is a Qwen3 with the target's tokenizer
    is_causal_lm: ClassVar[bool] = False
    # whether the packed attention kernels support the model's layers
    packs_attention: ClassVar[bool] = True
    # weights that a checkpoint may lack -> names of the target's tensors; the first one that exists replaces it
    tied_to_target: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, model: Any = None) -> None:
        # indices of the target's hidden states that `update` and `prefill` receive (`Qwen3.taps`)
        self.model, self.taps = model, getattr(getattr(model, "config", None), "taps", ())

    def propose(
        self, rows: StepRows, ids_BT: Tensor, params: SamplingParams, noise_BNV: Tensor, state: DraftState
    ) -> tuple[Tensor, DraftState]:
        """Returns (B, N) the input id and k drafts of each sequence, and the state. T is 1, or N if the host drafts."""
        return ids_BT, state

    def update(self, result: VerifyResult, state: DraftState) -> DraftState:
        """Returns the state after a verified step."""
        return state

    def prefill(self, chunk: PrefillChunk, state: DraftState) -> DraftState:
        """Returns the state after a prefill chunk, with the chunk's slot updated."""
        return state

    @classmethod
    def matches_config(cls, raw: dict[str, Any]) -> bool:
        """Whether a checkpoint's config.json describes this kind of draft."""
        return False

    @classmethod
    def config_from_hf(cls, raw: dict[str, Any], where: str, target: Qwen3Config) -> Any:
        """Reads a checkpoint's config.json. Raises UserError for unsupported settings."""
        raise NotImplementedError

    @classmethod
    def weights(cls, config: Any, packing: Packing) -> list[Weight]:
        """The weights table of the model (`model/weights.py`)."""
        raise NotImplementedError

    @classmethod
    def rename_weight(cls, config: Any, name: str) -> str:
        """Maps the name of a checkpoint's tensor to the name in the weights table; "" for unused tensors."""
        return name


def write_slot(old_BKF: Tensor, new_1KF: Tensor, slot_1: Tensor) -> Tensor:
    """Replaces one slot of a per-slot state tensor."""
    here_B = iota(old_BKF.shape[0], slot_1) == slot_1
    return torch.where(here_B[:, None, None], new_1KF, old_BKF)
