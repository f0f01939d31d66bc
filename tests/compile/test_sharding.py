"""Sharding a checkpoint of many files: the right numbers, in little memory, resumed rank by rank."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.build import build, build_and_count
from compile.build import main as build_command
from compile.bundle import cutting
from compile.bundle.shard_writer import ShardWriter
from compile.plan import make_plan
from compile.spec import BuildSpec
from model.bundle.checkpoint import Checkpoint, Piece
from model.bundle.manifest import MANIFEST, TensorSpec
from model.bundle.weights import hf_shapes, shard_file
from model.config import config_from_dict
from model.packing import Packing
from tests.compile.tiny import BASE, shard_of, spec, write_pair

ROOT = Path(__file__).resolve().parents[2]
# Qwen3-32B and 0.6B with a tenth of their widths or less; 16 query heads are padded at tp 32
TARGET = {"num_hidden_layers": 64, "num_attention_heads": 64, "tie_word_embeddings": False, "intermediate_size": 640}
DRAFT = {"num_hidden_layers": 28, "num_attention_heads": 16, "tie_word_embeddings": True, "intermediate_size": 384}
SHAPE = {"hidden_size": 128, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 4096}


def _checkpoint(folder: Path, files: int, **changes: Any) -> str:
    """A bf16 checkpoint as Hugging Face stores large ones: numbered files and an index."""
    folder.mkdir()
    raw = BASE | SHAPE | changes
    shapes = list(hf_shapes(config_from_dict(raw, "synthetic")).items())
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
        checkpoint=target,
        draft_checkpoint=draft,
        tp=2,
        max_len=128,
        out=str(folder / "out"),
    )


# runs an expression and prints by how much the process's own memory grew at most, in bytes; mapped files do not count
MEASURE = """
import sys, threading, time
from pathlib import Path
from safetensors.torch import load_file
from compile.bundle.cutting import Cutter
from compile.plan import make_plan
from compile.spec import parse
def own():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10
spec = parse(sys.argv[2:])
shards = Cutter(make_plan(spec)).files()
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
STREAMED = "[a.write(Path(spec.out + str(i))) for i, a in enumerate(shards)]"
AT_ONCE = "held = [load_file(f, device='cpu') for f in sorted(Path(spec.target).glob('*.safetensors'))]\n"
AT_ONCE += "held = [{n: t.clone() for n, t in tensors.items()} for tensors in held]"


def _growth(spec_: BuildSpec, work: str) -> int:
    flags = [
        f"--{n.replace('_', '-')}={getattr(spec_, n)}"
        for n in ("target", "draft", "checkpoint", "draft_checkpoint", "tp", "max_len", "out")
    ]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, work, *flags], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(run.stdout)


def test_memory_is_bounded_by_a_tensor_and_not_by_a_shard(large: BuildSpec) -> None:
    stored = sum(f.stat().st_size for f in Path(large.checkpoint).glob("*.safetensors"))
    bound = 16 << 20
    assert stored > 4 * bound
    # each of two shards is larger than the bound too
    assert _growth(large, STREAMED) < bound < stored / 2
    assert _growth(large, AT_ONCE) > stored / 2


@pytest.mark.parametrize("tp", [1, 32])
def test_every_number_of_many_files_arrives_where_it_belongs(large: BuildSpec, tp: int, tmp_path: Path) -> None:
    for folder, config in ((large.checkpoint, large.target_config), (large.draft_checkpoint, large.draft_config)):
        checkpoint = Checkpoint(Path(folder), config)
        source = {n: i % 251 for i, n in enumerate(hf_shapes(config))}
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        tensors = shard_of(checkpoint, tp - 1, tp, torch.bfloat16, Packing())
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
    tensors = {n: torch.zeros(s) for n, s in hf_shapes(config).items()}
    of = "model.layers.0.self_attn.{}_proj.weight"
    heads, groups = torch.arange(1.0, 17).repeat_interleave(8), torch.arange(1.0, 9).repeat_interleave(8)
    tensors[of.format("q")] += heads[:, None]
    tensors[of.format("o")] += heads
    for which in "kv":
        tensors[of.format(which)] += groups[:, None]
    tensors["model.layers.0.mlp.down_proj.weight"] += torch.arange(32.0)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, config)
    for rank in range(32):
        shard = shard_of(checkpoint, rank, 32, torch.float32, Packing())
        group, place = divmod(rank, 4)
        head = 2 * group + place + 1 if place < 2 else 0
        attention = "layers.0.self_attn."
        assert torch.equal(shard[attention + "q_proj.weight"], torch.full((8, 32), float(head)))
        assert torch.equal(shard[attention + "o_proj.weight"], torch.full((32, 8), float(head)))
        for which in "kv":
            kept = shard[attention + f"{which}_proj.weight"]
            assert torch.equal(kept, torch.full((8, 32), group + 1.0))
        assert torch.equal(shard["layers.0.mlp.down_proj.weight"], torch.full((32, 1), float(rank)))


