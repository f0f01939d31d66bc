"""Random faults between the store and an S3 server of this machine: a sentence, and the next try is whole."""

from __future__ import annotations

import os
import random
import shutil
import time
from functools import partial
from pathlib import Path
from unittest import mock

import boto3

from compile.store import pull, push, verify
from tests.compile.faulty_s3 import Fault, FaultyS3, faulty_s3
from tests.hostile.series import Series, refusal
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle

KINDS = ("drop", "SlowDown", "AccessDenied", "RequestTimeTooSkewed", "truncate", "flip")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2", "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}  # fmt: skip


def faults(bundle: Path, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """Pushes and pulls with one kind of fault each, once or always; then the same without."""
    with faulty_s3() as server:
        endpoint = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{server.port}"}
        with mock.patch.dict(os.environ, ENVIRONMENT | endpoint):
            boto3.client("s3").create_bucket(Bucket="bucket")
            return _series(bundle, scratch, random.Random(seed), count, seconds, server)


def _series(bundle: Path, scratch: Path, rng: random.Random, count: int, seconds: float, server: FaultyS3) -> Series:
    series, begin, copy = Series("S3 faults survived"), time.monotonic(), scratch / "copy"
    while series.tried < count and time.monotonic() - begin < seconds:
        address = f"s3://bucket/team/{rng.randrange(1 << 60)}"
        pulling = rng.random() < 0.5
        if pulling:
            push(bundle, address)
        method = rng.choice(("GET", "HEAD") if pulling else ("PUT", "HEAD"))
        kind = rng.choice(KINDS if method == "GET" else KINDS[:4])
        server.faults = [Fault(kind, method, rng.choice(("objects", MANIFEST)), rng.choice((1, 10**6)))]
        fault = refusal(partial(pull, address, copy) if pulling else partial(push, bundle, address))
        if fault == "was accepted":
            # a fault that passes, or met nothing, may be survived; then everything is there
            fault = ""
        elif not fault and pulling and (copy / MANIFEST).exists():
            fault = "a manifest appeared"
        server.faults = []
        push(bundle, address)
        open_bundle(pull(address, copy))
        what = f"{kind} of {method} in a {'pull' if pulling else 'push'}"
        series.count(what, fault or "; ".join(verify(address)))
        shutil.rmtree(copy)
    return series
