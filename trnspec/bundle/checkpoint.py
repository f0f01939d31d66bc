"""Hugging Face checkpoints: checked by name, shape and dtype, and cut into the shards of ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import ModelConfig, read_object
from model.drafters.registry import drafter_of
from model.dtypes import FP8
from model.errors import UserError
from model.fp8 import BLOCK, of_blocks, quantize
from model.parallel import HeadMap
from model.strict import shown
from model.weights import Packing, ShardSpec, Weight
from trnspec.bundle.part import Part, checkpoint_shapes

_INDEX, _SCALES = "model.safetensors.index.json", "_scale_inv"
_FLOATS, _INTEGERS = ("BF16", "F16", "F32", "F64"), ("I32", "I64")
# suffixes of files that hold weights; only the first one is read
_FORMATS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# safetensors that no Qwen3 is loaded from: Mistral's names, an adapter's difference from a base model
_OTHER_MODELS = ("consolidated", "adapter_")
# the ends of the names that quantized weights have: compressed-tensors, FP8, GPTQ and AWQ, bitsandbytes
_QUANTIZED = ("_scale", "_scale_inv", "_packed", "qweight", "qzeros", "scales", "g_idx", "absmax", "SCB", "quant_state")
# a name that every decoder has, from its layers on
_LAYER = "layers.0.input_layernorm.weight"
_HEAD = "lm_head.weight"


class Checkpoint:
    """A Hugging Face checkpoint folder, checked by name, shape and dtype before any tensor is read.

    A draft's may lack tensors that its `target`'s checkpoint has for both. `fp8`: projections become FP8, and may be
    FP8 in blocks of 128 x 128 with a scale each, as in Qwen's checkpoints.
    """

    def __init__(self, path: Path, config: ModelConfig, target: "Checkpoint | None" = None, fp8: bool = False) -> None:
        self.path, self.config = path, config
        self.files, drafter = _files_of(path), drafter_of(config)
        self._fp8 = fp8
        self._tensors, unused = dict[str, Any](), dict[str, Any]()
        for file in self.files:
            opened = _open(file)
            for key in opened.keys():  # noqa: SIM118
                name = drafter.rename_weight(config, key)
                if name in self._tensors:
                    raise UserError(f"checkpoint {path} has {key} in two files; remove the files of an older save")
                (self._tensors if name else unused)[name or key] = opened.get_slice(key)
        for name, tied in drafter.tied_to_target.items():
            if target and name not in self._tensors:
                self._tensors[name] = target._tensors[next(n for n in tied if n in target._tensors)]
        self._check()
        if _HEAD in unused:
            head, embedding = unused[_HEAD][:], self._tensors["model.embed_tokens.weight"][:]
            if not torch.equal(head.to(embedding.dtype), embedding):
                raise UserError(
                    f"checkpoint {path} has {_HEAD}, which differs from the embedding, and its config.json sets "
                    "tie_word_embeddings; set it to false if the head was trained, or remove the head"
                )

    def _check(self) -> None:
        expected, tensors = checkpoint_shapes(self.config), self._tensors
        blocked = {name for name in expected if self._fp8 and name + _SCALES in tensors}
        for name in blocked:
            expected[name + _SCALES] = tuple(-(-size // BLOCK) for size in expected[name])
        unknown = sorted(tensors.keys() - expected.keys())
        scales, adapters = [n for n in unknown if n.endswith(_QUANTIZED)], [n for n in unknown if ".lora_" in n]
        integers = {w.parts[0][0] for w in drafter_of(self.config).weights(self.config, Packing()) if w.dtype}
        shapes, dtypes = list[str](), list[str]()
        for name in expected.keys() & tensors:
            shape, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
            if shape != expected[name]:
                shapes.append(f"{name} is {shape}, expected {expected[name]}")
            if dtype not in (_INTEGERS if name in integers else ("F8_E4M3",) if name in blocked else _FLOATS):
                dtypes.append(f"{name} is {dtype}")
        for fault, names, way in (
            ("is quantized: it has", scales, "give the bf16 checkpoint of the model, or block FP8 with --weights fp8"),
            ("is an adapter: it has", adapters, "merge it into its base model, and give the merged checkpoint"),
            ("has", _misnamed(tensors, expected), "save it as a Qwen3ForCausalLM with transformers"),
            ("lacks", expected.keys() - tensors, "give the folder of a complete checkpoint that fits its config.json"),
            ("has unknown", unknown, "give a checkpoint that fits its config.json"),
            ("has wrong shapes:", shapes, "give a checkpoint that fits its config.json"),
            ("has weights of a type that is not supported:", dtypes, "give one in bf16, fp16 or fp32, not quantized"),
        ):
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                raise UserError(f"checkpoint {self.path} {fault} {', '.join(sorted(names)[:8])}{more}; {way}")

    def shards(self, weight: Weight, tp: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """A weight on each of `tp` ranks; its tensors are read once. UserError names one with NaN."""
        heads = HeadMap(self.config.num_attention_heads, self.config.num_key_value_heads, tp)
        quantized, dim = weight.scale or weight.dtype == FP8.name, self.config.head_dim
        read = partial(self._quantized, scale=weight.scale) if quantized else partial(self._read, dtype=dtype)
        tensors = [read(name) for name, _ in weight.parts]
        for rank in range(tp):
            cut = [_cut(x, shard, rank, heads, dim) for x, (_, shard) in zip(tensors, weight.parts, strict=True)]
            yield weight.pack(*cut, dim) if weight.pack else cut[0]

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self._tensors[name][:].to(dtype)
        # either end is NaN if any number is
        if not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise UserError(f"{name} in {self.path} has NaN, infinity or a number beyond {dtype}; download it again")
        return tensor

    def _quantized(self, name: str, scale: bool) -> Tensor:
        """A projection's FP8 numbers, or its scales (out, 1)."""
        tensor, scales = self._tensors[name][:], self._tensors.get(name + _SCALES)
        try:
            return quantize(of_blocks(tensor, scales[:]) if scales is not None else tensor)[scale]
        except ValueError as error:
            raise UserError(
                f"{name} in {self.path} {error}, and cannot be FP8; fetch it again, or build without --weights fp8"
            ) from error


