"""Checkpoints: what is refused, and the right numbers on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compile.bundle.cutting import Cutter, _Shard
from model.config import config_from_dict, load_config
from model.nki.fused_layer import PACKED_ATTENTION, PACKED_MLP
from model.weights import Packing, decoder_weights, shard_file
from nki_kernels.layer import pack_weights
from tests.compile.tiny import BASE, flip, refused, shard_of, spec, write_model
from trnspec.bundle.checkpoint import Checkpoint
from trnspec.bundle.manifest import sha256_of
from trnspec.bundle.part import checkpoint_shapes
from trnspec.bundle.plan import make_plan

NAME, INDEX = "model.layers.1.mlp.up_proj.weight", "model.safetensors.index.json"
NO_FILE, TWO_FILES = ", which is not a file name", {"a": "model.safetensors", "b": "other.safetensors"}


def _weight(change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], object]:
    def act(file: Path) -> None:
        tensors = load_file(file)
        changed = change(tensors.pop(NAME))
        save_file(tensors | ({} if changed is None else {NAME: changed}), file)

    return act


# what becomes of a file
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (_weight(lambda t: None), f"lacks {NAME}"),
    "of another shape": (_weight(lambda t: t[:3].contiguous()), f"{NAME} is (3, 32)"),
    "NaN": (_weight(lambda t: t.index_fill(1, torch.tensor([1]), float("nan"))), f"{NAME} in "),
    "infinity": (_weight(lambda t: t.index_fill(1, torch.tensor([1]), float("inf"))), f"{NAME} in "),
    "beyond fp32": (_weight(lambda t: t.double() * 1e300), f"{NAME} in "),
    **{kind: (_weight(lambda t, dtype=dtype: t.to(dtype)), f"{NAME} is {kind}; give one in bf16, fp16 or fp32, not")
       for kind, dtype in {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "BOOL": torch.bool
                           }.items()},
    "extra": (lambda f: save_file(load_file(f) | {"model.layers.7.surprise": torch.zeros(1)}, f),
              "has unknown model.layers.7.surprise"),
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-100]), "is truncated or corrupted"),
    "garbage": (lambda f: f.write_bytes(b"\xff" * 200), "is truncated or corrupted"),
    "twice": (lambda f: (save_file({NAME: load_file(f)[NAME] + 1}, f.with_name("other.safetensors")),
                         f.with_name(INDEX).write_text(json.dumps({"weight_map": TWO_FILES}), encoding="utf-8")),
              f"has {NAME} in two files"),
    **{f"index {text}": (lambda f, text=text: f.with_name(INDEX).write_text(text, encoding="utf-8"), message)
       for text, message in {
           "{}": NO_FILE, "{": "cannot be read as JSON", '{"weight_map": ["a"]}': NO_FILE,
           '{"weight_map": {"a": 7}}': "lists 7, which", '{"weight_map": {"a": "../b"}}': "lists '../b', which",
           '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}': "00002.safetensors does not exist"}.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(fresh: Path, case: str) -> None:
    (act, message), config = DAMAGED[case], spec(fresh).bundle.target_config
    act(fresh / "target" / "model.safetensors")
    refused(lambda: shard_of(Checkpoint(fresh / "target", config), 0, 1, torch.float32, Packing()), message)


def _renamed(change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda file: save_file({change(name): t for name, t in load_file(file).items()}, file)


def _moved(name: str) -> Callable[[Path], object]:
    return lambda file: file.rename(file.with_name(name))


def _tied(difference: float) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        config, tensors = file.with_name("config.json"), load_file(file)
        config.write_text(
            config.read_text(encoding="utf-8").replace('embeddings": false', 'embeddings": true'), "utf-8"
        )
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += difference
        save_file(tensors | {"lm_head.weight": head}, file)

    return act


# what a user may have instead of a checkpoint, and the sentence; "" for what builds
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tied head of equal numbers": (_tied(0.0), ""),
    "a tied head": (_tied(1e-3), "has lm_head.weight, which differs from the embedding"),
    "another name": (_moved("model-00001-of-00001.safetensors"), ""),
    **{name: (_moved(name), f"has its weights in {name}; only safetensors") for name in (
        "pytorch_model.bin", "consolidated.safetensors", "consolidated.00.pth", "model.gguf",
        "adapter_model.safetensors")},
    "an adapter": (lambda f: f.with_name("adapter_config.json").touch(), "is an adapter; merge it"),
    "without its head": (_renamed(lambda n: n.removeprefix("model.").replace("lm_head", "norm2")),
                         "input_layernorm.weight and a head"),
    "a longer prefix": (_renamed(lambda n: n.replace("model.", "model.language_model.")),
                        "has model.language_model.layers.0.input_layernorm.weight, expected model.layers.0"),
    "compiled": (_renamed(lambda n: f"_orig_mod.{n}"), "has _orig_mod.model.layers.0.input_layernorm.weight, expected"),
    "scales": (_renamed(lambda n: n.replace("q_proj.weight", "q_proj.weight_scale_inv")), "is quantized: it has"),
    "lora": (_renamed(lambda n: n.replace("q_proj.weight", "q_proj.lora_A.weight")), "is an adapter: it has"),
    "int8": (_weight(lambda t: t.to(torch.int8)), f"{NAME} is I8"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_no_checkpoint_is_refused_before_a_build(fresh: Path, case: str) -> None:
    act, message = FOLDERS[case]
    act(fresh / "target/model.safetensors")
    if message:
        refused(lambda: spec(fresh, k=0).check(), message)
    else:
        spec(fresh, k=0).check()


def test_a_vocabulary_that_ranks_do_not_divide_is_padded(tmp_path: Path) -> None:
    """Of 67 ids each of 32 ranks has three rows; the last nine ranks have zeros."""
    write_model(tmp_path / "target", 1, vocab_size=67, intermediate_size=64, num_key_value_heads=4)
    opened = Checkpoint(tmp_path / "target", load_config(str(tmp_path / "target")))
    tensors = load_file(tmp_path / "target/model.safetensors")
    for name, stored in (("embed_tokens.weight", "model.embed_tokens.weight"), ("lm_head.weight", "lm_head.weight")):
        weight = next(w for w in decoder_weights(opened.config, Packing()) if w.name == name)
        rows = torch.cat([*opened.shards(weight, 32, torch.float32)])
        assert torch.equal(rows, torch.cat((tensors[stored], torch.zeros(29, 32))))


def test_a_checkpoint_of_many_files_is_that_of_one(fresh: Path) -> None:
    """In bf16, as Hugging Face stores large ones: numbered files, with an index and without."""
    config, tensors = spec(fresh).bundle.target_config, load_file(fresh / "target/model.safetensors")
    (fresh / "many").mkdir()
    index = {name: f"model-{at % 3 + 1:05}-of-00003.safetensors" for at, name in enumerate(tensors)}
    for file in set(index.values()):
        part = {name: t.bfloat16() for name, t in tensors.items() if index[name] == file}
        save_file(part, fresh / "many" / file, metadata={"format": "pt"})
    (fresh / "many" / INDEX).write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    one, many = (Checkpoint(fresh / name, config) for name in ("target", "many"))
    (fresh / "many" / INDEX).unlink()
    assert Checkpoint(fresh / "many", config).files == many.files
    assert [file.name for file in many.files] == sorted(set(index.values()))
    for rank in range(2):
        expected, actual = (shard_of(c, rank, 2, torch.bfloat16, Packing()) for c in (one, many))
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in actual)
        assert torch.equal(actual["lm_head.weight"], tensors["lm_head.weight"].bfloat16().chunk(2)[rank])
    cutter = Cutter(make_plan(spec(fresh, k=0).bundle), {"target": fresh / "many"})
    before = cutter.recipes()
    flip(many.files[-1])
    assert cutter.recipes() != before, "a shard is cut again when any file changes"


def test_each_rank_of_a_padded_draft_has_its_heads(tmp_path: Path) -> None:
    """A draft's weights cannot change a token, so what is where is looked at: 16 query heads on 32 ranks."""
    raw = BASE | {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 1, "vocab_size": 32}
    config = config_from_dict(raw | {"intermediate_size": 32, "tie_word_embeddings": True}, "draft")
    tensors = {n: torch.zeros(s) for n, s in checkpoint_shapes(config).items()}
    heads, groups = torch.arange(1.0, 17).repeat_interleave(8), torch.arange(1.0, 9).repeat_interleave(8)
    numbers = {"q": heads[:, None], "o": heads, "k": groups[:, None], "v": groups[:, None]}
    for which, values in numbers.items():
        tensors[f"model.layers.0.self_attn.{which}_proj.weight"] += values
    tensors["model.layers.0.mlp.down_proj.weight"] += torch.arange(32.0)
    embedding = tensors["model.embed_tokens.weight"].copy_(torch.arange(1024.0).view(32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    opened = Checkpoint(tmp_path, config)
    for rank in range(32):
        shard = shard_of(opened, rank, 32, torch.float32, Packing())
        group, place = divmod(rank, 4)
        head = 2 * group + place + 1 if place < 2 else 0
        for which, number in (("q", head), ("o", head), ("k", group + 1), ("v", group + 1)):
            shape = (32, 8) if which == "o" else (8, 32)
            assert torch.equal(shard[f"layers.0.self_attn.{which}_proj.weight"], torch.full(shape, float(number)))
        assert torch.equal(shard["layers.0.mlp.down_proj.weight"], torch.full((32, 1), float(rank)))
        for name in ("lm_head", "embed_tokens"):
            assert torch.equal(shard[f"{name}.weight"], embedding[rank : rank + 1])


def test_packed_weights_are_those_of_the_parts(tmp_path: Path) -> None:
    """Each rank's packed weights are what the kernels' functions pack."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(tmp_path / "target", 1, head_dim=128, **sizes)
    opened = Checkpoint(tmp_path / "target", load_config(str(tmp_path / "target")))
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


def test_a_rank_s_file_has_its_weights(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks share two kv heads; the digests are those of the files, however long a write takes."""
    write = _Shard.write
    monkeypatch.setattr(_Shard, "write", lambda s, c: (sleep("tp0_" in s.file.name and len(c) % 7 / 1e3), write(s, c)))
    of_pair = spec(fresh, tp=4)
    (fresh / "weights").mkdir()
    cutter = Cutter(make_plan(of_pair.bundle), of_pair.checkpoints)
    digests = cutter.write({rank: fresh / shard_file(rank) for rank in range(4)})
    for rank, digest in digests.items():
        assert sha256_of(fresh / shard_file(rank)) == digest
        stored = load_file(fresh / shard_file(rank))
        assert stored["target_model.rank"].tolist() == [rank]
        expected = shard_of(cutter._checkpoints["target"], rank, 4, torch.float32, Packing())
        assert all(torch.equal(stored[f"target_model.{name}"], tensor) for name, tensor in expected.items())
