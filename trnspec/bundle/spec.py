"""The spec of a bundle: everything that its content depends on, as one frozen value.

A build makes it of flags and checkpoints, a manifest holds it as JSON, and a loader plans again from it. Both check it
here, so a manifest cannot describe a bundle that no build makes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from model.attention import KEY_TILE
from model.config import Qwen3Config
from model.drafters.kind import Kind
from model.drafters.registry import KINDS, NONE
from model.errors import UserError
from model.nki.backing import backing_of
from model.ops import EAGER, Ops
from model.parallel import HeadMap, Parallel, check_tp
from model.strict import PRINTABLE, Length, Range, Text, Wrong, read
from nki_kernels.limits import PROMPT_DEPTH, PROMPT_INNER
from trnspec.bundle.part import Part

# a trn2.48xlarge has 16 devices of 8 cores, and two cores make a logical one
MAX_TP = 64
# the most drafts of a step: the kernels take 32 rows
MAX_K = 31
DRAFT_GROUPS = (1, 2, 4, 8)
# layers of a launch. neuronx-cc refuses graphs of over 5 million instructions (its message in aws-neuron-sdk's issue
# 819), and users report 150,000 to 300,000 for one operation (NCC_EXTP003): a layer of the 32B has 1,100
MAX_LAYERS = 128
# what is built unless a recipe says otherwise: a launch more costs 15 us (docs/decode_layer.md)
LAYERS = 16
# rows of the prompts' graphs, as far as the length reaches. Those of less than a tile of keys are for CPUs, where a
# chunk costs its rows and 16 more
CHUNKS = (32, 48, 64, 96, 128, 512, 2048)
# a graph of a prompt may read so many times the keys that are there
_KEYS_STEP = 4
Name = Annotated[str, Text(PRINTABLE + "{1,200}", "a name")]


@dataclass(frozen=True)
class BundleSpec:
    """One bundle. `ks` are the k of its fused steps, rising; without any there is no draft.

    `target` and `draft` are names for people, `draft_tp` the ranks of one copy of the draft. `blocks` are those of a
    pool of caches, block 0 among them, by default as many as the batch may need; `chunks` the rows of the prompts'
    graphs, by default `CHUNKS`. `layers` are the most layers of a launch, for kernels that do all of a layer; with 1
    each half of one has its own.
    """

    target: Name
    target_config: Qwen3Config
    tp: Annotated[int, Range(1, MAX_TP)] = 32
    ks: Annotated[tuple[int, ...], Length(0, 8), Range(1, MAX_K)] = ()
    batch: Annotated[int, Range(1, 4096)] = 4
    max_len: Annotated[int, Range(KEY_TILE, 1 << 20)] = 1024
    dtype: Literal["bf16", "fp32"] = "bf16"
    kernels: Literal["reference", "nki"] = "reference"
    drafter: Name = NONE.name
    draft: Name = "none"
    draft_config: Any = None
    draft_tp: Annotated[int, Range(0, MAX_TP)] = 0
    blocks: Annotated[int, Range(0, 1 << 24)] = 0
    chunks: Annotated[tuple[int, ...], Length(0, 8), Range(16, 1 << 17)] = ()
    layers: Annotated[int, Range(1, MAX_LAYERS)] = 1

    @property
    def k(self) -> int:
        """The most drafts of a step."""
        return self.ks[-1] if self.ks else 0

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies in a step, and the most tokens that it emits."""
        return self.k + 1

    @property
    def kind(self) -> Kind:
        """The kind of drafter."""
        return KINDS[self.drafter]

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft with weights beside the target."""
        return self.kind.has_model

    @property
    def host_drafts(self) -> bool:
        """Whether the host brings the drafts of a step with its input ids."""
        return self.k > 0 and not self.has_draft

    @property
    def untrained_ks(self) -> list[int]:
        """The k with which the draft is a different drafter than the trained one, and accepted less or more often."""
        return self.draft_config.untrained(self.ks) if hasattr(self.draft_config, "untrained") else []

    @property
    def buckets(self) -> tuple[int, ...]:
        """Powers of two from the key tile up to max_len, and max_len itself."""
        sizes, size = [], KEY_TILE
        while size < self.max_len:
            sizes.append(size)
            size *= 2
        return (*sizes, self.max_len)

    @property
    def pool(self) -> int:
        """Blocks of a pool of caches, block 0 among them."""
        return self.blocks or 1 + self.batch * self.max_len // KEY_TILE

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """Rows and keys of each graph of prompts.

        A chunk has a graph for a prompt's beginning, which attends its own rows, one for the whole length, and between
        them one for each 4 times as many keys, up to half of the length. One of less than a tile has that of the whole
        length alone: on a CPU it reads no further than its rows see.
        """
        unit = backing_of(self.kernels).prompt_rows
        chunks = self.chunks or tuple(rows for rows in CHUNKS if rows <= self.max_len and rows % unit == 0)
        return tuple((rows, keys) for rows in chunks for keys in self._keys_of(rows))

    def _keys_of(self, rows: int) -> list[int]:
        keys = [rows if rows >= KEY_TILE else self.max_len]
        while keys[-1] * _KEYS_STEP * 2 <= self.max_len:
            keys.append(keys[-1] * _KEYS_STEP)
        return sorted({*keys, self.max_len})

    @property
    def draft_ranks(self) -> int:
        """Ranks that hold one copy of the draft; 0 without one."""
        return (self.draft_tp or self.tp) if self.has_draft else 0

    def parallel(self, ops: Ops = EAGER) -> tuple[Parallel, Parallel]:
        """How target and draft are split."""
        return (Parallel(self.tp, ops),) * 2

    @property
    def parts(self) -> tuple[Part, ...]:
        """The target, and the draft if there is one."""
        (of_target, of_draft), backing = self.parallel(), backing_of(self.kernels)
        target = Part("target", self.target, self.target_config, of_target, backing)
        if not self.has_draft:
            return (target,)
        return (target, Part("draft", self.draft, self.draft_config, of_draft, backing))

    def weight_names(self) -> dict[str, str]:
        """Parameter of a pair -> its name in the bundle, for every weight."""
        return {ours: name for p in self.parts for ours, name in p.bundle_names(not self.has_draft).items()}

    def as_json(self) -> dict[str, Any]:
        """The JSON object of a manifest."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def check(self) -> None:
        """Raise UserError with one sentence for the first thing that cannot be built."""
        _check_numbers(self)
        check_tp(self.target_config, self.tp, "target")
        _check_drafter(self)
        _check_blocks(self)
        _check_prompts(self)
        longest = min(part.config.max_position_embeddings for part in self.parts)
        if self.max_len > longest:
            raise UserError(f"max-len {self.max_len} is beyond the models' {longest} positions; lower it")


