"""What to build: the flags of compile.build as one frozen value, checked before anything is paid."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from compile.tokenizer import same_tokenizer
from model.attention import KEY_TILE
from model.bundle.schema import MAX_K, MAX_TP
from model.bundle.weights import names
from model.config import PRESETS, Qwen3Config, load_config, raw_config
from model.draft_config import DraftConfig, Eagle3Config, MedusaConfig, load_draft
from model.drafting import KINDS, Drafting, inferred
from model.dtypes import BY_FLAG
from model.errors import UserError
from model.nki.backing import NAMES, backing_of
from model.ops import EAGER, Ops
from model.packing import Packing
from model.parallel import Parallel, check_tp
from model.tree import Tree, parse_tree
from nki_kernels.limits import ROWS, SEQUENCES

# what has no meaning without a draft
_OF_DRAFT = ("draft", "draft_checkpoint", "draft_tp", "draft_head")
AUTO = "auto"
DRAFT_GROUPS = (1, 2, 4, 8)
# flags that are one of a few words
_CHOICES = {
    "drafter": (AUTO, *KINDS), "dtype": (*BY_FLAG,), "kv_shard": ("heads", "sequence"), "kernels": NAMES,
    "draft_head": ("all", "group"),
}  # fmt: skip
# most prompts of a chat's first turn; a pass over a tile of keys costs a CPU four times as much
SHORT_PROMPT = 32


def _flag(default: Any, help: str, how: bool = False) -> Any:
    """A flag; `how` marks one that the content of a bundle does not depend on."""
    return field(default=default, metadata={"help": help, "how": how})


@dataclass(frozen=True)
class BuildSpec:
    """One build. k counts draft tokens per step: the target verifies k + 1 rows. With k 0 there is no draft."""

    target: str = _flag("Qwen/Qwen3-32B", "target: a preset name or a Hugging Face checkpoint folder")
    draft: str = _flag("Qwen/Qwen3-1.7B", "draft: a preset name or a Hugging Face checkpoint folder")
    tp: int = _flag(32, "tensor-parallel ranks")
    k: int = _flag(7, "draft tokens per step, 0 to 31, or a set as 0,3,7; 0 alone builds the target without a draft")
    batch: int = _flag(4, "sequences decoded together")
    max_len: int = _flag(1024, "longest sequence, prompt and answer together")
    out: str = _flag("bundle", "folder of the bundle", how=True)
    checkpoint: str = _flag("", "folder with the target's weights and tokenizer", how=True)
    draft_checkpoint: str = _flag("", "folder with the draft's weights", how=True)
    draft_tp: int = _flag(0, "ranks of the draft, 1, 2, 4 or 8 in groups inside of --tp; 0 means the same as --tp")
    draft_head: str = _flag("all", "ranks that split the draft's head: all of --tp, or group, those of --draft-tp")
    drafter: str = _flag(AUTO, f"{', '.join(KINDS)}, or auto: what the draft's config.json says, none with k 0")
    tree: str = _flag(
        "", "parents of a tree's rows 1, 2, ..., as 0,0,1,1: several candidates a position; empty: a chain"
    )
    kv_shard: str = _flag("heads", "heads (a copy of a kv head a rank) or sequence (a slice of its positions a rank)")
    dtype: str = _flag("bf16", "bf16 or fp32, of weights, activations and caches")
    kernels: str = _flag("reference", "reference (torch) or nki (calls of the NKI kernels, simulated on this machine)")
    toolchain: str = _flag(
        "auto", "auto (what is on this machine), cpu (HLO alone) or neuron (refuse without it)", how=True
    )
    compiler_flags: str = _flag(
        "", "the compiler's flags instead of NxDI's: a line, or a JSON object {tag: line}", how=True
    )
    s3: str = _flag("", "push the finished bundle below s3://bucket/prefix, or a folder, under its own name", how=True)
    structured: bool = _flag(
        False, "graphs more for prompts and steps, that take masks, of drafts too, and return log-probabilities"
    )
    separate: bool = _flag(False, "graphs more, which draft and verify one after the other: the reference mode")
    inline: bool = _flag(False, "inline every layer instead of calling a shared computation")
    dry_run: bool = _flag(False, "print the plan and build nothing", how=True)
    json: bool = _flag(False, "print a JSON object instead of lines for people", how=True)
    force: bool = _flag(False, "build everything again, even what has not changed", how=True)
    # the k of other fused steps, rising; a part of --k on the command line, and 0 is in every set
    fewer: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """N: the rows that the target verifies in a step, and the most tokens that it emits."""
        return self.k + 1

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of every fused step, rising."""
        return (*self.fewer, self.k) if self.k else ()

    def tree_of(self, k: int) -> Tree | None:
        """The tree of a step of k drafts, if the build has one."""
        return parse_tree(self.tree).cut(k) if self.tree and k else None

    @property
    def copies(self) -> int:
        """The target's caches of each sequence: one, or one for each path of the tree."""
        return len(parse_tree(self.tree).branches) if self.tree and self.k else 1

    @property
    def target_config(self) -> Qwen3Config:
        return load_config(self.target)

    @property
    def draft_config(self) -> DraftConfig:
        return load_draft(self.drafting.kind, self.draft, self.target_config)

    @property
    def drafting(self) -> Drafting:
        """The drafter, inferred from the draft's checkpoint where the flag leaves it open."""
        if not self.k or (self.drafter in KINDS and not KINDS[self.drafter].has_model):
            return Drafting("none" if self.drafter == AUTO else self.drafter)
        read = Drafting("chain") if self.draft in PRESETS else inferred(raw_config(self.draft))
        return (
            read
            if self.drafter == AUTO
            else Drafting(self.drafter, read.mask_id if self.drafter == read.kind else None)
        )

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft with weights beside the target."""
        return self.drafting.of_kind.has_model

    @property
    def models(self) -> tuple[PartModel, ...]:
        """The target, and the draft if there is one."""
        target = PartModel("target", self.target, self.checkpoint, self.target_config, self.tp, self.tp)
        if not self.has_draft:
            return (target,)
        ranks = self.draft_ranks, self.draft_head_ranks
        return (target, PartModel("draft", self.draft, self.draft_checkpoint, self.draft_config, *ranks))

    def weight_names(self) -> dict[str, str]:
        """Parameter of a pair -> its name in the bundle, for every weight of the build."""
        of_models = (names(m.prefix, m.config, self.packing(m), alone=not self.has_draft) for m in self.models)
        return {ours: stored for of_model in of_models for ours, stored in of_model.items()}

    @property
    def draft_ranks(self) -> int:
        """Ranks that hold one copy of the draft; 0 without one."""
        return (self.draft_tp or self.tp) if self.has_draft else 0

    @property
    def draft_head_ranks(self) -> int:
        """Ranks that hold one copy of the draft's head; 0 without one."""
        return self.tp if self.has_draft and self.draft_head == "all" else self.draft_ranks

    def parallel(self, ops: Ops = EAGER) -> tuple[Parallel, Parallel]:
        """How target and draft are split, on operations that join all ranks."""
        sequence, ranks = self.kv_shard == "sequence", self.draft_ranks or self.tp
        of_target = Parallel(self.tp, ops, sequence)
        if ranks == self.tp:
            return of_target, of_target
        return of_target, Parallel(ranks, ops.grouped(ranks), sequence, of_target if self.draft_head == "all" else None)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Powers of two from the key tile up to max_len, and max_len itself."""
        sizes, size = [], KEY_TILE
        while size < self.max_len:
            sizes.append(size)
            size *= 2
        return (*sizes, self.max_len)

    @property
    def short_prompts(self) -> tuple[int, ...]:
        """Rows of the prompts' graphs below the buckets: kernels take whole tiles."""
        return (SHORT_PROMPT,) if self.kernels == "reference" else ()

    def packing(self, model: PartModel) -> Packing:
        """The halves of a model's layers whose weights are packed, if the kernels ask for it: a decoder's, and the MLP
        of an EAGLE-3 head, whose attention reads two rows beside each other."""
        if isinstance(model.config, MedusaConfig):
            return Packing()
        packing = backing_of(self.kernels).packing(model.config, model.ranks)
        return packing if isinstance(model.config, Qwen3Config) else packing._replace(attention=False)

    def what_is_built(self) -> dict[str, Any]:
        """The fields that the bundle's content depends on."""
        idle = {"tree": not self.tree, "draft_head": self.draft_head_ranks == self.draft_ranks}
        without = {"fewer", *(n for n in idle if idle[n]), *(() if self.has_draft else _OF_DRAFT)}
        what = [f.name for f in dataclasses.fields(self) if not f.metadata.get("how") and f.name not in without]
        fewer = {"fewer": ",".join(map(str, self.fewer))} if self.fewer else {}
        return {name: getattr(self, name) for name in what} | {"drafter": self.drafting.kind} | fewer

    def check(self) -> None:
        """Raise UserError with one sentence for the first thing that cannot be built."""
        self._check_numbers()
        target = self.target_config
        check_tp(target, self.tp, "target")
        self._check_drafter()
        if self.tree:
            self._check_tree()
        if self.has_draft:
            self._check_pair(target, self.draft_config)
        if self.kv_shard == "sequence":
            self._check_slices()
        longest = min(m.config.max_position_embeddings for m in self.models)
        if self.max_len > longest:
            raise UserError(f"max-len {self.max_len} is beyond the models' {longest} positions; lower it")
        self._check_checkpoints()
        if self.checkpoint and self.drafting.of_kind.decoder:
            same_tokenizer(Path(self.checkpoint), Path(self.draft_checkpoint))

    def _check_checkpoints(self) -> None:
        """Refuse a folder of weights that are another model's."""
        for model in self.models:
            if not model.checkpoint:
                continue
            kind = "" if model.role == "target" else self.drafting.kind
            if load_draft(kind, model.checkpoint, self.target_config) != model.config:
                raise UserError(
                    f"{model.checkpoint}/config.json describes another model than the one to build; "
                    f"give the same folder as the model: --{model.role} {model.name}"
                )

    def _check_drafter(self) -> None:
        kind, most = self.drafting.kind, self.drafting.of_kind.limit
        given = [f for f in _OF_DRAFT if getattr(self, f) != BuildSpec.__dataclass_fields__[f].default]
        if given and not self.has_draft:
            flags = ", ".join("--" + f.replace("_", "-") for f in given)
            why = f"the drafter {kind} has no model" if self.k else "k is 0, which builds the target alone"
            raise UserError(f"{why}, and {flags} was given; leave it out{'' if self.k else ', or raise k'}")
        if self.separate and not self.has_draft:
            why = f"the drafter {kind} has no graph of its own, its steps are the host's already"
            raise UserError(f"separate was given and {why if self.k else 'k is 0, without drafts'}; leave it out")
        if (self.k > 0) != (kind != "none"):
            raise UserError(f"k is {self.k} and the drafter {kind}; k 0 goes with none, and none with k 0")
        if self.k > (most or self.k):
            raise UserError(f"k is {self.k}; the drafter {kind} drafts at most {most} in a step, lower k")
        if kind == "parallel" and not 0 <= _whole(self.drafting.mask_id) < self.draft_config.vocab_size:
            raise UserError(
                f"the drafter is parallel and {self.draft} has {self.drafting.mask_id!r} as pard_token; give the "
                "folder of a checkpoint whose config.json has the id of its mask token there, or --drafter chain"
            )

    def _check_tree(self) -> None:
        try:
            tree = parse_tree(self.tree)
        except ValueError as error:
            raise UserError(f"tree {self.tree!r} cannot be built: {error}; give the parent of each row") from error
        kind = self.drafting.kind
        if clause := self.drafting.of_kind.refusal(tree.leaves_only):
            raise UserError(f"the drafter {kind} {clause}; leave --tree out, or give a different one")
        if tree.k != self.k:
            raise UserError(f"the tree is {tree.k} deep and k is {self.k}; give --k {tree.k}")
        sequences = self.batch * self.copies
        if self.kernels != "reference" and (sequences > SEQUENCES or sequences * self.rows > ROWS):
            raise UserError(
                f"the tree's {self.copies} paths of {self.rows} rows are {sequences} sequences and "
                f"{sequences * self.rows} rows with --batch {self.batch}, kernels {self.kernels} take {SEQUENCES} and "
                f"{ROWS}; lower --batch, or give a smaller tree"
            )
        if self.structured or self.separate:
            raise UserError("a step in halves drafts a chain; leave --tree out, or --structured and --separate")
        if self.kv_shard == "sequence":
            raise UserError("a tree's rows are attended over whole caches; leave --kv-shard sequence out, or --tree")

    def _check_pair(self, target: Qwen3Config, draft: DraftConfig) -> None:
        check_tp(draft, self.draft_ranks, "draft", self.draft_head_ranks)
        if target.vocab_size != draft.vocab_size:
            raise UserError(
                f"target and draft have vocabularies of {target.vocab_size} and {draft.vocab_size} tokens; "
                "a draft must share the target's vocabulary"
            )
        if not isinstance(draft, Qwen3Config):
            self._check_heads(target, draft)
        if bool(self.checkpoint) != bool(self.draft_checkpoint):
            raise UserError("only one of --checkpoint and --draft-checkpoint was given; give both, or neither")

    def _check_heads(self, target: Qwen3Config, heads: Eagle3Config | MedusaConfig) -> None:
        if heads.target_hidden_size != target.hidden_size:
            raise UserError(
                f"{self.draft} reads states of {heads.target_hidden_size} numbers, the target's have "
                f"{target.hidden_size}; give heads that were trained for this target"
            )
        if any(tap >= target.num_hidden_layers for tap in heads.taps):
            raise UserError(
                f"{self.draft} reads what the layers {', '.join(map(str, heads.taps))} are given, the target has "
                f"{target.num_hidden_layers} layers from 0 on; give heads that were trained for this target"
            )
        if self.k > heads.most_drafts:
            raise UserError(f"k is {self.k} and {self.draft} has {heads.most_drafts} heads; lower k")

    def _check_slices(self) -> None:
        of_target, of_draft = self.parallel()
        slices = of_target.slices(self.target_config)
        if self.has_draft and self.draft_config.num_hidden_layers:
            slices = max(slices, of_draft.slices(self.draft_config))
        if slices == 1:
            raise UserError(
                f"kv-shard sequence has nothing to cut: the target's {self.target_config.num_key_value_heads} kv heads "
                f"are held once each by {self.tp} ranks; leave it out, or raise --tp"
            )
        if self.kernels != "reference":
            raise UserError(
                f"kv-shard sequence needs rows that stand outside of a rank's cache, which kernels {self.kernels} do "
                "not take; use --kernels reference"
            )
        if self.max_len % (slices * KEY_TILE):
            raise UserError(
                f"max-len {self.max_len} cannot be cut into {slices} slices of whole tiles of {KEY_TILE} positions; "
                f"use {-(-self.max_len // (slices * KEY_TILE)) * slices * KEY_TILE}"
            )

    def _check_numbers(self) -> None:
        if not 0 <= self.k <= MAX_K:
            raise UserError(f"k is {self.k}; a step drafts 1 to {MAX_K} tokens, and 0 builds the target alone")
        if self.fewer and (list(self.fewer) != sorted({*self.fewer}) or self.fewer[0] < 1 or self.fewer[-1] >= self.k):
            raise UserError(f"k is {(*self.fewer, self.k)}; a set of k is different numbers, the largest last")
        if self.tp > MAX_TP:
            raise UserError(f"tp is {self.tp}; a trn2 machine has {MAX_TP} logical cores, choose 1 to {MAX_TP}")
        if self.batch < 1:
            raise UserError(f"batch is {self.batch}; it must be at least 1")
        if self.max_len < KEY_TILE or self.max_len % KEY_TILE:
            raise UserError(
                f"max-len {self.max_len} cannot be reached by buckets, which are multiples of {KEY_TILE}; "
                f"use {max(1, -(-self.max_len // KEY_TILE)) * KEY_TILE}"
            )
        if self.rows >= self.max_len:
            raise UserError(f"k {self.k} leaves no room in max-len {self.max_len}; raise max-len")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"{name.replace('_', '-')} is {value!r}; it must be one of {', '.join(choices)}")
        if self.draft_tp not in (0, self.tp, *DRAFT_GROUPS):
            raise UserError(
                f"draft-tp is {self.draft_tp}; the draft's groups have {', '.join(map(str, DRAFT_GROUPS))} ranks, "
                "or leave it out for all ranks"
            )
        if self.draft_tp and self.tp % self.draft_tp:
            raise UserError(
                f"draft-tp {self.draft_tp} does not divide tp {self.tp}, whose ranks form the draft's groups; "
                "choose one that does"
            )