def test_a_build_goes_on_at_the_rank_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path)
    asked: list[list[int]] = []
    real = Checkpoint.pieces
    # a pass makes two of the four shards
    weights = make_plan(spec(tmp_path, tp=4, k=0)).weight_bytes
    monkeypatch.setattr(cutting, "PASS_BYTES", 2 * weights)

    def counted(self: Checkpoint, ranks: list[int], *how: Any) -> Iterator[Piece]:
        asked.append(list(ranks))
        for piece in real(self, ranks, *how):
            yield piece
            if stopped and 2 in ranks:
                raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "pieces", counted)
    stopped = True
    with pytest.raises(KeyboardInterrupt):
        build(spec(tmp_path, tp=4, k=0))
    out = tmp_path / "bundle"
    assert not (out / MANIFEST).exists()
    kept = {p.name: p.stat().st_mtime_ns for p in (out / "weights").glob("*.safetensors")}
    assert sorted(kept) == [Path(shard_file(rank)).name for rank in (0, 1)]
    stopped, asked = False, []
    built = build_and_count(spec(tmp_path, tp=4, k=0))
    assert asked == [[2, 3]], "finished ranks are not cut again"
    assert {p.suffix for p in (out / "weights").iterdir()} == {".safetensors"}
    assert all((out / "weights" / name).stat().st_mtime_ns == time for name, time in kept.items())
    assert (built.made, built.kept) == (2 + 1, 2 + 1 + 3)


def test_a_build_says_what_it_made_and_what_it_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path)
    flags = ["--target", str(tmp_path / "target"), "--k", "0", "--tp", "1", "--max-len", "128", "--json"]
    for made, kept in ((4, 0), (0, 4)):
        build_command([*flags, "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        cost = json.loads(said.out)["cost"]
        assert (cost["made"], cost["kept"]) == (made, kept)
        assert 0 < cost["wall_seconds"] < 600
        assert 50e6 < cost["peak_bytes"] < 50e9
        assert f"{made} files made, {kept} kept; " in said.err


def test_the_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    """Beside it a file of mixed dtypes, with an odd number of bf16, which every reader must get back."""
    specs = [TensorSpec("w", (3, 1), "bfloat16"), TensorSpec("rank", (1,), "int32"), TensorSpec("n", (2,), "float32")]
    tensors = {"rank": torch.tensor([7], dtype=torch.int32), "w": torch.ones(3, 1).bfloat16(), "n": torch.rand(2)}

    def write(file: str, rows: list[tuple[str, Tensor]]) -> None:
        writer = ShardWriter(tmp_path / file, specs, {"cut": "label"})
        for name, tensor in rows:
            # in two pieces, where there are two rows
            for first, piece in enumerate(tensor.split(max(1, len(tensor) - 1))):
                writer.write(name, first * max(1, len(tensor) - 1), piece)
        writer.close()

    write("f", list(tensors.items()))
    found = load_file(tmp_path / "f")
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    for wrong in ({"w": torch.ones(3, 1)}, {"w": torch.ones(1, 3).bfloat16()}):
        with pytest.raises(AssertionError, match=r"w: torch"):
            write("g", list((tensors | wrong).items()))
    with pytest.raises(AssertionError, match=r"rank.*were announced and not written"):
        write("g", [("w", tensors["w"]), ("n", tensors["n"])])