def spec_from_json(value: Any, at: str = "spec") -> BundleSpec:
    """The spec that a manifest holds; Wrong for the first field that is not as declared."""
    if not isinstance(value, dict):
        raise Wrong(f"{at} is not an object")
    spec = read(BundleSpec, {name: v for name, v in value.items() if name != "draft_config"}, at)
    kind, config = KINDS.get(spec.drafter), value.get("draft_config")
    if kind is None:
        raise Wrong(f"{at}.drafter is {spec.drafter}, expected one of {', '.join(KINDS)}")
    if (config is not None) != kind.has_model:
        raise Wrong(f"{at}.drafter is {kind.name} and the draft has {'a' if config else 'no'} configuration")
    if kind.model is None:
        return spec
    return dataclasses.replace(spec, draft_config=read(kind.model.config, config, f"{at}.draft_config"))


def _check_numbers(spec: BundleSpec) -> None:
    if not all(1 <= k <= MAX_K for k in spec.ks) or list(spec.ks) != sorted(set(spec.ks)):
        raise UserError(f"k is {_listed(spec.ks)}; a step drafts 1 to {MAX_K} tokens, 0 builds the target alone, and a "
                        "set of k is different numbers, the largest last")  # fmt: skip
    if not 1 <= spec.tp <= MAX_TP:
        raise UserError(f"tp is {spec.tp}; a trn2 machine has {MAX_TP} logical cores, choose 1 to {MAX_TP}")
    if spec.layers > 1 and spec.kernels == "reference":
        raise UserError(f"layers is {spec.layers} and kernels reference has no launches; leave it out, or use nki")
    if spec.batch < 1:
        raise UserError(f"batch is {spec.batch}; it must be at least 1")
    if spec.max_len < KEY_TILE or spec.max_len % KEY_TILE:
        raise UserError(
            f"max-len {spec.max_len} cannot be reached by buckets, which are multiples of {KEY_TILE}; "
            f"use {max(1, -(-spec.max_len // KEY_TILE)) * KEY_TILE}"
        )
    if spec.rows >= spec.max_len:
        raise UserError(f"k {spec.k} leaves no room in max-len {spec.max_len}; raise max-len")
    if spec.draft_tp not in (0, spec.tp, *DRAFT_GROUPS):
        groups = ", ".join(map(str, DRAFT_GROUPS))
        raise UserError(
            f"draft_tp is {spec.draft_tp}; the draft's groups have {groups} ranks, or leave it out for all ranks"
        )
    if spec.draft_tp and spec.tp % spec.draft_tp:
        raise UserError(
            f"draft_tp {spec.draft_tp} does not divide tp {spec.tp}, whose ranks form the draft's groups; choose one "
            "that does"
        )


