"""Sharding a checkpoint of many files: the right numbers, in little memory, resumed rank by rank."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import compile.build
from compile.build import build, build_and_count
from compile.build import main as build_command
from compile.bundle import cutting, sources
from compile.bundle.lanes import Lanes
from compile.bundle.shard_writer import ShardWriter
from compile.bundle.staging import record_file
from compile.spec import BuildSpec
from model.config import config_from_dict
from model.cut import Weight
from model.graph_spec import TensorSpec
from model.packing import Packing
from model.weights import shard_file
from tests.compile.tiny import BASE, shard_of, spec, write_model, write_pair
from tests.model.family import not_traced
from trnspec.bundle import checkpoint
from trnspec.bundle.checkpoint import Checkpoint, Piece
from trnspec.bundle.manifest import MANIFEST, sha256_of
from trnspec.bundle.part import checkpoint_shapes

ROOT = Path(__file__).resolve().parents[2]
# Qwen3-32B and 0.6B with a tenth of their widths or less; 16 query heads are padded at tp 32
TARGET = {"num_hidden_layers": 64, "num_attention_heads": 64, "tie_word_embeddings": False, "intermediate_size": 640}
DRAFT = {"num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True, "intermediate_size": 384}
SHAPE = {"hidden_size": 128, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 4096}


def _checkpoint(folder: Path, files: int, **changes: Any) -> str:
    """A bf16 checkpoint as Hugging Face stores large ones: numbered files and an index."""
    folder.mkdir()
    raw = BASE | SHAPE | changes
    config = config_from_dict(raw, "synthetic")
    shapes = list(checkpoint_shapes(config).items())
    weight_map, total = {}, 0
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        tensors = {
            n: torch.full(s, i % 251, dtype=torch.bfloat16) for i, (n, s) in enumerate(shapes) if i % files == number
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> BuildSpec:
    folder = tmp_path_factory.mktemp("large")
    target, draft = _checkpoint(folder / "target", 17, **TARGET), _checkpoint(folder / "draft", 3, **DRAFT)
    return BuildSpec(
        target=target,
        draft=draft,
        tp=2,
        max_len=128,
        out=str(folder / "out"),
    )


# runs an expression and prints by how much the process's own memory grew at most, in bytes; mapped files do not count
MEASURE = """
import sys, threading, time
from pathlib import Path
from safetensors.torch import load_file
from compile.bundle import lanes
from compile.bundle.cutting import Cutter
from compile.spec import parse
from trnspec.bundle.plan import make_plan
lanes.AHEAD_BYTES = 1 << 20
def own():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10
spec = parse(sys.argv[2:])
Path(spec.out, "weights").mkdir(parents=True, exist_ok=True)
shards = Cutter(make_plan(spec.bundle), spec.checkpoints, Path(spec.out + ".sources")).files()
load_file(next(Path(spec.draft).glob("*.safetensors")))
begin, peak, done = own(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, own())
watcher = threading.Thread(target=watch)
watcher.start()
exec(sys.argv[1])
done.set()
watcher.join()
print(peak - begin)
"""
STREAMED = "[a.write(Path(spec.out, 'weights') / str(i)) for i, a in enumerate(shards)]"
AT_ONCE = "held = [load_file(f, device='cpu') for f in sorted(Path(spec.target).glob('*.safetensors'))]\n"
AT_ONCE += "held = [{n: t.clone() for n, t in tensors.items()} for tensors in held]"


def _growth(spec_: BuildSpec, work: str) -> int:
    flags = [f"--{n.replace('_', '-')}={getattr(spec_, n)}" for n in ("target", "draft", "tp", "max_len", "out")]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, work, *flags], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def test_memory_is_bounded_by_a_tensor_and_not_by_a_shard(large: BuildSpec) -> None:
    stored = sum(f.stat().st_size for f in Path(large.target).glob("*.safetensors"))
    bound = 16 << 20
    assert stored > 4 * bound
    # each of two shards is larger than the bound too
    assert _growth(large, STREAMED) < bound < stored / 2
    assert _growth(large, AT_ONCE) > stored / 2


@pytest.mark.parametrize("tp", [1, 32])
def test_every_number_of_many_files_arrives_where_it_belongs(large: BuildSpec, tp: int, tmp_path: Path) -> None:
    for folder, config in ((large.target, large.bundle.target_config), (large.draft, large.bundle.draft_config)):
        opened = Checkpoint(Path(folder), config)
        source = {n: i % 251 for i, n in enumerate(checkpoint_shapes(config))}
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        tensors = shard_of(opened, tp - 1, tp, torch.bfloat16, Packing())
        assert float(tensors["lm_head.weight"].float().mean()) == source[head]
        assert list(tensors["lm_head.weight"].shape) == [4096 // tp, 128]
        assert list(tensors["embed_tokens.weight"].shape) == [4096, 128 // tp]
        last = f"layers.{config.num_hidden_layers - 1}"
        # the last of 32 ranks holds zero heads of a draft with 16
        value = 0 if tp == 32 and config.num_attention_heads == 16 else source[f"model.{last}.self_attn.q_proj.weight"]
        assert tensors[f"{last}.self_attn.q_proj.weight"].float().unique().tolist() == [value]


def test_each_rank_of_a_padded_draft_holds_nxdi_s_heads(tmp_path: Path) -> None:
    """A draft's weights cannot change a token, so what lies where is looked at: 16 query heads on 32 ranks."""
    raw = BASE | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 32}
    config = config_from_dict(raw | {"intermediate_size": 32, "tie_word_embeddings": True}, "draft")
    tensors = {n: torch.zeros(s) for n, s in checkpoint_shapes(config).items()}
    of = "model.layers.0.self_attn.{}_proj.weight"
    heads, groups = torch.arange(1.0, 17).repeat_interleave(8), torch.arange(1.0, 9).repeat_interleave(8)
    tensors[of.format("q")] += heads[:, None]
    tensors[of.format("o")] += heads
    for which in "kv":
        tensors[of.format(which)] += groups[:, None]
    tensors["model.layers.0.mlp.down_proj.weight"] += torch.arange(32.0)
    save_file(tensors, tmp_path / "model.safetensors")
    opened = Checkpoint(tmp_path, config)
    for rank in range(32):
        shard = shard_of(opened, rank, 32, torch.float32, Packing())
        group, place = divmod(rank, 4)
        head = 2 * group + place + 1 if place < 2 else 0
        attention = "layers.0.self_attn."
        assert torch.equal(shard[attention + "q_proj.weight"], torch.full((8, 32), float(head)))
        assert torch.equal(shard[attention + "o_proj.weight"], torch.full((32, 8), float(head)))
        for which in "kv":
            kept = shard[attention + f"{which}_proj.weight"]
            assert torch.equal(kept, torch.full((8, 32), group + 1.0))
        assert torch.equal(shard["layers.0.mlp.down_proj.weight"], torch.full((32, 1), float(rank)))


