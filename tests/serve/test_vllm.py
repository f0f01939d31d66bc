"""vLLM's own configuration, requests and scheduler with our platform and worker, over a runner without a model."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.errors import UserError
from tests.engine.machine import BATCH, BLOCK, CONFIG, LENGTH, K, Machine, V
from tests.model.demo_bundle import ROOT
from tests.serve.server import NO_VLLM
from trnspec.engine.engine import Engine
from trnspec.engine.masks import mask_of
from trnspec.engine.text import TOKENIZER

pytest.importorskip("vllm", reason=NO_VLLM)
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from serve import platform
from serve import worker as module
from serve.params import engine_request
from serve.platform import BundlePlatform
from serve.scheduler import BundleScheduler

# of Machine: its sampling fails with this seed
BROKEN = 7
MASKED = StructuredOutputsParams(regex="a")


class Prepared(Machine):
    """A runner that knows which graphs were prepared, and that refuses rows without a block."""

    def __init__(self) -> None:
        super().__init__(strict=True)
        self.broken = BROKEN

    def prepare(self, key: Any) -> None:
        self.loaded.add(key)


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bundle with the graphs of CONFIG, served by this process."""
    sizes = {"batch": BATCH, "max_len": LENGTH, "k": K, "ks": CONFIG.ks, "rows": K + 1, "pool": CONFIG.pool}
    spec = SimpleNamespace(**sizes, drafter="chain", target="t", dtype="fp32", tp=1, prompts=CONFIG.prompts)
    manifest = SimpleNamespace(has_weights=True, digest="0")
    made = SimpleNamespace(path="demo", spec=spec, manifest=manifest, files={TOKENIZER}, runner=Prepared())
    monkeypatch.setattr(platform, "served_bundle", lambda: made)
    monkeypatch.setattr(platform, "engine_config", lambda _: CONFIG)
    monkeypatch.setattr(platform, "end_while_starting", lambda: None)
    return made


def _vllm_config(**options: Any) -> Any:
    """vLLM's configuration of a command with these options, before a platform has changed it."""
    model = ModelConfig(str(ROOT / "demo/target"), max_model_len=LENGTH, dtype="float32")
    scheduler = SchedulerConfig(
        max_num_seqs=BATCH, max_num_batched_tokens=256, max_model_len=LENGTH, is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )  # fmt: skip
    config = VllmConfig(model, CacheConfig(enable_prefix_caching=True), scheduler_config=scheduler)
    config.additional_config = options
    return config


def _worker(bundle: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that is ready to serve the bundle."""
    bundle.plan = bundle.runner.bundle.plan
    for name, value in {
        "served_bundle": bundle, "open_bundle": bundle, "same_bundle": bundle, "engine_config": CONFIG,
        "load_runner": bundle.runner,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    worker: Any = module.BundleWorker.__new__(module.BundleWorker)
    worker.vllm_config = config
    worker.load_model()
    worker.grammars = SimpleNamespace(of=lambda name, params: Grammar())
    worker.compile_or_warm_up_model()
    return worker


def _mask(ids: Sequence[int]) -> np.ndarray:
    return mask_of(random.Random(f"{list(ids)}").sample(range(V), 12), V)


class Grammar:
    """In the place of ours: it holds vLLM's mask against its own."""

    next: np.ndarray | None = None

    def __call__(self, ids: Sequence[int]) -> np.ndarray:
        mask, self.next = self.next, None
        assert mask is None or (mask == _mask(ids)).all()
        return _mask(ids)


class Masks:
    """In the place of vLLM's StructuredOutputManager: a row for each draft and one more, of which the first is read."""

    def grammar_bitmask(self, requests: Any, names: list[str], drafts: dict[str, list[int]]) -> np.ndarray:
        rows = [
            [_mask(requests[name].output_token_ids), *(_mask([-1]) for _ in drafts.get(name, ()))] for name in names
        ]
        return np.array([row for some in rows for row in some])

    def accept_tokens(self, request: Any, ids: list[int]) -> bool:
        return True

    def validate_tokens(self, request: Any, ids: list[int]) -> list[int]:
        return ids


def _requests(count: int) -> list[tuple[list[int], Any]]:
    """Prompts of which many begin alike, with every kind of parameters."""
    rng = random.Random(3)
    texts = [[rng.randrange(1, V) for _ in range(400)] for _ in range(2)]
    kinds: list[dict[str, Any]] = [
        {}, {"frequency_penalty": 0.5}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"structured_outputs": MASKED},
        {"min_tokens": 9, "stop_token_ids": [5, 6]},
    ]  # fmt: skip
    requests = []
    for n in range(count):
        ids = rng.choice(texts)[: rng.choice((1, 100, 127, 128, 129, 240, 370))]
        ids = [*ids, *(rng.randrange(1, V) for _ in range(rng.choice((0, 1, 20))))]
        length = rng.choice((5, 20, 90))
        params = SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=length, **kinds[n % len(kinds)])
        requests.append((ids, params))
    return requests