@dataclass(frozen=True)
class PartModel:
    """One model of a build: role, preset or folder, folder of its weights (or nothing), sizes, ranks, its head's."""

    role: str
    name: str
    checkpoint: str
    config: DraftConfig
    ranks: int
    head_ranks: int

    @property
    def prefix(self) -> str:
        """Before the model's parameters, caches and files of weights: its name in a Pair."""
        return f"{self.role}_model"


def _whole(value: Any) -> int:
    """A whole number as it is, and -1 for anything else that a config.json may hold."""
    return value if type(value) is int else -1


def set_of_k(text: str) -> tuple[int, tuple[int, ...]]:
    """The largest k of a text as 0,3,7, and the others but 0, which every bundle can do."""
    try:
        *fewer, largest = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no k; give a number, or a set as 0,3,7") from error
    return largest, tuple(k for k in fewer if k)


def parse(arguments: Sequence[str] | None = None) -> BuildSpec:
    """The command line as a BuildSpec; each flag is a field with its default and help."""
    parser = argparse.ArgumentParser(
        prog="python -m compile.build",
        description="Build a bundle: the fused draft and verify step of a Qwen3 pair as HLO, with weights if given.",
    )
    hints = get_type_hints(BuildSpec) | {"k": set_of_k}
    for f in dataclasses.fields(BuildSpec):
        if f.name == "fewer":
            continue
        name = "--" + f.name.replace("_", "-")
        if hints[f.name] is bool:
            parser.add_argument(name, action="store_true", help=f.metadata["help"])
        else:
            shown = f"{f.metadata['help']} (default: {f.default!r})"
            default = str(f.default) if f.name == "k" else f.default
            parser.add_argument(name, type=hints[f.name], default=default, help=shown)
    values = vars(parser.parse_args(arguments))
    values["k"], values["fewer"] = values["k"]
    return BuildSpec(**values)
