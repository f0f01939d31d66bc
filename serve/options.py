"""The options of `vllm serve` that a bundle follows; any other that differs from its default is refused."""

from __future__ import annotations

import argparse
from typing import Any

from model.cache import KEY_TILE
from model.errors import UserError
from model.logprobs import TOP
from trnspec.bundle.opening import Bundle
from trnspec.bundle.tokenizer import TOKENIZER

# part of the server -> the options that it follows, as in docs/serving.md
FOLLOWED = {
    "HTTP": """host port uds root-path middleware api-key api-server-count allow-credentials allowed-origins
        allowed-methods allowed-headers ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers
        enable-ssl-refresh h11-max-incomplete-event-size h11-max-header-count sse-keep-alive-interval
        disable-fastapi-docs enable-offline-docs enable-request-id-headers shutdown-timeout max-num-queued-reqs
        max-num-queued-tokens""",
    "requests and answers": """served-model-name generation-config override-generation-config chat-template
        chat-template-content-format trust-request-chat-template default-chat-template-kwargs response-role
        reasoning-parser reasoning-parser-plugin enable-auto-tool-choice tool-call-parser tool-parser-plugin
        tool-strict-level tool-server exclude-tools-when-tool-choice-none structured-outputs-config max-logprobs
        return-tokens-as-token-ids enable-prompt-tokens-details enable-per-request-metrics enable-force-include-usage
        enable-tokenizer-info-endpoint fingerprint-mode fingerprint-value anthropic-disabled-thinking-effort
        skip-tokenizer-init renderer-num-workers stream-interval""",
    "scheduler": """max-num-seqs max-num-batched-tokens long-prefill-token-threshold num-gpu-blocks-override
        enable-prefix-caching prefix-caching-hash-algo""",
    "logs and metrics": """logging-config log-level log-config-file max-log-len uvicorn-log-level
        disable-uvicorn-access-log disable-access-log-for-endpoints enable-log-requests enable-log-outputs
        enable-log-deltas log-error-stack disable-log-stats aggregate-engine-logging enable-server-load-tracking
        show-hidden-metrics-for-version otlp-traces-endpoint kv-cache-metrics kv-cache-metrics-sample
        custom-histogram-buckets enable-logging-iteration-details fail-on-environ-validation""",
    "bundle": "model additional-config config",
}
_FOLLOWED = {option.replace("-", "_") for options in FOLLOWED.values() for option in options.split()}


def check_options(bundle: Bundle, chosen: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Raise UserError for an option of the command line that the bundle cannot follow, such as of a later vLLM."""
    for name, default in vars(defaults).items():
        value = getattr(chosen, name)
        if value != default and name not in _FOLLOWED and name != "model_tag":
            short = default is not None and len(str(default)) < 40
            advice = f"this bundle is served with {default}, leave it out" if short else "leave it out"
            shown, option = "given" if name == "hf_token" else value, name.replace("_", "-")
            raise UserError(f"--{option} is {shown}; {advice}: docs/serving.md lists the options that a bundle follows")
    _check_values(bundle, chosen)


def suggest_parsers(template: str, chosen: argparse.Namespace) -> str:
    """The parsers of Qwen3's thinking and tool calls that a chat template needs and the command lacks."""
    thinking = "--reasoning-parser qwen3 " * ("</think>" in template and not chosen.reasoning_parser)
    # Qwen3 writes JSON, Qwen3-Coder XML
    tools = f"--enable-auto-tool-choice --tool-call-parser {'qwen3_xml' if '<function=' in template else 'hermes'}"
    return thinking + tools * ("<tool_call>" in template and not chosen.tool_call_parser)


def _check_values(bundle: Bundle, chosen: argparse.Namespace) -> None:
    spec, blocks = bundle.spec, chosen.num_gpu_blocks_override
    fewest = 1 + spec.max_len // KEY_TILE
    limits: tuple[tuple[str, Any, bool, str], ...] = (
        ("max-num-seqs", chosen.max_num_seqs, chosen.max_num_seqs <= spec.batch, f"the bundle has {spec.batch} slots"),
        ("max-logprobs", chosen.max_logprobs, 0 <= chosen.max_logprobs <= TOP, f"the graphs return at most {TOP}"),
        ("num-gpu-blocks-override", blocks, blocks is None or fewest <= blocks <= spec.usable,
         f"this bundle takes {fewest} to {spec.usable}"),
    )  # fmt: skip
    for option, value, followed, supported in limits:
        if not followed:
            raise UserError(f"--{option} is {value}; {supported}")
    if not bundle.manifest.has_weights:
        raise UserError(f"{bundle.path} was built without weights; build it from checkpoint folders that hold them")
    if TOKENIZER not in bundle.files and not chosen.skip_tokenizer_init:
        raise UserError(f"{bundle.path} has no tokenizer; build it from a target folder that holds tokenizer.json")
