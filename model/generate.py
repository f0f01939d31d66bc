"""`python -m model.generate`: text from a bundle, figures of speculation, and whether it changed a token."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from model.errors import UserError, run_cli
from trnspec.engine.request import Params
from trnspec.engine.text import read_prompt
from trnspec.llm import LLM, Options, Output

# flags of the same names
_PARAMS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model.generate", description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of the bundle")
    parser.add_argument("--prompt", help="the prompt")
    parser.add_argument("--prompt-file", help="a UTF-8 file with the prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, default=0, help="0 switches it off (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    for name, off in (("presence", 0.0), ("frequency", 0.0), ("repetition", 1.0)):
        parser.add_argument(f"--{name}-penalty", type=float, default=off, help=f"{off:g} switches it off (default)")
    parser.add_argument("--seed", type=int, default=0, help="64 bits; the output is a function of it")
    parser.add_argument("--stop", action="append", default=[], help="cut the text before this; may be repeated")
    parser.add_argument("--no-speculation", action="store_true", help="run the target alone")
    parser.add_argument("--k-limit", type=int, help="accept at most this many drafts a step")
    parser.add_argument("--compare", action="store_true", help="run both ways and say whether they agree")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def _figures(output: Output) -> dict[str, Any]:
    tokens = len(output.ids)
    return {
        "tokens": tokens,
        "finish_reason": output.finish_reason,
        "target_steps": output.steps,
        "tokens_per_target_step": round(output.tokens_per_step, 3),
        "acceptance_per_position": [round(share, 3) for share in output.acceptance],
        "drafts_offered_per_position": output.drafts_offered,
        "drafts_kept_per_position": output.drafts_kept,
        "seconds_wall": round(output.seconds, 4),
        "ms_per_token_wall": round(1e3 * output.seconds / max(1, tokens), 3),
    }


def main(arguments: list[str]) -> None:
    """Generate and report; text on stdout, figures on stderr, or one JSON object on stdout."""
    options = _options(arguments)
    if options.stream and options.json:
        raise UserError("--stream and --json exclude each other; leave one out")
    params = Params(**{name: getattr(options, name) for name in _PARAMS})
    with LLM(options.bundle, load=False) as llm:
        if options.compare and not llm.shape.k:
            raise UserError(f"{options.bundle} is a target alone (k 0); leave out --compare, or give a pair")
        text = read_prompt(options.prompt, options.prompt_file)
        speculation = not options.no_speculation and llm.shape.k > 0
        chosen = Options(
            max_new_tokens=options.max_new_tokens, stop=options.stop, k_limit=options.k_limit, speculation=speculation
        )
        # refused before the weights are loaded
        llm.request(text, params, chosen)
        llm.load()
        output = _streamed(llm, text, params, chosen) if options.stream else llm.generate(text, params, **chosen)
        chosen["speculation"] = not speculation
        other = llm.generate(text, params, **chosen) if options.compare else None
    report = _figures(output) | {"ks": llm.shape.ks, "speculation": speculation}
    if other:
        report["identical_to_target_alone"] = output.ids == other.ids
        report["other_way"] = _figures(other)
    if options.json:
        print(json.dumps({"text": output.text, "ids": output.ids} | report))
    else:
        print("" if options.stream else output.text)
        _print_report(output, other, speculation)
    if other and output.ids != other.ids:
        raise SystemExit(1)


def _streamed(llm: LLM, text: str, params: Params, chosen: Options) -> Output:
    stream = llm.stream(text, params, **chosen)
    for piece in stream:
        print(piece, end="", flush=True)
    assert stream.output
    return stream.output


def _print_report(output: Output, other: Output | None, speculation: bool) -> None:
    def say(line: str) -> None:
        print(line, file=sys.stderr if other is None else sys.stdout)

    figures = _figures(output)
    say(f"new tokens:               {figures['tokens']} ({figures['finish_reason']})")
    say(f"tokens per target step:   {figures['tokens_per_target_step']}")
    say(f"acceptance per position:  {' '.join(f'{r:.2f}' for r in figures['acceptance_per_position']) or '-'}")
    speculative, alone = (output, other) if speculation else (other, output)
    if speculative:
        say(f"wall with speculation:    {speculative.seconds:.3f} s")
    if alone:
        say(f"wall without speculation: {alone.seconds:.3f} s")
    if other:
        same = output.ids == other.ids
        say(f"identical to the target alone: {'yes' if same else _difference(output.ids, other.ids)}")


def _difference(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"no, first difference at new token {at}: {one[at : at + 4]} against {other[at : at + 4]}"


if __name__ == "__main__":
    run_cli(lambda: main(sys.argv[1:]))
