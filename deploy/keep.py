"""`python -m deploy.keep FOLDER ADDRESS [--same-answers]`: store the results of a Job below a folder named by the time.

With --same-answers the folder holds lm-eval's samples of two greedy servers, in baseline/ and speculative/, and the
command fails after storing them if an answer differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from compile.bundle.remote import open_remote
from model.errors import UserError, run_cli


def keep(folder: Path, address: str) -> list[str]:
    """Store every file below a folder; returns their keys."""
    remote, files = open_remote(address), sorted(p for p in folder.rglob("*") if p.is_file())
    keys = [file.relative_to(folder).as_posix() for file in files]
    for file, key in zip(files, keys, strict=True):
        remote.put(file, key, lambda _: None)
    return keys


def answers(folder: Path) -> dict[tuple[str, int], Any]:
    """lm-eval's answers by task and document. lm-eval writes samples_TASK_TIME.jsonl, one sample a line."""
    found = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        task = file.stem.removeprefix("samples_").rsplit("_", 1)[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                sample = json.loads(line)
                found[task, int(sample["doc_id"])] = sample["resps"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{file} is no sample of lm-eval ({type(error).__name__}); run the Job again"
                ) from error
    return found


def compare(folder: Path) -> int:
    """The number of equal answers; UserError if there are none, or if one differs or is missing."""
    baseline, speculative = answers(folder / "baseline"), answers(folder / "speculative")
    every = baseline.keys() | speculative.keys()
    if not every:
        raise UserError(f"{folder} holds no samples of lm-eval; read the messages of the containers that ran it")
    different = sorted(key for key in every if baseline.get(key) != speculative.get(key))
    if different:
        task, document = different[0]
        raise UserError(
            f"{len(different)} of {len(every)} answers differ between the servers, first document {document} of "
            f"{task}; compare them in the stored samples"
        )
    return len(every)


def main(arguments: list[str]) -> None:
    """The last line of stdout is the address of the stored folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.keep", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("address", help="s3://bucket/folder or a folder")
    parser.add_argument("--same-answers", action="store_true", help="fail if the two servers' answers differ")
    options = parser.parse_args(arguments)
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    if not keep(options.folder, f"{options.address}/{stamp}"):
        raise UserError(f"{options.folder} holds no file to store; read the messages of the containers before this one")
    if options.same_answers:
        print(f"{compare(options.folder)} answers are equal")
    print(f"{options.address}/{stamp}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