class Client:
    """A vLLM engine's loop around our scheduler and worker; `outputs` by request, `events` of our engine."""

    def __init__(self, worker: Any) -> None:
        groups = [KVCacheGroupSpec(["blocks"], worker.get_kv_cache_spec()["blocks"])]
        blocks = KVCacheConfig(num_blocks=CONFIG.pool, kv_cache_tensors=[], kv_cache_groups=groups)
        init_none_hash(sha256)
        self.worker, self.hasher = worker, get_request_block_hasher(BLOCK, sha256)
        self.scheduler: Any = BundleScheduler(worker.vllm_config, blocks, Masks(), BLOCK, log_stats=True)
        self.outputs: dict[str, list[Any]] = {}
        self.preempted = self.hits = self.drafted = self.accepted = 0

    def add(self, name: str, ids: list[int], params: Any) -> None:
        request = Request(name, ids, params, None, block_hasher=self.hasher)
        if request.structured_output_request:
            request.structured_output_request.grammar = SimpleNamespace()
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        self.preempted += len(scheduled.preempted_req_ids or ())
        self.hits += sum(data.num_computed_tokens for data in scheduled.scheduled_new_reqs)
        output = self.worker.execute_model(scheduled)
        masks = self.scheduler.get_grammar_bitmask(scheduled)
        output = output or self.worker.sample_tokens(masks)
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in outputs.outputs:
                self.outputs[one.request_id].append(one)
            if outputs.scheduler_stats and (stats := outputs.scheduler_stats.spec_decoding_stats):
                self.drafted += stats.num_draft_tokens
                self.accepted += stats.num_accepted_tokens
        if (placeholders := self.worker.take_draft_token_ids()) is not None:
            self.scheduler.update_draft_token_ids(placeholders)


