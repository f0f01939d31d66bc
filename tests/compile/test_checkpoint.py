"""Checkpoints: what is refused, and the right numbers on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile.bundle.cutting import Cutter
from compile.spec import BuildSpec
from model.config import config_from_dict
from model.errors import UserError
from model.nki.fused_layer import PACKED_ATTENTION, PACKED_MLP
from model.weights import Packing, shard_file
from nki_kernels.layer import pack_weights
from tests.compile.tiny import BASE, shard_of, spec, write_model, write_pair
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.manifest import sha256_of
from trnspec.bundle.part import checkpoint_shapes
from trnspec.bundle.plan import make_plan

# heads of Qwen3-32B and 0.6B; 16 query heads are padded at tp 32
TARGET = {"num_hidden_layers": 24, "num_attention_heads": 64, "tie_word_embeddings": False, "intermediate_size": 640}
DRAFT = {"num_hidden_layers": 10, "num_attention_heads": 16, "tie_word_embeddings": True, "intermediate_size": 384}
SHAPE = {"hidden_size": 128, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 4096}
NAME = "model.layers.1.mlp.up_proj.weight"
INDICES = {
    "index of nothing": "{}", "index that is no JSON": "{", "index of a list": '{"weight_map": ["a"]}',
    "index of a number": '{"weight_map": {"a": 7}}', "index of a path": '{"weight_map": {"a": "../b"}}',
    "index of a lost file": '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}',
}  # fmt: skip
# what becomes of one weight, and what a sentence says
CHANGED: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: None, f"lacks {NAME}"),
    "of another shape": (lambda t: t[:3].contiguous(), f"{NAME} is (3, 32)"),
    "NaN": (lambda t: t.index_fill(1, torch.tensor([1]), float("nan")), f"{NAME} in "),
    "beyond fp32": (lambda t: t.double() * 1e300, f"{NAME} in "),
    "float8": (
        lambda t: t.to(torch.float8_e4m3fn),
        f"{NAME} is F8_E4M3; give one in bf16, fp16 or fp32, not quantized",
    ),
    "int8": (lambda t: t.to(torch.int8), f"{NAME} is I8"),
    "int32": (lambda t: t.to(torch.int32), f"{NAME} is I32"),
    "bool": (lambda t: t > 0, f"{NAME} is BOOL"),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with the tiny pair."""
    write_pair(tmp_path)
    return tmp_path


def _refused(base: Path, said: str) -> None:
    with pytest.raises(UserError) as caught:
        shard_of(Checkpoint(base / "target", spec(base).bundle.target_config), 0, 1, torch.float32, Packing())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_weight_is_refused(base: Path, case: str) -> None:
    file, (change, said) = base / "target" / "model.safetensors", CHANGED[case]
    tensors = load_file(file)
    changed = change(tensors.pop(NAME))
    save_file(tensors | ({} if changed is None else {NAME: changed}), file)
    _refused(base, said)


