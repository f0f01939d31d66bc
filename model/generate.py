"""`python -m model.generate`: text from a bundle, what speculation did, and whether it changed anything."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from model.bundle.manifest import PREFILL, Bundle
from model.bundle.opening import open_bundle
from model.errors import UserError, run_cli
from model.serving.engine import Engine, Params, Request, Result, Shape, Step
from model.serving.runtime import Graphs
from model.serving.switching import find_table
from model.serving.text import Stream, load_tokenizer, read_prompt, stop_cut


@dataclass(frozen=True)
class Run:
    """One request served: its result and its wall seconds, compilation apart."""

    result: Result
    seconds: float


def shape_of(bundle: Bundle) -> Shape:
    """What the engine must know of a bundle."""
    return Shape(bundle["k"], bundle["batch"], bundle["max_len"], tuple(bundle["buckets"]))


def compile_graphs(graphs: Graphs, request: Request, engine: Engine) -> None:
    """Compile every graph that the request may reach, so that the first token waits for none."""
    shape = shape_of(graphs.bundle)
    length = len(request.ids)
    last = min(length + request.max_new_tokens + shape.k, shape.max_len)
    prompt = next(b for b in shape.buckets if b >= length)
    graphs.prepare(PREFILL, prompt)
    lower = 0
    for bucket in shape.buckets:
        if bucket > length and lower <= last:
            for tag in engine.tags:
                graphs.prepare(tag, bucket)
            if engine.table and engine.table.refresh is not None:
                graphs.prepare(PREFILL, bucket)
        lower = bucket


def serve(graphs: Graphs, request: Request, speculative: bool, told: Callable[[list[int]], None] | None = None) -> Run:
    """Serve one request alone, with or without speculation."""
    return serve_by(Engine(graphs, shape_of(graphs.bundle), speculative), graphs, request, told)


def serve_by(engine: Engine, graphs: Graphs, request: Request, told: Callable[[list[int]], None] | None = None) -> Run:
    """Serve one request alone by an engine over these graphs."""
    engine.check(request)
    compile_graphs(graphs, request, engine)
    begin = time.perf_counter()
    (result,) = engine.run([request], (lambda _, ids: told(ids)) if told else None)
    return Run(result, time.perf_counter() - begin)


def recorder(file: Path, draft: str) -> Callable[[Step], None]:
    """Appends speculative steps to a file of JSON lines; its prompts are numbered on from the last one there.

    UserError if the file holds something else or cannot be written.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        first = max((json.loads(line)["prompt"] for line in lines), default=-1) + 1
        file.touch()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot take a record of steps ({error}); give a new file") from error

    def record(step: Step) -> None:
        row = {
            "prompt": first + step.request,
            "draft": draft,
            "drafted": step.drafted,
            "accepted": step.accepted,
            "position": step.position,
        }
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    return record


def _statistics(run: Run) -> dict[str, Any]:
    result = run.result
    rates = [a / d for a, d in zip(result.accepted, result.drafted, strict=True) if d]
    return {
        "tokens": len(result.ids),
        "finish_reason": result.reason,
        "target_steps": result.steps,
        "tokens_per_target_step": round(result.tokens_per_step, 3),
        "acceptance_per_position": [round(r, 3) for r in rates],
        "draft_refreshes": result.refreshes,
        "seconds_wall": round(run.seconds, 4),
        "ms_per_token_wall": round(1e3 * run.seconds / max(1, len(result.ids)), 3),
    }


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not read the files' digests: a damaged bundle then runs, wrongly"
    )
    parser.add_argument("--prompt", help="the prompt")
    parser.add_argument("--prompt-file", help="a UTF-8 file with the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 switches it off (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="64 bits; the output is a function of it")
    parser.add_argument("--stop", action="append", default=[], help="cut the text before this; may be repeated")
    parser.add_argument("--no-speculation", action="store_true", help="run the target alone")
    parser.add_argument("--k-limit", type=int, help="accept at most this many drafts a step")
    parser.add_argument("--tuning", type=Path, help="table that says when to speculate (default: the bundle's, if any)")
    parser.add_argument("--record", type=Path, help="append a JSON line for each speculative step to this file")
    parser.add_argument("--compare", action="store_true", help="run both ways and say whether they agree")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def _request(options: argparse.Namespace, bundle: Bundle, tokenizer: Tokenizer) -> Request:
    params = Params(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
    text = read_prompt(options.prompt, options.prompt_file)
    return Request(
        tuple(tokenizer.encode(text).ids),
        params,
        options.max_new_tokens,
        bundle.config("target").eos_token_ids,
        options.k_limit,
        stop_cut(tokenizer, options.stop),
    )


def _difference(one: list[int], other: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"no, first difference at new token {at}: {one[at : at + 4]} against {other[at : at + 4]}"


def main(arguments: list[str]) -> None:
    """Generate and report; text on stdout, figures on stderr, or one JSON object on stdout."""
    options = _options(arguments)
    if options.stream and options.json:
        raise UserError("--stream and --json exclude each other; leave one out")
    bundle = open_bundle(options.bundle, not options.no_verify)
    if not bundle["k"] and (options.compare or options.record):
        raise UserError(f"{options.bundle} is a target alone (k 0); leave out --compare and --record, or give a pair")
    tokenizer = load_tokenizer(options.bundle)
    request = _request(options, bundle, tokenizer)
    Engine(_Refused(), shape_of(bundle)).check(request)
    table = find_table(options.bundle, options.tuning)
    record = recorder(options.record, bundle["models"]["draft"]["name"]) if options.record else None
    graphs = Graphs(bundle)
    engine = Engine(graphs, shape_of(bundle), not options.no_speculation, table, record)
    stream = Stream(tokenizer, lambda text: print(text, end="", flush=True)) if options.stream else None
    run = serve_by(engine, graphs, request, stream.feed if stream else None)
    off = not engine.speculative
    other = serve(graphs, request, options.no_speculation) if options.compare else None
    report = _statistics(run) | {"k": bundle["k"], "speculation": not off}
    report["switching"] = table.source if table and not off else None
    if other:
        same = run.result.ids == other.result.ids
        report["identical_to_target_alone"] = same
        report["other_way"] = _statistics(other)
    text = tokenizer.decode(run.result.ids)
    if options.json:
        print(json.dumps({"text": text, "ids": run.result.ids} | report))
    else:
        print("" if stream else text)
        _print_report(run, other, off)
    if other and run.result.ids != other.result.ids:
        raise SystemExit(1)


class _Refused:
    """Stands for the graphs while a request is only checked."""

    def run(self, *_: Any) -> Any:
        raise AssertionError("a check runs nothing")


def _print_report(run: Run, other: Run | None, off: bool) -> None:
    def say(line: str) -> None:
        print(line, file=sys.stderr if other is None else sys.stdout)

    figures = _statistics(run)
    say(f"new tokens:               {figures['tokens']} ({figures['finish_reason']})")
    say(f"tokens per target step:   {figures['tokens_per_target_step']}")
    say(f"acceptance per position:  {' '.join(f'{r:.2f}' for r in figures['acceptance_per_position']) or '-'}")
    speculative, alone = (other, run) if off else (run, other)
    if speculative:
        say(f"wall with speculation:    {speculative.seconds:.3f} s")
    if alone:
        say(f"wall without speculation: {alone.seconds:.3f} s")
    if other:
        same = run.result.ids == other.result.ids
        say(f"identical to the target alone: {'yes' if same else _difference(run.result.ids, other.result.ids)}")


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