def open_checkpoints(parts: Sequence[Part], folders: Mapping[str, Path]) -> dict[str, Checkpoint]:
    """The checkpoint of each part by its role, given its folder; UserError for one that does not fit its config."""
    opened = dict[str, Checkpoint]()
    for part in parts:
        given = folders[part.role], part.config, opened.get("target"), part.packing.fp8
        opened[part.role] = Checkpoint(*given)
    return opened


def weight_files(path: Path) -> list[Path]:
    """The files of a folder that hold weights in any format, readable here or not."""
    return sorted(file for file in path.glob("*") if file.name.endswith(_FORMATS))


def _files_of(path: Path) -> list[Path]:
    """The safetensors of a checkpoint: those that its index lists, without an index all."""
    if (index := path / _INDEX).is_file():
        listed: Any = read_object(index).get("weight_map")
        names = list(listed.values()) if isinstance(listed, dict) else [listed]
        if odd := [name for name in names if not (isinstance(name, str) and name == Path(name).name)]:
            raise UserError(f"{index} lists {shown(odd[0])}, which is not a file name; download the checkpoint again")
        return [path / name for name in sorted(set(names))]
    every = weight_files(path)
    files = [f for f in every if f.suffix == ".safetensors" and not f.name.startswith(_OTHER_MODELS)]
    if not files:
        raise UserError(
            f"checkpoint {path} has its weights in {', '.join(f.name for f in every[:3])}; only safetensors are read: "
            "save it with transformers' save_pretrained, an adapter after merging it into its base model"
        )
    return files


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file} does not exist, and {_INDEX} lists it; download the checkpoint again")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or corrupted ({error}); download the checkpoint again") from error


def _misnamed(names: Iterable[str], expected: Mapping[str, Any]) -> list[str]:
    """A tensor whose name has another prefix than the one expected, as a clause; none if there is no such tensor."""
    right = next(name for name in expected if name.endswith(_LAYER))
    headless = "" if any(name.endswith(_HEAD) for name in names) else " and a head"
    return [f"{name}, expected {right}{headless}" for name in names if name.endswith(_LAYER) and name != right][:1]


def _cut(tensor: Tensor, shard: ShardSpec, rank: int, heads: HeadMap, head_dim: int) -> Tensor:
    """The part of a tensor that a rank stores; heads that pad its group, and rows that pad a vocabulary, are zeros."""
    if shard.axis is None:
        return tensor
    if shard.by == "even":
        count = tensor.shape[shard.axis]
        size = -(-count // heads.tp)
        first = min(rank * size, count)
        part = tensor.narrow(shard.axis, first, min(size, count - first))
        return part if part.shape[shard.axis] == size else F.pad(part, (0, 0, 0, size - len(part)))
    rows = tensor.split(head_dim, shard.axis)
    of_rank = heads.queries_of(rank) if shard.by == "query" else heads.kv_of(rank)
    return torch.cat([torch.zeros_like(rows[0]) if head is None else rows[head] for head in of_rank], shard.axis)
