"""`python -m bench.shard_rate`: a checkpoint of real size cut for many ranks, against the disk's own rate of copying.

The checkpoint is made for the measurement, with random numbers in the files and shapes of Qwen3-8B, and removed after
it, also when the measurement is killed. The rate of copying is that of the same bytes read from the disk in blocks of
16 MB and written to it, forced to the disk at the end; it is taken before and after the cut, and none of the three
finds the checkpoint in the system's memory. Wall times of this machine; memory is what the build's process holds at
most, mapped files included. `--scale` is the share of the layers: 1 writes 16 GB and as much again, the default 0.06
does on any machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.provenance import header, write_result
from compile.build import build_and_count, peak_bytes
from compile.bundle.remote import free_space
from compile.spec import BuildSpec
from model.bundle.weights import hf_shapes
from model.config import PRESETS, Qwen3Config
from model.errors import UserError, run_cli
from model.progress import each, progress

MODEL, TP = "Qwen/Qwen3-8B", 32
# of a checkpoint's file; memory holds one
_FILE_BYTES = 1 << 30
# source: include/uapi/linux/prctl.h (torvalds/linux)
_PR_SET_PDEATHSIG = 1


def shape(scale: float) -> Qwen3Config:
    """Qwen3-8B with a share of its layers, and of its vocabulary."""
    whole = PRESETS[MODEL]
    vocabulary = max(1, round(whole.vocab_size * min(1.0, scale) / 64)) * 64
    return replace(
        whole,
        num_hidden_layers=max(1, round(whole.num_hidden_layers * scale)),
        vocab_size=vocabulary,
        eos_token_ids=(0,),
        bos_token_id=0,
    )


def write_checkpoint(folder: Path, config: Qwen3Config) -> int:
    """A bf16 checkpoint of random numbers in numbered files; returns its bytes."""
    shapes = hf_shapes(config)
    numbers = torch.randn(1 << 24).to(torch.bfloat16)
    weight_map, tensors, count, total = dict[str, str](), dict[str, torch.Tensor](), 0, 0

    def flush() -> None:
        nonlocal count
        name = f"model-{count:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
        tensors.clear()
        count += 1

    for name, of in each(shapes.items(), "writing the checkpoint"):
        size = math.prod(of)
        tensors[name] = numbers.repeat(-(-size // len(numbers)))[:size].view(of).clone()
        total += 2 * size
        if sum(t.nbytes for t in tensors.values()) > _FILE_BYTES:
            flush()
    if tensors:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    raw = {
        "model_type": "qwen3", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "rope_theta": config.rope_theta, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return total


def forget(checkpoint: Path) -> None:
    """Drop the checkpoint from the memory of the system: who reads it next reads the disk."""
    for file in checkpoint.glob("*.safetensors"):
        with file.open("rb") as read:
            os.fsync(read.fileno())
            os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_rate(checkpoint: Path, scratch: Path) -> float:
    """Bytes a second of reading the checkpoint from the disk and writing it back, both to their end."""
    forget(checkpoint)
    copied, begin = 0, time.perf_counter()
    with progress("copying", unit="bytes") as task, scratch.open("wb") as out:
        for file in sorted(checkpoint.glob("*.safetensors")):
            with file.open("rb", buffering=0) as read:
                while piece := read.read(1 << 24):
                    out.write(piece)
                    copied += len(piece)
                    task.advance(len(piece))
        out.flush()
        os.fsync(out.fileno())
    seconds = time.perf_counter() - begin
    scratch.unlink()
    return copied / seconds


@contextmanager
def removed_at_the_end(folder: Path) -> Iterator[Path]:
    """A new folder below, which a process of its own removes when this one ends, however it ends."""
    place = tempfile.mkdtemp(dir=folder, prefix="shard_rate-")
    program = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", program, place], stdin=subprocess.PIPE, start_new_session=True):
        # the pipe is closed with the block, and by the system if this process is killed
        yield Path(place)


def cut(checkpoint: str, out: str) -> dict[str, float]:
    """Build the bundle of the checkpoint alone, in this process; what it took beside its graphs."""
    spec = BuildSpec(
        target=checkpoint, checkpoint=checkpoint, draft=BuildSpec.draft, k=0, tp=TP, batch=1, max_len=128, out=out,
        toolchain="cpu",
    )  # fmt: skip
    # a build whose measurement was killed is of no use
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    plain = build_and_count(replace(spec, checkpoint=""))
    before = peak_bytes()
    begin = time.process_time()
    whole = build_and_count(spec)
    processor_s = time.process_time() - begin
    return {
        "graphs_s": plain.seconds,
        "cut_s": whole.seconds,
        "cut_processor_s": processor_s,
        "peak_bytes": peak_bytes(),
        "before_bytes": before,
        "load_average": os.getloadavg()[0],
    }


def measure(folder: Path, scale: float) -> dict[str, Any]:
    """One row: sizes, the disk's rate before and after, the cut's rate, and memory."""
    config = shape(scale)
    # the checkpoint, and its shards, in which ranks share kv heads, or its copy
    free_space(folder, round(2.3 * 2 * config.parameter_count))
    with removed_at_the_end(folder) as place:
        checkpoint, out = place / "checkpoint", place / "bundle"
        checkpoint.mkdir()
        total = write_checkpoint(checkpoint, config)
        before = copy_rate(checkpoint, place / "copy")
        forget(checkpoint)
        program = "import json, sys; from bench.shard_rate import cut; print(json.dumps(cut(*sys.argv[1:])))"
        command = [sys.executable, "-c", program, str(checkpoint), str(out)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if run.returncode:
            raise UserError("the build ended with an error, which is above; mend it and run the same command")
        took = json.loads(run.stdout.splitlines()[-1])
        shards = sum(f.stat().st_size for f in (out / "weights").iterdir())
        shutil.rmtree(out)
        after = copy_rate(checkpoint, place / "copy")
    copy = (before + after) / 2
    return {
        "model": MODEL, "scale": scale, "tp": TP, "checkpoint_bytes": total, "shard_bytes": shards,
        "copy_bytes_per_s": [before, after], "cut_bytes_per_s": total / took["cut_s"],
        "share_of_copy": total / took["cut_s"] / copy, **took,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the row; with --out, keep it."""
    parser = argparse.ArgumentParser(prog="python -m bench.shard_rate", description=__doc__)
    parser.add_argument("--scale", type=float, default=0.06, help="share of Qwen3-8B's layers (default: 0.06)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make and remove it")
    parser.add_argument("--out", type=Path, help="write the row to this file")
    options = parser.parse_args(arguments)
    if not 0 < options.scale <= 1:
        raise UserError(f"scale is {options.scale}; give a share of the layers in (0, 1]")
    if not options.folder.is_dir():
        raise UserError(f"{options.folder} is no folder; give one on the disk to measure")
    if options.out and not options.out.absolute().parent.is_dir():
        raise UserError(f"{options.out.parent} is no folder; give a file in one that is there")
    row = header("wall") | measure(options.folder, options.scale)
    if options.out:
        write_result(options.out, row)
    print(
        f"{row['checkpoint_bytes'] / 1e9:.1f} GB for tp {TP}: cut at {row['cut_bytes_per_s'] / 1e9:.2f} GB/s, "
        f"{row['share_of_copy']:.2f} of the disk's copy rate, {row['peak_bytes'] / 1e9:.2f} GB resident, "
        f"{row['cut_processor_s']:.0f} of {row['cut_s']:.0f} s on the processor"
    )


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