@pytest.mark.parametrize("case", ["extra", "truncated", "garbage", "absent", "twice", *INDICES])
def test_damaged_files_are_refused(base: Path, case: str) -> None:
    folder = base / "target"
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    if case == "extra":
        save_file(tensors | {"model.layers.7.surprise": torch.zeros(1)}, file)
    elif case == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif case == "garbage":
        file.write_bytes(b"\xff" * 200)
    elif case == "absent":
        file.unlink()
    elif case == "twice":
        save_file({NAME: tensors[NAME] + 1}, folder / "other.safetensors")
        index = {"a": "model.safetensors", "b": "other.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    else:
        (folder / "model.safetensors.index.json").write_text(INDICES[case], encoding="utf-8")
    _refused(
        base, {"extra": "has unknown model.layers.7.surprise", "twice": f"has {NAME} in two files"}.get(case, "model")
    )


def _write(folder: Path, files: int, **changes: Any) -> str:
    """A bf16 checkpoint as Hugging Face stores large ones: numbered files and an index."""
    folder.mkdir()
    raw = BASE | SHAPE | changes
    shapes = list(checkpoint_shapes(config_from_dict(raw, "synthetic")).items())
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        tensors = {
            n: torch.full(s, i % 251, dtype=torch.bfloat16) for i, (n, s) in enumerate(shapes) if i % files == number
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> BuildSpec:
    folder = tmp_path_factory.mktemp("large")
    target, draft = _write(folder / "target", 17, **TARGET), _write(folder / "draft", 3, **DRAFT)
    return BuildSpec(target=target, draft=draft, tp=2, max_len=128, out=str(folder / "out"))


@pytest.mark.parametrize("tp", [1, 32])
def test_every_number_of_many_files_arrives_where_it_belongs(large: BuildSpec, tp: int) -> None:
    for folder, config in ((large.target, large.bundle.target_config), (large.draft, large.bundle.draft_config)):
        source = {n: i % 251 for i, n in enumerate(checkpoint_shapes(config))}
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        tensors = shard_of(Checkpoint(Path(folder), config), tp - 1, tp, torch.bfloat16, Packing())
        assert float(tensors["lm_head.weight"].float().mean()) == source[head]
        assert list(tensors["lm_head.weight"].shape) == [4096 // tp, 128]
        assert list(tensors["embed_tokens.weight"].shape) == [4096, 128 // tp]
        last = f"layers.{config.num_hidden_layers - 1}"
        # the last of 32 ranks has zero heads of a draft with 16
        value = 0 if tp == 32 and config.num_attention_heads == 16 else source[f"model.{last}.self_attn.q_proj.weight"]
        assert tensors[f"{last}.self_attn.q_proj.weight"].float().unique().tolist() == [value]


def test_each_rank_of_a_padded_draft_has_its_heads(tmp_path: Path) -> None:
    """A draft's weights cannot change a token, so what is where is looked at: 16 query heads on 32 ranks."""
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
            assert torch.equal(shard[attention + f"{which}_proj.weight"], torch.full((8, 32), group + 1.0))
        assert torch.equal(shard["layers.0.mlp.down_proj.weight"], torch.full((32, 1), float(rank)))


def test_packed_weights_are_those_of_the_parts(tmp_path: Path) -> None:
    """The table packs as the kernels' own functions do, each rank its part."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(tmp_path / "target", 1, head_dim=128, **sizes)
    opened = Checkpoint(tmp_path / "target", config_from_dict(BASE | sizes | {"head_dim": 128, "num_hidden_layers": 2,
                        "tie_word_embeddings": False}, "packed"))  # fmt: skip
    for rank in range(2):
        plain = shard_of(opened, rank, 2, torch.float32, Packing())
        packed = shard_of(opened, rank, 2, torch.float32, Packing(PACKED_ATTENTION, PACKED_MLP))
        for layer in ("layers.0.", "layers.1."):
            q, k, v, o = (plain[f"{layer}self_attn.{n}_proj.weight"] for n in "qkvo")
            gate, up, down = (plain[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            expected = {
                "self_attn.qkv_packed": pack_weights.pack_qkv(q, k, v, 128),
                "self_attn.out_packed": pack_weights.pack_out(o, 128),
                "mlp.gate_up_packed": pack_weights.pack_gate_up(gate, up),
                "mlp.down_packed": pack_weights.pack(down),
            }
            assert all(torch.equal(packed[layer + name], tensor) for name, tensor in expected.items())
        assert not [name for name in packed if "_proj" in name]


def test_a_rank_s_file_has_its_weights(base: Path) -> None:
    """Four ranks share two kv heads; the digests are those of the files."""
    of_pair = spec(base, tp=4)
    (base / "weights").mkdir()
    cutter = Cutter(make_plan(of_pair.bundle), of_pair.checkpoints)
    digests = cutter.write({rank: base / shard_file(rank) for rank in range(4)})
    for rank, digest in digests.items():
        assert sha256_of(base / shard_file(rank)) == digest
        stored = load_file(base / shard_file(rank))
        assert stored["target_model.rank"].tolist() == [rank]
        expected = shard_of(cutter._checkpoints["target"], rank, 4, torch.float32, Packing())
        assert all(torch.equal(stored[f"target_model.{name}"], tensor) for name, tensor in expected.items())