def test_tokens_and_scores_are_those_of_each_request_by_itself(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix hits, chunks, preemption, arrivals and departures, in steps of any k."""
    import time
    t0 = time.process_time()
    config, requests, rng = _vllm_config(), _requests(36), random.Random(4)
    print("config", time.process_time() - t0)
    BundlePlatform.check_and_update_config(config)
    config.cache_config.num_gpu_blocks = config.cache_config.num_gpu_blocks_override
    client = Client(_worker(bundle, config, monkeypatch))
    requested = [engine_request(CONFIG, tuple(ids), params, Grammar()) for ids, params in requests]
    expected = [Engine(Prepared(), CONFIG).run([request])[0] for request in requested]
    print("expected", time.process_time() - t0)
    waiting, gone = list(range(len(requests))), set[int]()
    while waiting or client.scheduler.has_requests():
        while waiting and rng.random() < 0.3:
            n = waiting.pop(0)
            client.add(str(n), *requests[n])
        if client.scheduler.running and rng.random() < 0.01:
            name = rng.choice(client.scheduler.running).request_id
            client.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            gone.add(int(name))
        client.step()
    print("served", time.process_time() - t0)
    for n, result in enumerate(expected):
        outputs = client.outputs[str(n)]
        ids = [token for one in outputs for token in one.new_token_ids]
        print(n, len(ids), len(result.ids), [o.finish_reason for o in outputs][-1:], result.reason)
        assert ids == result.ids[: len(ids)]
        assert n in gone or len(ids) == len(result.ids)
    print(client.preempted, client.hits, gone, client.drafted, client.accepted)
    assert client.worker.numbers == client.worker.requests == {}


# an attribute of vLLM's configuration or of the bundle, and the value that is refused
OPTIONS: list[tuple[str, object, str]] = [
    ("config.speculative_config", SimpleNamespace(method="ngram"), "speculative-config is ngram; the bundle has"),
    ("config.parallel_config.data_parallel_size", 2, "data-parallel-size is 2; start one server"),
    ("config.parallel_config.world_size", 2, "the parallel size is 2; one process runs all ranks"),
    ("config.model_config.max_model_len", 256, "max-model-len is 256; the bundle's is 512"),
    ("config.scheduler_config.max_num_seqs", 4, "max-num-seqs is 4; the bundle has 3 slots"),
    ("config.scheduler_config.enable_chunked_prefill", False, "enable-chunked-prefill is False"),
    ("config.cache_config.num_gpu_blocks_override", 4, "is 4; this bundle takes 5 to 9"),
    ("config.cache_config.num_gpu_blocks_override", 10, "is 10; this bundle takes 5 to 9"),
    ("config.additional_config", {"k": 2}, "k is 2; this bundle's graphs have k 0, 1, 3"),
    ("bundle.manifest.has_weights", False, "demo was built without weights"),
    ("bundle.files", set(), "demo has no tokenizer"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), OPTIONS, ids=[f"{path}-{value}" for path, value, _ in OPTIONS])
def test_an_option_that_the_bundle_cannot_follow(bundle: Any, path: str, value: object, sentence: str) -> None:
    config = _vllm_config()
    *names, last = path.split(".")
    setattr(functools.reduce(getattr, names, SimpleNamespace(config=config, bundle=bundle)), last, value)
    with pytest.raises(UserError, match=sentence):
        BundlePlatform.check_and_update_config(config)


@pytest.mark.parametrize("blocks", [None, 5, 9])
@pytest.mark.parametrize("options", [{}, {"speculation": False}, {"k": 0, "acceptance": "summary"}], ids=str)
def test_a_bundle_s_limits_are_vllm_s_settings(bundle: Any, options: dict[str, Any], blocks: int | None) -> None:
    """vLLM calls the platform once in each process with the same configuration."""
    config = _vllm_config(**options)
    config.cache_config.num_gpu_blocks_override = blocks
    for _ in range(2):
        BundlePlatform.check_and_update_config(config)
        scheduler, cache, speculative = config.scheduler_config, config.cache_config, config.speculative_config
        assert (scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold) == (256 + 3 * 4, 256)
        assert (cache.block_size, cache.num_gpu_blocks_override) == (BLOCK, blocks or CONFIG.pool)
        assert not scheduler.async_scheduling
        assert (speculative.num_speculative_tokens if speculative else 0) == (
            K if options.get("speculation", True) else 0
        )
        acceptance = config.observability_config.per_request_spec_decode_metrics
        assert acceptance == options.get("acceptance", "none")


def test_the_command_line_has_the_bundle_s_defaults(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is at most 512 rows, for which running requests wait."""
    monkeypatch.setattr(platform, "model_folder", lambda _: "folder")
    bundle.spec.prompts = ((128, 128), (512, 512), (2048, 4096))
    defaults = dict[str, Any]()
    platform.BundlePlatform.pre_register_and_update(SimpleNamespace(set_defaults=defaults.update))
    assert defaults.items() >= {
        "tokenizer": "folder", "max_model_len": LENGTH, "max_num_seqs": BATCH, "max_num_batched_tokens": 512,
        "enable_prefix_caching": True, "enable_chunked_prefill": True,
    }.items()  # fmt: skip
    assert defaults["middleware"] == ["serve.drain.DrainMiddleware"]


TOKENS = {"type": "token", "prompt_token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("prompt", "changes", "sentence"),
    [
        (TOKENS, {"temperature": 1e31}, "temperature is 1e"),
        (TOKENS, {"thinking_token_budget": 5}, "thinking_token_budget is not served"),
        ({"type": "token", "prompt_token_ids": [V]}, {}, f"the prompt holds the id {V}"),
        ({"type": "embeds"}, {}, "text or token ids"),
        (TOKENS, None, "no other task"),
    ],
)
def test_a_request_that_cannot_be_served_is_vllm_s_error(
    bundle: Any, prompt: Any, changes: dict[str, Any] | None, sentence: str
) -> None:
    params = SamplingParams()
    for name, value in (changes or {}).items():
        setattr(params, name, value)
    with pytest.raises(VLLMValidationError, match=sentence):
        BundlePlatform.validate_request(prompt, object() if changes is None else params)


def test_a_sampled_request_without_a_seed_gets_one(bundle: Any) -> None:
    given = [SamplingParams(temperature=t, seed=seed) for t, seed in ((0.5, None), (0.5, None), (0.5, 3), (0.0, None))]
    for params in given:
        BundlePlatform.validate_request(TOKENS, params)
    one, two, *others = (params.seed for params in given)
    assert one != two
    assert 0 <= one < 2**53
    assert others == [3, None]
