"""What a manifest must hold: types and ranges, before any number in it is used, whoever wrote it.

Agreement of the fields with each other is `model/bundle/agreement.py`'s. Neither imports torch: a store reads
manifests of strangers, many at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from model.drafting import KINDS, Kind, recorded
from model.errors import UserError

# a trn2.48xlarge: 16 devices of 8 cores, two cores a logical one
MAX_TP = 64
# drafts a step: the kernels take 32 rows
MAX_K = 31
# the largest manifest that is read: one of 64 layers, 32 ranks and 4 buckets has 5 MB
MANIFEST_BYTES = 64 << 20

# a prompt's graph, a fused step's, a step's of the target alone, and the halves of a step: as NxDI names them, but for
# the first half, which is an application of its own there
TAGS = (
    "context_encoding_model", "fused_speculation_model", "token_generation_model", "drafting_model",
    "speculation_model",
)  # fmt: skip
PREFILL, FUSED, DECODE, DRAFT, VERIFY = TAGS
# ends the tag of a step's graph for sequences of which none filters
UNFILTERED = "_unfiltered"
# ends the tag of a graph that takes a mask of allowed ids and returns scores, whatever its rows filter
MASKED = "_masked"
_TAG = (
    rf"{PREFILL}({MASKED})?|({FUSED}(_k[1-9][0-9]?)?|{DECODE})({UNFILTERED})?({MASKED})?"
    rf"|({DRAFT}|{VERIFY})(_k[1-9][0-9]?)?(({UNFILTERED})?{MASKED})?"
)

Check = Callable[[Any, str], None]


def step_tag(k: int, largest: int, part: str = FUSED) -> str:
    """The tag of a step of k drafts, or of a half of it: of a bundle's largest k, NxDI's; of 0, the target's alone."""
    if not k:
        return DECODE
    return part if k == largest else f"{part}_k{k}"


def roles_in(tag: str, kind: Kind) -> tuple[str, ...]:
    """Whose weights and caches a graph of a bundle with this kind of drafter has."""
    part = kind_of(tag)
    drafts = kind.has_model and (part in (PREFILL, FUSED, DRAFT) or (part == VERIFY and kind.keeps > 0))
    return (*(["target"] if part != DRAFT else []), *(["draft"] if drafts else []))


def kind_of(tag: str) -> str:
    """The one of `TAGS` that a graph is of: its tag without k and ending."""
    return next(kind for kind in TAGS if tag.startswith(kind))


class Wrong(ValueError):
    """One clause: which field is what, and what was expected."""


def _expect(holds: bool, value: Any, at: str, expected: str) -> None:
    if not holds:
        raise Wrong(f"{at} is {shown(value)}, expected {expected}")


def shown(value: Any) -> str:
    """A value from outside as a few printable characters."""
    text = ascii(value) if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:50]}..."


def whole(low: int, high: int) -> Check:
    """A whole number in a range; True and 7.0 are none."""

    def check(value: Any, at: str) -> None:
        _expect(type(value) is int and low <= value <= high, value, at, f"a whole number from {low} to {high}")

    return check


def number(low: float, high: float) -> Check:
    """A number in a range, and not NaN."""

    def check(value: Any, at: str) -> None:
        _expect(type(value) in (int, float) and low <= value <= high, value, at, f"a number from {low:g} to {high:g}")

    return check


def text(pattern: str, expected: str) -> Check:
    """A string that a pattern fits from end to end."""
    fits = re.compile(pattern).fullmatch

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, str) and fits(value) is not None, value, at, expected)

    return check


def one_of(*choices: Any) -> Check:
    """One of a few values, of the same type."""

    def check(value: Any, at: str) -> None:
        same = any(type(value) is type(choice) and value == choice for choice in choices)
        _expect(same, value, at, "one of " + ", ".join(map(str, choices)) if len(choices) > 1 else repr(choices[0]))

    return check


def optional(inner: Check) -> Check:
    """Null, or what the inner check takes."""
    return lambda value, at: None if value is None else inner(value, at)


