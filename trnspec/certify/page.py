"""`python -m trnspec certify`: whether a bundle's ids and log-probabilities depend on how they are computed."""

import argparse
import importlib.metadata
import platform
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

from model.errors import UserError, command_line
from trnspec.bundle.opening import open_bundle
from trnspec.certify.comparisons import Comparison, certify, random_requests
from trnspec.engine.config import engine_config
from trnspec.runtime.runner import PLATFORMS, Runner, load_runner, platform_of

_PACKAGES = ("trnspec", "numpy", "jax", "jaxlib", "nrtpy")


def verdict(comparisons: Sequence[Comparison]) -> str:
    """Whether all comparisons are equal, in one sentence."""
    baseline = "one request at a time without drafts"
    if different := [one.name for one in comparisons if one.ids]:
        return f"Not token-identical to {baseline}: {'; '.join(different)}."
    if different := [one.name for one in comparisons if one.scores]:
        return f"Token-identical to {baseline}, but other log-probabilities: {'; '.join(different)}."
    scored = ", with log-probabilities that are equal to the bit" * (not comparisons[0].skipped)
    return f"All runs are token-identical to {baseline}{scored}."


def _facts(
    runner: Runner, where: str, options: argparse.Namespace, comparisons: Sequence[Comparison]
) -> dict[str, str]:
    bundle, spec = runner.bundle, runner.bundle.spec
    sizes = ", ".join(map(str, sorted({rows for rows, _ in spec.prompts})))
    installed = {d.name: d.version for name in _PACKAGES for d in importlib.metadata.distributions(name=name)}
    accepted, drafted = (sum(getattr(one, name) for one in comparisons) for name in ("accepted", "drafted"))
    return {
        "bundle": f"{bundle.manifest}, manifest {bundle.manifest.digest}",
        "graphs": f"kernels {spec.kernels}, {spec.dtype}, batch {spec.batch}, max-len {spec.max_len}; "
        f"prefill of {sizes} rows; {len(runner.loaded)} of {len(bundle.graphs)} ran",
        "built": _named({"commit": bundle.manifest.commit} | bundle.manifest.versions),
        "run": _named({"platform": where, "python": platform.python_version(), **installed}),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "requests": f"{options.requests} of {options.tokens} new tokens, seed {options.seed}; {accepted} of {drafted} "
        "drafts were accepted",
    }


def _named(facts: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {fact}" for name, fact in facts.items())


def page(title: str, facts: Mapping[str, str], comparisons: Sequence[Comparison]) -> str:
    """The certificate as Markdown."""
    heads = ["comparison", "requests", "tokens", "different ids", "different log-probabilities", "position", "margin"]
    rows = [heads, ["---"] * len(heads), *(one.row for one in comparisons)]
    lines = [f"# Token identity of {title}", "", *(f"- {name}: {fact}" for name, fact in facts.items()), ""]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows), "", verdict(comparisons), ""])


def main(arguments: list[str]) -> None:
    """Print the certificate; exit 1 if anything differs."""
    about = "Compare a bundle's ids and log-probabilities with those of one request at a time without drafts."
    parser = command_line("trnspec certify", about, "bundles/demo --requests 32 --out certificate.md")
    parser.add_argument("bundle", type=Path, help="folder of the bundle")
    parser.add_argument("--requests", type=int, default=16, help="random requests (default: 16)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    parser.add_argument("--platform", default="auto", help=f"one of {', '.join(PLATFORMS)} (default: auto)")
    parser.add_argument("--out", type=Path, help="write the page to this Markdown file too")
    options = parser.parse_args(arguments)
    bundle, rng = open_bundle(options.bundle), random.Random(options.seed)
    config, where = engine_config(bundle), platform_of(bundle, options.platform)
    for name, lowest, highest in ("requests", 1, 10_000), ("tokens", 2, config.max_len // 2):
        if not lowest <= (value := getattr(options, name)) <= highest:
            raise UserError(f"--{name} is {value}; give a number from {lowest} to {highest}")
    if options.out:
        # refused before the work begins
        options.out.touch()
    requests = list(random_requests(config, options.requests, options.tokens, rng))
    with closing(load_runner(bundle, where)) as runner:
        comparisons = certify(runner, config, requests, rng)
        text = page(str(options.bundle), _facts(runner, where, options, comparisons), comparisons)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if any(one.ids or one.scores for one in comparisons):
        raise SystemExit(1)