@pytest.fixture(autouse=True, scope="module")
def _untraced() -> Iterator[None]:
    """Builds whose subject is their shards."""
    with mock.patch.object(compile.build, "lower_graphs", not_traced):
        yield


class Stopped(BaseException):
    """What a kill is to a test: nothing is written after it."""


def _reads(monkeypatch: pytest.MonkeyPatch, stop_at: int = 0) -> list[str]:
    """The names of the tensors that are read from here on, each time that one is; after so many, an end."""
    names: list[str] = []
    real = Checkpoint._rows

    def rows(self: Checkpoint, name: str, *how: Any) -> Iterator[Tensor]:
        names.append(name)
        if len(names) == stop_at:
            raise Stopped
        yield from real(self, name, *how)

    monkeypatch.setattr(Checkpoint, "_rows", rows)
    return names


def _stopped(monkeypatch: pytest.MonkeyPatch, of: BuildSpec, reads: int) -> None:
    with monkeypatch.context() as patch:
        _reads(patch, reads)
        with pytest.raises(Stopped):
            build(of)


def _digests(out: Path) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in json.loads((out / MANIFEST).read_text())["files"].items()}


def test_a_build_goes_on_in_the_middle_of_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed weights, which are made of several tensors; plain ones: below."""
    write_pair(tmp_path)
    how = {"tp": 2, "k": 1, "kernels": "nki"}
    monkeypatch.setattr(cutting, "PART_BYTES", 1)
    with monkeypatch.context() as patch:
        whole = _reads(patch)
        build(spec(tmp_path, "whole", **how))
    stop = len(whole) - 10
    _stopped(monkeypatch, spec(tmp_path, **how), stop)
    out = tmp_path / "bundle"
    assert not (out / MANIFEST).exists()
    cut = out / f"{shard_file(1)}.cut"
    assert cut.stat().st_size > (tmp_path / "whole" / shard_file(1)).stat().st_size / 2
    with monkeypatch.context() as patch:
        again = _reads(patch)
        build(spec(tmp_path, **how))
    # what was not noted is read again: at most what one weight is made of
    assert len(whole) - stop < len(again) <= len(whole) - stop + 6
    assert again == whole[-len(again) :]
    assert _digests(out) == _digests(tmp_path / "whole")
    assert {p.suffix for p in (out / "weights").iterdir()} == {".safetensors"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of an undisturbed build of the pair's target on two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    write_pair(folder)
    return _digests(build(spec(folder, tp=2, k=0)))


@pytest.mark.parametrize("fault", ["flipped", "longer", "shorter", "missing", "garbage"])
def test_a_part_that_is_not_what_was_noted_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, str], fault: str
) -> None:
    write_pair(tmp_path)
    monkeypatch.setattr(cutting, "PART_BYTES", 1)
    _stopped(monkeypatch, spec(tmp_path, tp=2, k=0), 20)
    cut = tmp_path / "bundle" / f"{shard_file(0)}.cut"
    content = cut.read_bytes()
    damaged = {
        "flipped": content[:-9] + bytes([content[-9] ^ 4]) + content[-8:],
        "longer": content + b"x" * 5000,
        "shorter": content[:-9],
    }.get(fault, content)
    cut.write_bytes(damaged)
    if fault == "missing":
        cut.unlink()
    if fault == "garbage":
        record_file(tmp_path / "bundle", f"{shard_file(0)}.cut").write_text("[" * 5, encoding="utf-8")
    with monkeypatch.context() as patch:
        again = _reads(patch)
        build(spec(tmp_path, tp=2, k=0))
    # bytes behind a noted part are what the next one would have written
    assert ("model.embed_tokens.weight" in again) == (fault != "longer")
    assert _digests(tmp_path / "bundle") == whole


def test_finished_shards_are_kept_and_a_lost_one_is_cut_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path)
    out = build(spec(tmp_path, tp=4, k=0))
    before, kept = _digests(out), {rank: (out / shard_file(rank)).stat().st_ino for rank in (0, 1, 3)}
    (out / shard_file(2)).unlink()
    asked = set[int]()
    real = Checkpoint.pieces

    def pieces(self: Checkpoint, weight: Weight, ranks: list[int], *how: Any) -> Iterator[Piece]:
        asked.update(ranks)
        return real(self, weight, ranks, *how)

    monkeypatch.setattr(Checkpoint, "pieces", pieces)
    built = build_and_count(spec(tmp_path, tp=4, k=0))
    assert asked == {2}
    assert (built.made, built.kept) == (1, len(before) - 1)
    assert {rank: (out / shard_file(rank)).stat().st_ino for rank in kept} == kept
    assert _digests(out) == before


def test_every_tensor_is_read_once_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path)
    config = spec(tmp_path).bundle.target_config
    total = sum(math.prod(shape) * 4 for shape in checkpoint_shapes(config).values())
    read: list[int] = []
    real = checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", lambda file, at, into: read.append(len(into)) or real(file, at, into))
    # four ranks share two kv heads
    build(spec(tmp_path, tp=4, k=0))
    assert sum(read) == total


def test_a_copy_of_a_checkpoint_is_the_same_checkpoint(tmp_path: Path) -> None:
    """Whatever its times; a different content is cut anew."""
    write_pair(tmp_path)
    out = build(spec(tmp_path, tp=2, k=0))
    before = {rank: (out / shard_file(rank)).stat().st_ino for rank in range(2)}
    copy = Path(shutil.copytree(tmp_path / "target", tmp_path / "elsewhere/target"))
    os.utime(copy / "model.safetensors", ns=(0, 0))
    again = {"target": str(copy), "tp": 2, "k": 0}
    assert build_and_count(spec(tmp_path, **again)).made == 0
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    os.utime(copy / "model.safetensors", ns=(0, 0))
    assert build_and_count(spec(tmp_path, **again)).made == 2
    assert all((out / shard_file(rank)).stat().st_ino != inode for rank, inode in before.items())


def test_a_checkpoint_that_did_not_change_is_not_read_to_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path)
    read: list[Path] = []
    real = sources.sha256_of
    monkeypatch.setattr(sources, "sha256_of", lambda file: read.append(file) or real(file))
    for k in (2, 1, 1):
        # the second build takes the place of the first
        build(spec(tmp_path, k=k, batch=1))
    assert sorted(file.parent.name for file in read) == ["draft", "target"]


def test_a_build_says_what_it_made_and_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "target", 1, weights=False)
    flags = ["--target", str(tmp_path / "target"), "--k", "0", "--tp", "1", "--max-len", "128", "--json"]
    for made, kept in ((14, 0), (0, 14)):
        build_command([*flags, "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        cost = json.loads(said.out)["cost"]
        assert (cost["made"], cost["kept"]) == (made, kept)
        assert 0 < cost["wall_seconds"] < 600
        assert 50e6 < cost["peak_bytes"] < 50e9
        assert f"{made} files made, {kept} kept; " in said.err


def test_the_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    """Beside it a file of mixed dtypes, with an odd number of bf16, which every reader must get back."""
    specs = [TensorSpec("rank", (1,), "int32"), TensorSpec("n", (2,), "float32"), TensorSpec("w", (3, 1), "bfloat16")]
    listed = {"rank": ("I32", [1], [0, 4]), "n": ("F32", [2], [4, 12]), "w": ("BF16", [3, 1], [12, 18])}
    text = json.dumps({n: dict(zip(("dtype", "shape", "data_offsets"), v, strict=True)) for n, v in listed.items()})
    header = len(text).to_bytes(8, "little") + text.encode()
    tensors = {"rank": torch.tensor([7], dtype=torch.int32), "n": torch.rand(2), "w": torch.ones(3, 1).bfloat16()}

    def write(file: str, rows: list[tuple[str, Tensor]]) -> str:
        writer = ShardWriter(tmp_path / file, specs, header, None)
        for name, tensor in rows:
            # in two pieces, where there are two rows
            for piece in tensor.split(max(1, len(tensor) - 1)):
                writer.write(name, piece)
        digest = writer.finish()
        writer.close()
        return digest

    assert write("f", list(tensors.items())) == sha256_of(tmp_path / "f")
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    for wrong in ({"w": torch.ones(3, 1)}, {"w": torch.ones(1, 3).bfloat16()}, {"w": torch.ones(4, 1).bfloat16()}):
        with pytest.raises(AssertionError, match=r"w: torch"):
            write("g", list((tensors | wrong).items()))
    with pytest.raises(AssertionError, match=r"w: torch"):
        write("g", [("rank", tensors["rank"]), ("w", tensors["w"]), ("n", tensors["n"])])
    with pytest.raises(AssertionError, match=r"w.*were announced and not written"):
        write("g", [("rank", tensors["rank"]), ("n", tensors["n"])])


def test_an_error_of_a_lane_comes_to_who_waits() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    done: list[int] = []
    with Lanes() as lanes:
        for i in range(50):
            lanes.give(3, 1, lambda i=i: done.append(i))  # type: ignore[misc]
        lanes.drain()
        assert done == list(range(50)), "one lane keeps the order"
        lanes.give(0, 1, fail)
        with pytest.raises(OSError, match="No space left"):
            lanes.drain()
