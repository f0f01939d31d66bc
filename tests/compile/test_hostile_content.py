"""What a hostile author could write into a bundle, with its digests made right: the same sentence at every door."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile.build import build
from compile.doctor import findings
from model.errors import UserError
from model.nki.launches import TARGET
from model.weights import shard_file
from tests.compile.tiny import relist, spec
from trnspec.bundle import hlo
from trnspec.bundle.opening import read_bundle
from trnspec.engine.text import TOKENIZER
from trnspec.llm import LLM

SHARD = shard_file(0)


@pytest.fixture(scope="module")
def base(base: Path) -> Path:
    """A folder with the tiny pair, its bundle, and one with kernels."""
    build(spec(base))
    build(spec(base, "kernels", batch=1, k=1, kernels="nki"))
    return base


def _ids(bundle: Path) -> tuple[int, ...]:
    with LLM(bundle) as llm:
        return llm.generate([5, 9, 2], max_new_tokens=6).ids


def _refusals(bundle: Path) -> tuple[str, str]:
    """What the doctor finds first, and the sentence that whoever generates gets."""
    with pytest.raises(UserError) as refused:
        _ids(bundle)
    assert str(refused.value).isprintable()
    return next(iter(findings(read_bundle(bundle))), "nothing"), str(refused.value)


def _refused(bundle: Path, said: str) -> None:
    for sentence in _refusals(bundle):
        assert re.search(said, sentence), sentence


def _edit_graphs(bundle: Path, edit: Callable[[Any], object]) -> None:
    """Edit every graph's proto, and list it anew."""
    names = [graph.file for graph in read_bundle(bundle).graphs]
    for name in names:
        module = hlo.parse((bundle / name).read_bytes())
        edit(module)
        (bundle / name).write_bytes(module.SerializeToString())
    relist(bundle, *names)


def _found(module: Any, opcode: str) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.opcode == opcode]


def _text(edit: Callable[[dict[str, Any]], object]) -> Callable[[Any], None]:
    def forged(call: Any) -> None:
        launch = json.loads(call.backend_config)
        edit(launch)
        call.backend_config = json.dumps(launch).encode()

    return forged


CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "operand": (_text(lambda t: t["operands"][0].__setitem__(0, [1 << 30])), "text has other shapes than its operands"),
    "result": (_text(lambda t: t.update(results=[[[1 << 30], "bfloat16"]])), "text has other shapes than its operands"),
    "dtype": (_text(lambda t: t["operands"][0].__setitem__(1, "float64")), "text has other shapes than its operands"),
    "changed": (_text(lambda t: t.update(changed=[999])), "kernel call whose text is no launch"),
    "no text": (lambda call: call.ClearField("backend_config"), "kernel call whose text is no launch"),
    # XLA would call it without the text
    "version": (lambda call: setattr(call, "custom_call_api_version", 1), "in a form that no build writes"),
    "tuple": (
        lambda call: setattr(call.shape, "element_type", 24 - call.shape.element_type),
        "in a form that no build",
    ),
    "target": (lambda call: setattr(call, "custom_call_target", "xla_python_cpu_callback"), "call of xla_python"),
}


@pytest.mark.parametrize("edit", CALLS)
def test_a_forged_kernel_call_never_runs(base: Path, tmp_path: Path, edit: str) -> None:
    bundle, (forged, said) = Path(shutil.copytree(base / "kernels", tmp_path / "b")), CALLS[edit]

    def edited(module: Any) -> None:
        # the first call with a result of its own: an append has none but the caches
        forged(next(c for c in _found(module, "custom-call") if json.loads(c.backend_config)["results"]))

    _edit_graphs(bundle, edited)
    _refused(bundle, said)


def test_a_graph_with_kernels_holds_calls_and_runs(base: Path) -> None:
    bundle = read_bundle(base / "kernels")
    assert all(TARGET.encode() in bundle.read(graph.file) for graph in bundle.graphs)
    assert findings(bundle) == []
    assert len(_ids(bundle.path)) == 6


def _added(number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"added_tokens": [flags | {"id": number, "content": "<x>", "special": True}]}


def _bpe(**changes: object) -> dict[str, Any]:
    return {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]} | changes}


