"""The Jobs: both bundles compiled on local disk and pushed, the load test, the quality check."""

from __future__ import annotations

from deploy.iam import BENCH, COMPILE
from deploy.pods import (
    RESULTS,
    SCRATCH,
    TMP_GIB,
    Manifest,
    api_key,
    environment,
    job,
    mount,
    on_device_node,
    pod,
    resources,
    scratch,
    small,
    tool,
)
from deploy.server import BASELINE, SPECULATIVE, expected
from deploy.storage import MOUNT, bucket_mount, bucket_volume
from deploy.values import Values

_DAY = 86400
# the prompts of the equality check: every set there is
_EVERY_PROMPT = "pod,article,synthetic"


def build_command(values: Values, variant: str) -> list[str]:
    """compile.build for the pair, or for the target alone, onto local disk; nothing else differs."""
    m = values.model
    folder = f"{MOUNT}/{m.draft_folder}"
    # a chain's shape is a preset's; that of a different draft is in its folder
    draft = {"draft": m.draft if m.drafter == "chain" else folder, "draft-checkpoint": folder} if m.has_draft else {}
    drafted = {"drafter": m.drafter} | draft if variant == SPECULATIVE else {}
    flags = {
        "target": m.target,
        "checkpoint": f"{MOUNT}/{m.target_folder}",
        **drafted,
        "tp": m.tp,
        "k": expected(values, variant).k,
        "batch": m.batch,
        "max-len": m.max_len,
        "dtype": m.dtype,
        # refuses to begin where the SDK is not: a bundle without model.pt cannot be served
        "toolchain": "neuron",
        "out": f"{SCRATCH}/{values.bundle_name(variant)}",
    }
    return ["python", "-m", "compile.build", *(p for n, v in flags.items() for p in (f"--{n}", str(v)))]


def _push(values: Values, variant: str) -> Manifest:
    name = values.bundle_name(variant)
    called = ["python", "-m", "deploy.push", f"{SCRATCH}/{name}", values.s3(f"bundles/{name}")]
    called += expected(values, variant).arguments
    return tool(values, "push", called, [mount("scratch", SCRATCH)], _sized(values, 8, 32))


def _sized(values: Values, cpu: int, memory_gib: int) -> Manifest:
    # a scratch volume counts against its containers' disk
    return resources(cpu, f"{memory_gib}Gi", f"{values.compile.disk_gib + TMP_GIB}Gi")


def compile_bundle(values: Values, variant: str) -> Manifest:
    """Build a server's bundle, then push it; the store's manifest is the last thing written."""
    mounts = [mount("scratch", SCRATCH), bucket_mount()]
    sized = _sized(values, values.compile.cpu, values.compile.memory_gib)
    build = tool(values, "build", build_command(values, variant), mounts, sized)
    spec = pod(
        values,
        COMPILE,
        [_push(values, variant)],
        [scratch("scratch", values.compile.disk_gib), bucket_volume(values)],
        initContainers=[build],
        **on_device_node(values),
    )
    return job(values, f"compile-{variant}", spec, values.compile.deadline_seconds)


def _serving(values: Values, out: str, **more: str | int) -> list[str]:
    flags = {
        "baseline": values.url(BASELINE),
        "speculative": values.url(SPECULATIVE),
        "model": values.model.target,
        "temperature": 0.0,
        "seed": 0,
        "thinking": "off",
        "max-tokens": values.load_test.max_tokens,
        "out": out,
    } | more
    called = (part for n, v in flags.items() for part in (f"--{n.replace('_', '-')}", str(v)))
    return ["python", "-m", "bench.serving", *called]


def _client(values: Values, container: Manifest) -> Manifest:
    """A container that calls the servers, with their key."""
    return container | {"env": [*container["env"], api_key(values, "OPENAI_API_KEY")]}


def _kept(values: Values, part: str, command: list[str]) -> list[str]:
    return ["python", "-m", "deploy.keep", RESULTS, values.s3(f"results/{part}"), "--", *command]


def load_test(values: Values) -> Manifest:
    """Measure both servers once and publish; the rows and the report are kept whatever comes out."""
    t, m = values.load_test, values.model
    measured = _serving(
        values,
        f"{RESULTS}/serving",
        prompt_set=t.prompt_set,
        requests=t.requests,
        concurrency=t.concurrency,
        k=m.k,
        draft=m.draft_title,
        cloudwatch=t.cloudwatch_namespace,
    )
    mounts = [mount("results", RESULTS)]
    container = _client(values, tool(values, "load-test", _kept(values, "load-test", measured), mounts))
    return job(values, "load-test", pod(values, BENCH, [container], [scratch("results", 10)]), _DAY)


def quality(values: Values) -> Manifest:
    """Every prompt's greedy answer of both servers, token for token; only if all agree, lm-eval on both."""
    mounts = [mount("results", RESULTS)]
    compared = _serving(
        values,
        f"{RESULTS}/equality",
        prompt_set=_EVERY_PROMPT,
        requests=1,
        rounds=1,
        concurrency=1,
        warmup=1,
        k=values.model.k,
    )
    equality = _client(values, tool(values, "equality", _kept(values, "equality", compared), mounts))
    evaluated = [_evaluated(values, variant) for variant in (BASELINE, SPECULATIVE)]
    kept = tool(values, "keep", ["python", "-m", "deploy.keep", RESULTS, values.s3("results/quality")], mounts)
    volumes = [scratch("results", 10), scratch("cache", 10)]
    return job(values, "quality", pod(values, BENCH, [kept], volumes, initContainers=[equality, *evaluated]), _DAY)


def _evaluated(values: Values, variant: str) -> Manifest:
    q = values.quality
    at = f"model={values.model.target},base_url={values.url(variant)}/v1/chat/completions"
    called = [
        "lm_eval", "--model", "local-chat-completions", "--model_args",
        f"{at},num_concurrent={values.model.batch},max_retries=3,tokenized_requests=False",
        "--tasks", q.tasks, "--num_fewshot", "0", "--apply_chat_template",
        # Qwen3's own switch, because lm-eval passes no template arguments
        "--system_instruction", "/no_think",
        "--gen_kwargs", f"temperature=0,max_gen_toks={q.max_gen_toks}",
        "--output_path", f"{RESULTS}/lm-eval/{variant}", "--log_samples",
    ]  # fmt: skip
    made = tool(values, f"lm-eval-{variant}", called, [mount("results", RESULTS), mount("cache", "/cache")], small())
    return made | {
        "image": values.images.lm_eval,
        "env": [*environment({"HF_HOME": "/cache", "HOME": "/tmp"}), api_key(values, "OPENAI_API_KEY")],
    }