def _listed(ks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ks)) or "0"


def _check_drafter(spec: BundleSpec) -> None:
    kind = spec.kind
    if (spec.k > 0) != (kind is not NONE):
        raise UserError(f"k is {spec.k} and the drafter {kind.name}; k 0 goes with none, and none with k 0")
    if spec.k > (kind.limit or spec.k):
        raise UserError(f"k is {spec.k}; the drafter {kind.name} drafts at most {kind.limit} in a step, lower k")
    if not spec.has_draft:
        if spec.draft_tp:
            raise UserError(f"draft_tp was given and the drafter {kind.name} has no model; leave it out")
        return
    target, draft = spec.target_config, spec.draft_config
    check_tp(draft, spec.draft_ranks, "draft")
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"target and draft have vocabularies of {target.vocab_size} and {draft.vocab_size} tokens; a draft must "
            "share the target's vocabulary"
        )
    misfit = draft.misfit(target, spec.k) if hasattr(draft, "misfit") else ""
    if misfit:
        raise UserError(f"the draft's heads {misfit}; give heads that were trained for this target, or lower k")


def _check_blocks(spec: BundleSpec) -> None:
    if spec.pool < (least := 1 + spec.max_len // KEY_TILE):
        raise UserError(
            f"blocks is {spec.blocks}; a sequence of max-len {spec.max_len} needs {least - 1} of {KEY_TILE} positions "
            f"and one is kept free, give at least {least}"
        )
    least = backing_of(spec.kernels).prompt_rows
    fit = all(c % least == 0 and c <= spec.max_len and (c <= KEY_TILE or c & (c - 1) == 0) for c in spec.chunks)
    if not fit or list(spec.chunks) != sorted({*spec.chunks}):
        raise UserError(
            f"chunks are {_listed(spec.chunks)}; give rising multiples of {least} up to {KEY_TILE} and powers of two "
            f"above it, up to max-len {spec.max_len}"
        )


def _check_prompts(spec: BundleSpec) -> None:
    """Refuse packed weights whose rows a prompt's kernels cannot hold in SBUF."""
    fp32, split = spec.dtype == "fp32", "raise --tp"
    for part in spec.parts:
        config, packing, rows = part.config, part.packing, list[tuple[str, int, int, str]]()
        if packing.attention or packing.mlp:
            rows.append(("rows", config.hidden_size, PROMPT_DEPTH[fp32], "use --dtype bf16" if fp32 else ""))
        if packing.attention:
            heads = HeadMap(config.num_attention_heads, config.num_key_value_heads, part.ranks).heads_per_rank
            rows.append(("rows of heads", heads * config.head_dim, PROMPT_DEPTH[fp32], split))
        if packing.mlp:
            rows.append(("inner rows", config.intermediate_size // part.ranks, PROMPT_INNER[fp32], split))
        for what, numbers, most, way in rows:
            if numbers > most:
                raise UserError(
                    f"the {part.role}'s {what} have {numbers} numbers of {spec.dtype} on a rank, and a prompt's "
                    f"kernels hold {most}; {' or '.join(filter(None, (way, 'use --kernels reference')))}"
                )
