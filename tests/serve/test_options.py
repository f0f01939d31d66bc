"""Options of `vllm serve`, read by vLLM's parser: each is followed, or refused in a sentence that names it."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from model.errors import UserError
from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM
from trnspec.engine.text import TOKENIZER

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm.entrypoints.launchers.cli_args import FlexibleArgumentParser, make_arg_parser

from serve import options, platform
from serve.options import FOLLOWED

OF_A_LATER_VLLM = "--of-a-later-vllm"
# an option with its value -> the beginning of the sentence, "" where it is followed
COMMANDS = {
    "--logits-processors a.B": "--logits-processors is ['a.B']; leave it out: docs/serving.md lists",
    "--logprobs-mode processed_logprobs": "--logprobs-mode is processed_logprobs; this bundle is served with raw_log",
    "--dtype float16": "--dtype is float16; this bundle is served with float32, leave it out",
    "--max-num-seqs 5": "--max-num-seqs is 5; the bundle has 4 slots",
    "--max-logprobs 21": "--max-logprobs is 21; the graphs return at most 20",
    "--num-gpu-blocks-override 2": "--num-gpu-blocks-override is 2; this bundle takes 3 to 9",
    "--num-gpu-blocks-override 10": "--num-gpu-blocks-override is 10; this bundle takes 3 to 9",
    "--no-enable-chunked-prefill": "--enable-chunked-prefill is False; this bundle is served with True",
    "-dp 2": "--data-parallel-size is 2; this bundle is served with 1",
    "-O0": "--optimization-level is",
    **dict.fromkeys((
        "--seed 3", "--hf-overrides.vocab_size 1", "--headless", "--block-size 16", "--lora-modules a=b",
        "--max-model-len 128", "--tensor-parallel-size 2", "--tokenizer a", "--dtype auto",
        "--speculative-config.method ngram", "--attention-config.backend CUSTOM", f"{OF_A_LATER_VLLM} x",
        "--kv-transfer-config.kv_connector X --kv-transfer-config.kv_role kv_both",
    ), "--"),
    **dict.fromkeys((
        "", "--dtype float32", "--block-size 128", "--max-model-len 256", "--max-num-seqs 2", "--port 9",
        "--num-gpu-blocks-override 3", "--tensor-parallel-size 1", "--no-enable-prefix-caching", "--middleware a.b",
        "--generation-config vllm", "--logprobs-mode raw_logprobs", "--additional-config.k 3", "--api-key a b",
        "--generation-config auto",
    ), ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle() -> Any:
    prompts = ((128, 256), (512, 512), (2048, 4096))
    spec = SimpleNamespace(batch=4, max_len=256, usable=9, dtype="fp32", prompts=prompts)
    manifest = SimpleNamespace(has_weights=True)
    return SimpleNamespace(path="demo", spec=spec, manifest=manifest, files={TOKENIZER})


@pytest.fixture(scope="module")
def parse(bundle: Any) -> Callable[[str], Namespace]:
    """Reads a command as `vllm serve` does, whose parser gets an option that a later vLLM adds."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    parser.add_argument(OF_A_LATER_VLLM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "served_bundle", lambda: bundle)
        patch.setattr(platform, "model_folder", lambda _: "folder")
        platform.BundlePlatform.pre_register_and_update(parser)

    def command(line: str) -> Namespace:
        chosen: Namespace = parser.parse_args(["demo", *shlex.split(line)])
        return chosen

    command.parser = parser  # type: ignore[attr-defined]
    return command


@pytest.mark.parametrize("line", COMMANDS)
def test_an_option_is_followed_or_refused_in_a_sentence(line: str, parse: Callable[[str], Namespace]) -> None:
    if not (sentence := COMMANDS[line]):
        assert parse(line).generation_config in ("folder", "vllm")
        return
    with pytest.raises(UserError) as refused:
        parse(line)
    option = re.split("[ .]", line, maxsplit=1)[0]
    assert str(refused.value).startswith(sentence if sentence != "--" else f"{option} is ")


def test_every_option_of_this_vllm_is_on_the_list_or_refused(parse: Any, bundle: Any) -> None:
    """And each on the list is one of this vLLM's."""
    every = {action.dest.replace("_", "-") for action in parse.parser._actions} - {"help", "model-tag"}
    followed = {option for part in FOLLOWED.values() for option in part.split()}
    assert followed <= every
    defaults = parse("")
    for option in every - followed:
        chosen = Namespace(**vars(defaults) | {option.replace("-", "_"): "another value"})
        value = "given" if option == "hf-token" else "another value"
        with pytest.raises(UserError, match=f"^--{option} is {value}; "):
            platform.check_options(bundle, chosen, defaults)


def test_a_command_has_the_bundle_s_defaults(parse: Any) -> None:
    """A chunk is at most 512 rows, for which running requests wait."""
    chosen = parse("--middleware a.b")
    assert (chosen.tokenizer, chosen.hf_config_path, chosen.max_num_batched_tokens) == ("folder", "folder", 512)
    assert chosen.enable_prefix_caching
    assert chosen.middleware == ["serve.drain.DrainMiddleware", "a.b"]


def test_a_bundle_without_weights_or_tokenizer_is_not_served(parse: Any, bundle: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "files", ())
        with pytest.raises(UserError, match="demo has no tokenizer"):
            parse("")
        parse("--skip-tokenizer-init")
        patch.setattr(bundle.manifest, "has_weights", False)
        with pytest.raises(UserError, match="demo was built without weights"):
            parse("--skip-tokenizer-init")


def test_the_page_lists_the_options_that_are_followed() -> None:
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ((?:`--[a-z0-9-]+`(?:, )?)+) \|$", page, re.MULTILINE)
    assert {part: re.findall(r"--([a-z0-9-]+)", row) for part, row in rows} == {
        part: sorted(options.split()) for part, options in FOLLOWED.items()
    }


QWEN3 = "{% if tools %}<tools></tools><tool_call>{% endif %}<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "line", "added"),
    [
        (QWEN3, "", "--reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes"),
        (f"{QWEN3}<function=", "--reasoning-parser qwen3", "--enable-auto-tool-choice --tool-call-parser qwen3_xml"),
        (QWEN3, "--reasoning-parser qwen3 --tool-call-parser hermes", ""),
        ("{{ messages }}", "", ""),
    ],
)
def test_the_parsers_that_a_chat_template_needs_are_named(template: str, line: str, added: str, parse: Any) -> None:
    assert options.suggest_parsers(template, parse(line)).strip() == added