def listed(inner: Check, least: int, most: int) -> Check:
    """A list of a bounded length."""

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, list) and least <= len(value) <= most, value, at, f"a list of {least} to {most}")
        for index, item in enumerate(value):
            inner(item, f"{at}[{index}]")

    return check


def named(inner: Check, most: int, key: Check | None = None) -> Check:
    """An object with free keys."""

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, dict) and len(value) <= most, value, at, f"an object of at most {most} entries")
        for name, item in value.items():
            if key:
                key(name, f"a name in {at}")
            inner(item, f"{at}.{shown(name)[1:-1]}")

    return check


def record(fields: dict[str, Check], maybe: dict[str, Check] | None = None) -> Check:
    """An object with these fields, some of them only maybe; other fields are nobody's business."""

    def check(value: Any, at: str) -> None:
        _expect(isinstance(value, dict), value, at, "an object")
        prefix = f"{at}." if at else ""
        for name in fields:
            if name not in value:
                raise Wrong(f"{prefix}{name} is missing")
        for name, inner in (fields | (maybe or {})).items():
            if name in value:
                inner(value[name], prefix + name)

    return check


def _tensor(value: Any, at: str) -> None:
    _expect(isinstance(value, list) and len(value) == 3, value, at, "a name, a shape and a dtype")
    for inner, item in zip((_NAME, listed(whole(0, 1 << 40), 0, 8), _TENSOR_DTYPE), value, strict=True):
        inner(item, at)


# names go into messages and addresses: what a terminal takes for more than a letter is no part of one
_PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
_NAME = text(_PRINTABLE + "{1,200}", "a name")
_WORD = text(_PRINTABLE + "{0,4096}", "a line of text")
_SHA256 = text(r"[0-9a-f]{64}", "a sha256")
_TENSOR_DTYPE = one_of("float32", "int32", "bfloat16")
_DTYPE = one_of("bf16", "fp32")
_FLAG = one_of(True, False)
_ID = whole(0, 1 << 31)
_TENSORS = listed(_tensor, 0, 20_000)

