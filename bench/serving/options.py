"""What to measure: the flags of bench.serving as one frozen value, checked before a request is sent."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from model.errors import UserError

THINKING = ("off", "on", "unset")
APIS = ("chat", "completions")


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Options:
    """One run. k counts draft tokens per step; times are seconds."""

    baseline: str = _flag("", "URL of the server without speculation")
    speculative: str = _flag("", "URL of the server with speculation; one of the two is enough")
    prompt_set: str = _flag("article", "article, pod, synthetic, or several with commas")
    prompts: str = _flag("", "file of prompts instead: JSON lines with name, text and tier, or one text a line")
    requests: int = _flag(100, "requests per prompt and endpoint")
    concurrency: int = _flag(4, "requests under way at once on one endpoint")
    rate: float = _flag(0.0, "arrivals per second (Poisson) instead of a fixed concurrency; 0 means none")
    rounds: int = _flag(4, "the requests are split into so many rounds, each in a new random order of endpoints")
    warmup: int = _flag(4, "requests per endpoint sent first and not counted")
    max_tokens: int = _flag(600, "longest answer in tokens")
    temperature: float = _flag(0.0, "sent with every request")
    seed: int = _flag(0, "of the order, the arrivals and (plus the request's number) the sampling")
    thinking: str = _flag("off", "Qwen3's thinking mode: off, on, or unset to send nothing")
    api: str = _flag("chat", "chat or completions")
    model: str = _flag("", "model name to send; the endpoint's first one if left out")
    token_ids: bool = _flag(False, "ask for token ids (return_token_ids of vLLM) and compare these")
    ignore_eos: bool = _flag(False, "let every answer run to max-tokens (vLLM's ignore_eos)")
    timeout: float = _flag(1200.0, "seconds after which a request counts as an error")
    k: int = _flag(0, "draft tokens per step of the speculative endpoint; 0 means read it from its metrics")
    draft: str = _flag("", "name of the draft, for the report and CloudWatch")
    cloudwatch: str = _flag("", "CloudWatch namespace to publish to; empty means none")
    out: str = _flag("serving", "folder of the rows, the summary and the report")
    report: str = _flag("", "measure nothing: render stored runs (folders, with commas) into --out")
    json: bool = _flag(False, "print the summary as JSON lines")

    def check(self) -> None:
        """Raise UserError with one sentence for the first thing that cannot be measured."""
        if not self.endpoints:
            raise UserError("no endpoint was given; give --baseline URL, --speculative URL, or both")
        for name in ("requests", "concurrency", "rounds", "max_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.timeout <= 0:
            raise UserError(f"--timeout is {self.timeout:g}; give a number of seconds")
        for name in ("rate", "temperature", "warmup", "k"):
            if getattr(self, name) < 0:
                raise UserError(f"--{name} is {getattr(self, name)}; it must not be negative")
        for name, allowed in (("thinking", THINKING), ("api", APIS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"--{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        if self.rounds > self.requests:
            raise UserError(f"{self.requests} requests cannot fill {self.rounds} rounds; lower --rounds")

    @property
    def endpoints(self) -> dict[str, str]:
        """Variant to base URL, without a trailing /v1."""
        given = {"baseline": self.baseline, "speculative": self.speculative}
        return {name: _base(url) for name, url in given.items() if url}


def _base(url: str) -> str:
    base = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UserError(f"{url!r} is not an address; give http://host:port")
    return base


def parse(arguments: Sequence[str]) -> Options:
    """The command line as Options; each flag is a field with its default and help."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving",
        description="Measure OpenAI-compatible endpoints: TTFT, ITL and E2E from real token counts.",
    )
    hints = get_type_hints(Options)
    for f in dataclasses.fields(Options):
        flag = "--" + f.name.replace("_", "-")
        if hints[f.name] is bool:
            parser.add_argument(flag, action="store_true", help=f.metadata["help"])
        else:
            shown = f"{f.metadata['help']} (default: {f.default!r})".replace("%", "%%")
            parser.add_argument(flag, type=hints[f.name], default=f.default, help=shown)
    return Options(**vars(parser.parse_args(arguments)))
