"""The spec of a bundle: everything that its content depends on, as one frozen value.

A build makes it from flags and checkpoints; a manifest stores it as JSON and is checked as a build checks its flags.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from model.cache import KEY_TILE
from model.config import Qwen3Config
from model.drafter import Drafter
from model.drafters.registry import DRAFTERS
from model.errors import UserError
from model.nki.context import make_context
from model.nki.table import KERNELS
from model.parallel import check_tp
from model.strict import PRINTABLE, Length, Range, Text, ValidationError, read
from nki_kernels.limits import CHUNK, PROMPT_DEPTH, PROMPT_INNER, SPARE_PAGES, attention_limit_error
from trnspec.bundle.part import Part

# a trn2.48xlarge has 16 devices of 8 cores, and two cores are a logical one
MAX_TP = 64
# drafts of a step: the kernels take 32 rows
MAX_K = 31
# layers of a launch. neuronx-cc refuses graphs of over 5 million instructions (its message in aws-neuron-sdk's issue
# 819), and users report 150,000 to 300,000 for one operation (NCC_EXTP003): a layer of the 32B has 1,100
MAX_LAYERS = 128
# the default: each further launch costs 15 us (docs/kernels.md)
LAYERS = 16
# rows of the prompts' graphs, up to max_len
CHUNKS = (128, 512, 2048)
# positions of a bucket by the next smaller one's: a launch at 4096 takes 7 to 11 % more than at 1024 (docs/kernels.md)
_BUCKET_STEP = 4
# a prompt's chunk of R rows has a graph for the first bucket of this many times R, and one for the largest
_KEYS_PER_ROW = 16
Name = Annotated[str, Text(PRINTABLE + "{1,200}", "a name")]


@dataclass(frozen=True)
class BundleSpec:
    """One bundle. `ks` are the k of its fused steps, rising; without any there is no draft.

    `target` and `draft` are names for people. `blocks`: size of the block pool, block 0 and the spare ones included, by
    default what the batch may need. `chunks`: rows of the prompts' graphs, by default `CHUNKS`. `context_buckets`: the
    positions that steps attend, by default max_len and fractions of it. `graphs`: greedy has one graph of prompts and
    steps without filters or logits processors. `layers`: the most layers of a kernel launch; with 1 each half of a
    layer is one. `without`: NKI kernels that become operations of the graph. `gather`: an all-gather of the graph, as
    an all-reduce of zero-padded parts or as XLA's. `weights`: those of the projections of the target's layers and a
    chain's, in `dtype` or FP8 (model/fp8.py).
    """

    target: Name
    target_config: Qwen3Config
    tp: Annotated[int, Range(1, MAX_TP)] = 32
    ks: Annotated[tuple[int, ...], Length(0, 8), Range(1, MAX_K)] = ()
    batch: Annotated[int, Range(1, 4096)] = 4
    max_len: Annotated[int, Range(KEY_TILE, 1 << 20)] = 1024
    dtype: Literal["bf16", "fp32"] = "bf16"
    kernels: Literal["reference", "nki"] = "reference"
    drafter: Name = Drafter.name
    draft: Name = "none"
    draft_config: Any = None
    blocks: Annotated[int, Range(0, 1 << 24)] = 0
    chunks: Annotated[tuple[int, ...], Length(0, 8), Range(KEY_TILE, 1 << 17)] = ()
    context_buckets: Annotated[tuple[int, ...], Length(0, 8), Range(KEY_TILE, 1 << 20)] = ()
    graphs: Literal["all", "greedy"] = "all"
    layers: Annotated[int, Range(1, MAX_LAYERS)] = 1
    without: Annotated[tuple[Name, ...], Length(0, 12)] = ()
    gather: Literal["all_reduce", "all_gather"] = "all_reduce"
    weights: Literal["dtype", "fp8"] = "dtype"

    @property
    def k(self) -> int:
        return self.ks[-1] if self.ks else 0

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies in a step, and the most tokens that it emits."""
        return self.k + 1

    @property
    def drafter_type(self) -> type[Drafter]:
        return DRAFTERS[self.drafter]

    @property
    def has_draft(self) -> bool:
        return self.drafter_type.config_type is not None

    @property
    def host_drafts(self) -> bool:
        """Whether the host drafts: it sends the drafts of a step with its input ids."""
        return self.k > 0 and not self.has_draft

    @property
    def untrained_ks(self) -> list[int]:
        """The k for which the draft was not trained."""
        return self.draft_config.untrained_ks(self.ks) if hasattr(self.draft_config, "untrained_ks") else []

    @property
    def buckets(self) -> tuple[int, ...]:
        """The positions that the graphs of steps attend, rising up to max_len; multiples of the kernels' chunk."""
        if self.graphs == "greedy" or self.context_buckets:
            return self.context_buckets or (self.max_len,)
        sizes = [self.max_len]
        while sizes[0] >= _BUCKET_STEP * CHUNK:
            sizes.insert(0, -(-sizes[0] // (_BUCKET_STEP * CHUNK)) * CHUNK)
        return tuple(sizes)

    @property
    def pool(self) -> int:
        """Blocks of the block pool, block 0 and the spare ones included."""
        return self.blocks or 1 + self.batch * self.max_len // KEY_TILE + SPARE_PAGES

    @property
    def usable(self) -> int:
        """Blocks of the block pool that a block table may name, block 0 included: all but the last ones."""
        return self.pool - SPARE_PAGES

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """Rows and keys of each graph of prompts; a chunk has one for a prompt's beginning and one for all of it."""
        chunks = self.chunks or tuple(rows for rows in CHUNKS if rows <= self.max_len)
        if self.graphs == "greedy":
            return (logprobs_prompt([(rows, self.max_len) for rows in chunks], self.max_len),)
        first = [next((b for b in self.buckets if b >= _KEYS_PER_ROW * rows), self.max_len) for rows in chunks]
        ends = (sorted({keys, self.max_len}) for keys in first)
        return tuple((rows, keys) for rows, both in zip(chunks, ends, strict=True) for keys in both)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The target, and the draft if there is one."""
        ctx = make_context(self.kernels, self.tp, without=self.without, fp8=self.weights == "fp8")
        models = [("target", self.target, self.target_config), ("draft", self.draft, self.draft_config)]
        return tuple(Part(*model, ctx) for model in models[: 1 + self.has_draft])

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def check(self) -> None:
        """Raise UserError with one sentence for the first thing that cannot be built."""
        _check_numbers(self)
        check_tp(self.target_config, self.tp, "target")
        if self.has_draft:
            _check_draft(self)
        _check_kernels(self)


def logprobs_prompt(prompts: Sequence[tuple[int, int]], max_len: int) -> tuple[int, int]:
    """Rows and keys of the one graph of a kind, given those of the graphs of prompts: at most 512 rows, all keys."""
    return max((rows for rows, _ in prompts if rows <= 512), default=prompts[0][0]), max_len


def spec_from_json(value: Any, at: str = "spec") -> BundleSpec:
    """The spec that a manifest stores; ValidationError for the first field that is not as declared."""
    if not isinstance(value, dict):
        raise ValidationError(f"{at} is not an object")
    spec = read(BundleSpec, {name: v for name, v in value.items() if name != "draft_config"}, at)
    config = value.get("draft_config")
    if spec.drafter not in DRAFTERS:
        raise ValidationError(f"{at}.drafter is {spec.drafter}, expected one of {', '.join(DRAFTERS)}")
    if (config is not None) != spec.has_draft:
        raise ValidationError(
            f"{at}.drafter is {spec.drafter} and the draft has {'a' if config else 'no'} configuration"
        )
    kind = spec.drafter_type.config_type
    return dataclasses.replace(spec, draft_config=read(kind, config, f"{at}.draft_config")) if kind else spec


def _check_numbers(spec: BundleSpec) -> None:
    ks, chunks = (", ".join(map(str, numbers)) or "0" for numbers in (spec.ks, spec.chunks))
    needed, longest = 1 + spec.max_len // KEY_TILE, min(p.config.max_position_embeddings for p in spec.parts)
    around = [n * KEY_TILE for n in (needed - 1, needed) if 0 < n * KEY_TILE <= max(longest, KEY_TILE)]
    fitting = all(c & (c - 1) == 0 and KEY_TILE <= c <= spec.max_len for c in spec.chunks)
    unknown = set(spec.without) - KERNELS.keys()
    tile = CHUNK if spec.kernels == "nki" else KEY_TILE
    buckets = spec.context_buckets or (spec.max_len,)
    rising = list(buckets) == sorted(set(buckets)) and buckets[-1] == spec.max_len
    max_k = spec.drafter_type.max_k or MAX_K
    for wrong, sentence in (
        (list(spec.ks) != sorted(set(spec.ks)), f"k is {ks}; a set of k is different numbers, the largest last"),
        (spec.layers > 1 and spec.kernels == "reference",
         f"layers is {spec.layers} and kernels reference has no launches; leave it out, or use nki"),
        (bool(unknown) or (spec.without and spec.kernels == "reference"),
         f"without is {', '.join(spec.without)}; name kernels of a build with --kernels nki: {', '.join(KERNELS)}"),
        (spec.max_len % KEY_TILE,
         f"max-len {spec.max_len} is not a multiple of {KEY_TILE}; use {' or '.join(map(str, around))}"),
        (spec.max_len > longest, f"max-len {spec.max_len} exceeds the {longest} positions of the models; lower it"),
        (spec.rows >= spec.max_len, f"k {spec.k} leaves no room in max-len {spec.max_len}; raise max-len"),
        (spec.usable < needed,
         f"blocks is {spec.blocks}; a sequence of max-len {spec.max_len} needs {needed - 1} of {KEY_TILE} positions, "
         f"block 0 and {SPARE_PAGES} spare blocks are reserved, give at least {needed + SPARE_PAGES}"),
        (not fitting or list(spec.chunks) != sorted({*spec.chunks}),
         f"chunks are {chunks}; give rising powers of two from {KEY_TILE} to max-len {spec.max_len}"),
        (not rising or any(bucket % tile for bucket in buckets[:-1]),
         f"context-buckets are {', '.join(map(str, buckets))}; give rising multiples of {tile} that end with max-len "
         f"{spec.max_len}"),
        ((spec.k > 0) != (spec.drafter_type is not Drafter),
         f"k is {spec.k} and the drafter {spec.drafter}; k 0 goes with none, and none with k 0"),
        (spec.k > max_k, f"k is {spec.k}; the drafter {spec.drafter} drafts at most {max_k} in a step, lower k"),
    ):  # fmt: skip
        if wrong:
            raise UserError(sentence)


def _check_draft(spec: BundleSpec) -> None:
    target, draft = spec.target_config, spec.draft_config
    check_tp(draft, spec.tp, "draft")
    if target.vocab_size != draft.vocab_size:
        sizes = f"{target.vocab_size} and {draft.vocab_size}"
        raise UserError(
            f"target and draft have vocabularies of {sizes} ids; give a --draft with the target's, or --k 0"
        )
    if clause := draft.incompatibility(target, spec.k) if hasattr(draft, "incompatibility") else "":
        raise UserError(f"the draft {clause}; give one that was trained for this target, or lower k")


def _check_kernels(spec: BundleSpec) -> None:
    """Refuse sequences that attention's kernels do not take, and packed weights whose rows do not fit SBUF."""
    fp32, split = spec.dtype == "fp32", "raise --tp"
    if fp32 and spec.weights == "fp8" and spec.kernels == "nki":
        raise UserError("kernels multiply FP8 weights by bf16 rows only; use --dtype bf16 or --kernels reference")
    for part in spec.parts if spec.kernels == "nki" else ():
        config, packing, heads = part.config, part.packing, part.ctx.heads(part.config)
        if reason := attention_limit_error(spec.batch, 1, spec.max_len, spec.pool * heads.kv_per_rank * KEY_TILE):
            raise UserError(f"the {part.role}: {reason}, or use --kernels reference")
        inner = config.intermediate_size // spec.tp if packing.mlp else 0
        if packing.fp8 and not (packing.attention and packing.mlp):
            raise UserError(
                f"the {part.role} has layers that no kernel packs, whose weights cannot be FP8; use --kernels "
                "reference, or leave out --weights fp8"
            )
        for used, what, numbers, limit, way in (
            (any(packing[:3]), "rows", config.hidden_size, PROMPT_DEPTH[fp32], "use --dtype bf16" if fp32 else ""),
            (packing.attention, "rows of heads", heads.heads_per_rank * config.head_dim, PROMPT_DEPTH[fp32], split),
            (packing.mlp, "inner rows", inner, PROMPT_INNER[fp32], split),
        ):
            if used and numbers > limit:
                raise UserError(
                    f"the {part.role}'s {what} have {numbers} {spec.dtype} numbers on a rank, and kernels for prompts "
                    f"support {limit}; {' or '.join(filter(None, (way, 'use --kernels reference')))}"
                )