CONFIG = record({
    "hidden_size": whole(1, 1 << 17), "intermediate_size": whole(1, 1 << 20), "num_hidden_layers": whole(1, 512),
    "num_attention_heads": whole(1, 1024), "num_key_value_heads": whole(1, 1024), "tie_word_embeddings": _FLAG,
    "head_dim": whole(2, 1024), "vocab_size": whole(1, 1 << 22), "rope_theta": number(1, 1e12),
    "rms_norm_eps": number(1e-12, 1), "max_position_embeddings": whole(1, 1 << 24), "bos_token_id": optional(_ID),
    "eos_token_ids": listed(_ID, 0, 64),
})  # fmt: skip
_EAGLE3 = record({
    "hidden_size": whole(1, 1 << 17), "intermediate_size": whole(1, 1 << 20), "num_attention_heads": whole(1, 1024),
    "num_key_value_heads": whole(1, 1024), "head_dim": whole(2, 1024), "vocab_size": whole(1, 1 << 22),
    "draft_vocab_size": whole(1, 1 << 22), "target_hidden_size": whole(1, 1 << 17),
    "taps": listed(whole(0, 512), 1, 16), "norm_before_residual": _FLAG, "rope_theta": number(1, 1e12),
    "rms_norm_eps": number(1e-12, 1), "max_position_embeddings": whole(1, 1 << 24),
})  # fmt: skip
_MEDUSA = record({
    "hidden_size": whole(1, 1 << 17), "vocab_size": whole(1, 1 << 22), "heads": whole(1, MAX_K), "layers": whole(1, 64),
    "shared_head": _FLAG,
})  # fmt: skip
# a draft's configuration by the kind of its drafter
DRAFT_CONFIGS = {"chain": CONFIG, "parallel": CONFIG, "eagle3": _EAGLE3, "medusa": _MEDUSA}
_GRAPH = record({
    "tag": text(_TAG, "the tag of a graph"),
    "bucket": whole(1, 1 << 24), "k": whole(0, MAX_K), "file": _NAME, "weights": _TENSORS, "inputs": _TENSORS,
    "state": _TENSORS, "outputs": _TENSORS, "collectives": named(whole(0, 1 << 30), 16, _NAME),
})  # fmt: skip
_PACKED = named(record({"attention": _FLAG, "mlp": _FLAG}), 2, one_of("target_model", "draft_model"))
_WEIGHTS = record({
    "ranks": whole(1, MAX_TP), "dtype": _DTYPE, "fused_qkv": _FLAG, "transposed": _FLAG,
    "draft_ranks": whole(0, MAX_TP), "packed": _PACKED,
}, {"draft_head_ranks": whole(1, MAX_TP)})  # fmt: skip
_MODELS = record({
    "target": record({"name": _NAME, "config": CONFIG}), "draft": record({"name": _NAME}),
})  # fmt: skip
_DRAFTER = record({"kind": one_of(*KINDS)}, {"mask_id": _ID})
_SCALAR: Check = lambda value, at: _expect(type(value) in (str, int, bool), value, at, "a flag's value")  # noqa: E731
_COMPILER = record(
    {"lnc": one_of(1, 2)}, {"target": _NAME, "flags": named(_WORD, 8, _NAME), "versions": named(_NAME, 100, _NAME)}
)
_MANIFEST = record(
    {
        "complete": one_of(True), "spec": named(_SCALAR, 40, _NAME), "models": _MODELS, "config_hash": _SHA256,
        "k": whole(0, MAX_K), "rows": whole(1, MAX_K + 1), "speculation_length": whole(0, MAX_K + 1),
        "tp": whole(1, MAX_TP), "draft_tp": whole(0, MAX_TP), "kv_shard": one_of("heads", "sequence"),
        "batch": whole(1, 4096), "max_len": whole(1, 1 << 24), "buckets": listed(whole(1, 1 << 24), 1, 64),
        "dtype": _DTYPE, "graphs": listed(_GRAPH, 1, 1024), "weights": optional(_WEIGHTS),
        "bytes_per_rank": record({"weights": whole(0, 1 << 50), "caches": whole(0, 1 << 50)}),
        "toolchain": one_of("cpu", "compiler", "full"), "neff": one_of("none", "neff", "model.pt"),
        "versions": named(_NAME, 100, _NAME), "commit": optional(_NAME),
        "files": named(record({"sha256": _SHA256, "bytes": whole(0, 1 << 50)}, {"recipe": _SHA256}), 10_000),
    },
    {
        "ks": listed(whole(0, MAX_K), 1, MAX_K + 1), "compiler": _COMPILER, "drafter": _DRAFTER,
        "executables": record({"platform": _NAME, "version": _NAME, "interface": _NAME}),
    },
)  # fmt: skip
_FILE_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}/){0,3}[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}").fullmatch


def check_types(manifest: Any) -> None:
    """Raise Wrong for the first field of a manifest that has another type or range than a bundle's can have."""
    _MANIFEST(manifest, "")
    draft, kind = manifest["models"]["draft"], recorded(manifest).kind
    if "config" in draft and kind in DRAFT_CONFIGS:
        DRAFT_CONFIGS[kind](draft["config"], "models.draft.config")


def check_names(files: dict[str, Any], where: str, own: str) -> None:
    """Raise UserError for the name of a file that could leave the folder, or stand for a different file there.

    `own` is the manifest's own name.
    """
    folders = {parent for name in files for parent in _parents(name)}
    for name in files:
        plain = _FILE_NAME(name) and not name.endswith((".part", ".tmp"))
        if not plain or name.casefold() == own or name in folders:
            raise UserError(f"{where}: the manifest names {shown(name)}, no file of a bundle; do not trust it")
    if len({name.casefold() for name in files}) < len(files):
        raise UserError(f"{where}: the manifest names two files that differ in case alone; do not trust it")


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