PADDED = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "w0"}
TOKENIZERS: dict[str, str | dict[str, Any]] = {
    "no JSON": "{",
    "not UTF-8": "\udcff",
    "deep": "[" * 100_000,
    "model": {"model": {"type": "Magic"}},
    "added id": _added(2**31),
    "added id beyond 32 bits": _added(2**32),
    "vocabulary's id": {"model": {"type": "WordLevel", "vocab": {"w0": 2**32 - 1}, "unk_token": "w0"}},
    "merges of absent tokens": _bpe(merges=["a z"]),
    # the library panics, which is no Exception
    "prefix beyond a token": _bpe(continuing_subword_prefix="####"),
    # the library ends its process
    "padding without end": {"padding": PADDED | {"strategy": {"Fixed": 1 << 44}}},
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_hostile_tokenizer_is_a_sentence_at_both_doors(bundle: Path, case: str) -> None:
    text = TOKENIZERS[case]
    if isinstance(text, dict):
        text = json.dumps(json.loads((bundle / TOKENIZER).read_text(encoding="utf-8")) | text)
    (bundle / TOKENIZER).write_bytes(text.encode("utf-8", "surrogateescape"))
    relist(bundle, TOKENIZER)
    _refused(bundle, rf"{TOKENIZER} (cannot be used by the tokenizers library|has the id \d+, the model's ids are)")


def _each(opcode: str, edit: Callable[[Any], object]) -> Callable[[Any], None]:
    return lambda module: [edit(found) for found in _found(module, opcode)] and None


def _ends(number: int) -> Callable[[Any], None]:
    """Other ends of every counted loop."""

    def edit(module: Any) -> None:
        conditions = {loop.called_computation_ids[1] for loop in _found(module, "while")}
        for computation in module.computations:
            for instruction in computation.instructions if computation.id in conditions else ():
                if instruction.opcode == "constant":
                    instruction.literal.s32s[:] = [number]

    return edit


def _standing(module: Any) -> None:
    """Every counter adds 1 to what does not change."""
    bodies = {loop.called_computation_ids[0] for loop in _found(module, "while")}
    for computation in module.computations:
        if computation.id in bodies:
            items = {i.id: i for i in computation.instructions}
            for add in (i for i in items.values() if i.opcode == "add"):
                one = [i for i in add.operand_ids if items[i].opcode == "constant"]
                add.operand_ids[:] = one * 2 if one else add.operand_ids


LOOPS: dict[str, tuple[Callable[[Any], object], str]] = {
    "too many rounds": (_ends(9000), r"while of 9000 rounds|run of \d+ instructions"),
    "too long": (_ends(10**9), r"run of \d+ instructions"),
    "no counter": (_standing, "while of unknown length"),
    "no end": (_each("compare", lambda i: setattr(i, "comparison_direction", "NE")), "while of unknown length"),
    "a parameter's shape": (_each("parameter", lambda i: i.shape.dimensions.insert(0, 7)), "parameter 0 is"),
}  # fmt: skip


@pytest.mark.parametrize("edit", LOOPS)
def test_whoever_runs_a_graph_holds_it_to_the_doctor_s_contract(bundle: Path, edit: str) -> None:
    forged, said = LOOPS[edit]
    _edit_graphs(bundle, forged)
    _refused(bundle, said)


PROTOS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "garbage": lambda proto, other: bytes(range(256)) * 99,
    "nothing": lambda proto, other: b"",
    "half": lambda proto, other: proto[: len(proto) // 2],
    "a different graph": lambda proto, other: other,
}


@pytest.mark.parametrize("edit", PROTOS)
def test_a_proto_that_is_not_the_graph_is_a_sentence(bundle: Path, edit: str) -> None:
    contents = {graph.file: (bundle / graph.file).read_bytes() for graph in read_bundle(bundle).graphs}
    for (name, proto), other in zip(contents.items(), [*list(contents.values())[1:], b"\n"], strict=True):
        (bundle / name).write_bytes(PROTOS[edit](proto, other))
    relist(bundle, *contents)
    _refused(bundle, r"hlo/.*: (it|its|parameter|result) ")


def test_what_xla_refuses_is_a_sentence(bundle: Path) -> None:
    """The doctor reads no operation's own shape: XLA does, when it compiles."""
    _edit_graphs(bundle, _each("dot", lambda i: i.shape.dimensions.__setitem__(0, 7)))
    assert re.search(r"hlo/.* cannot be compiled \(", _refusals(bundle)[1])


def _shard(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Edit a shard's header."""

    def edited(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        edit(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return edited


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
CUT = "was cut for another model, rank or layout"
SHARDS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "label": (_shard(lambda h: h.update(__metadata__={"cut": "[no JSON"})), CUT),
    "rank": (lambda content: content.replace(b'"rank 0 of', b'"rank 1 of'), CUT),
    "F8": (_shard(lambda h: h["target_model.norm.weight"].update(dtype="F8_E4M3")), CUT),
    "a million tensors": (_shard(lambda h: h.update(dict.fromkeys(map(str, range(10**6)), EMPTY))), CUT),
    "long": (lambda content: content + b"\0", r"has \d+ bytes, its tensors need \d+"),
    "NaN": (lambda content: content[:-4] + np.float32("nan").tobytes(), "holds a NaN or an infinity in "),
    "Inf": (lambda content: content[:-4] + np.float32("-inf").tobytes(), "holds a NaN or an infinity in "),
}


@pytest.mark.parametrize("edit", SHARDS)
def test_a_hostile_shard_is_one_sentence(bundle: Path, edit: str) -> None:
    before = (bundle / SHARD).read_bytes()
    forged, said = SHARDS[edit]
    (bundle / SHARD).write_bytes(forged(before))
    assert (bundle / SHARD).read_bytes() != before
    relist(bundle, SHARD)
    begin = time.perf_counter()
    with pytest.raises(UserError, match=f"{SHARD} {said}"):
        LLM(bundle)
    assert time.perf_counter() - begin < 10, "reading takes a second, a parser of its header took half a minute"
    (sentence,) = findings(read_bundle(bundle))
    assert re.search(f"{SHARD} {said}", sentence)
