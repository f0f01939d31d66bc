"""`python -m deploy.checkpoint NAME=FOLDER...`: refuse a folder that does not hold the named model and its weights.

The compile Job begins with it: compile.build takes the shape of whatever model is there, and without weights it builds
graphs alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from model.config import PRESETS, Qwen3Config, load_config
from model.errors import UserError, run_cli
from trnspec.bundle.checkpoint import has_weights


def check_checkpoint(name: str, folder: Path) -> None:
    """Raise UserError unless a folder has weights and, where the name is a preset's, that preset's shape."""
    if not has_weights(folder):
        raise UserError(f"{folder} holds no weights; copy the checkpoint of {name} there, or correct the values")
    if name in PRESETS and _shape(load_config(str(folder))) != _shape(PRESETS[name]):
        raise UserError(f"{folder}/config.json is not {name}'s; copy that checkpoint there, or correct the values")


def _shape(config: Qwen3Config) -> Qwen3Config:
    """All but the ids that begin and end a sequence, of which a preset lists more than the hub's config.json."""
    return dataclasses.replace(config, bos_token_id=None, eos_token_ids=())


def main(arguments: list[str]) -> None:
    """One line for each checkpoint."""
    parser = argparse.ArgumentParser(prog="python -m deploy.checkpoint", description=__doc__)
    named = "a preset's name, or any other word, and a folder"
    parser.add_argument("checkpoint", nargs="+", metavar="NAME=FOLDER", help=named)
    for checkpoint in parser.parse_args(arguments).checkpoint:
        name, _, folder = checkpoint.partition("=")
        check_checkpoint(name, Path(folder))
        print(checkpoint)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
