"""`python -m model.generate`: generates text with a bundle, optionally compared with decoding without speculation."""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from model.errors import UserError, run_cli
from trnspec.engine.request import Params
from trnspec.llm import LLM

# numeric sampling parameters; the flags have the same names
_PARAMS = {f.name: f.default for f in fields(Params) if isinstance(f.default, (int, float))}


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description=__doc__)
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="folder of the bundle")
    add("--platform", default="auto", help="cpu, neuron, pjrt, or auto (default): neuron if there are devices")
    add("--prompt", required=True)
    add("--max-new-tokens", type=int, default=128)
    for name, default in _PARAMS.items():
        add(f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"default {default}")
    add("--stop", action="append", default=[], help="end the output before this string; may be repeated")
    add("--no-speculation", action="store_true", help="run the target without drafts")
    add("--k-limit", type=int, help="accept at most this many drafts per step")
    add("--compare", action="store_true", help="run with and without speculation and compare")
    add("--reference", type=Path, help="compare with the ids of this bundle, such as one of --kernels reference")
    add("--json", action="store_true", help="print one JSON object at the end")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Prints the output while it is generated, and statistics on stderr; or JSON. Exits with 1 if ids differ."""
    args = _arguments(arguments)
    print(f"reading {args.bundle}", file=sys.stderr, flush=True)
    params = Params(**{name: getattr(args, name) for name in _PARAMS})
    with LLM(args.bundle, args.platform, load=False) as llm:
        if args.compare and not llm.config.k:
            raise UserError(f"{args.bundle} has no draft (k 0); leave out --compare, or build the bundle with a draft")
        options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "stop": args.stop, "k_limit": args.k_limit}
        speculation = not args.no_speculation and llm.config.k > 0
        # raises for invalid requests before the weights are loaded
        llm.request(args.prompt, params, **options)
        llm.load()
        stream = llm.stream(args.prompt, params, **options, speculation=speculation)
        for delta in stream:
            print("" if args.json else delta, end="", flush=True)
        output = stream.output
        assert output is not None
        other = llm.generate(args.prompt, params, **options, speculation=not speculation) if args.compare else None
    figures: dict[str, Any] = {
        "new_tokens": len(output.ids), "finish_reason": output.finish_reason,
        "tokens_per_step": round(output.tokens_per_step, 3),
        "acceptance": [round(share, 3) for share in output.acceptance], "seconds_wall": round(output.seconds, 4),
    }  # fmt: skip
    same = {"identical_without_speculation": output.ids == other.ids} if other else {}
    if args.reference:
        with LLM(args.reference) as llm:
            same["identical_to_reference"] = llm.generate(args.prompt, params, **options).ids == output.ids
    figures |= same
    if args.json:
        print(json.dumps({"text": output.text, "ids": output.ids, "speculation": speculation} | figures))
    else:
        print()
        for name, value in figures.items():
            print(f"{name}: {value}", file=sys.stdout if same else sys.stderr)
    if not all(same.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
