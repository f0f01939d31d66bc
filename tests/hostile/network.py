"""Random faults between the store and an S3 server of this machine: a sentence, and the next try is whole."""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from pathlib import Path
from unittest import mock

import boto3
from moto.server import ThreadedMotoServer

from compile.store import pull, push, verify
from tests.compile.fault_proxy import Fault, Proxy, proxied
from tests.hostile.series import Series, refusal
from trnspec.bundle.manifest import MANIFEST
from trnspec.bundle.opening import open_bundle

DRAFTERS = ("drop", "SlowDown", "AccessDenied", "RequestTimeTooSkewed", "truncate", "flip")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "2",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


def faults(bundle: Path, scratch: Path, seed: int, count: int, seconds: float = 1e9) -> Series:
    """Pushes and pulls with one kind of fault each, once or always; then the same without."""
    # the server tells of every request
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        with proxied(port) as proxy:
            endpoint = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{proxy.port}"}
            with mock.patch.dict(os.environ, ENVIRONMENT | endpoint):
                boto3.client("s3").create_bucket(Bucket="bucket")
                return _series(bundle, scratch, random.Random(seed), count, seconds, proxy)
    finally:
        server.stop()


def _series(bundle: Path, scratch: Path, rng: random.Random, count: int, seconds: float, proxy: Proxy) -> Series:
    series, begin, copy = Series("S3 faults survived"), time.monotonic(), scratch / "copy"
    while series.tried < count and time.monotonic() - begin < seconds:
        address = f"s3://bucket/team/{rng.randrange(1 << 60)}"
        pulling = rng.random() < 0.5
        if pulling:
            push(bundle, address)
        method = rng.choice(("GET", "HEAD") if pulling else ("PUT", "HEAD"))
        kind = rng.choice(DRAFTERS if method == "GET" else DRAFTERS[:4])
        what = f"{kind} of {method} in a {'pull' if pulling else 'push'}"
        proxy.faults = [Fault(kind, method, rng.choice(("objects", MANIFEST)), rng.choice((1, 10**6)))]
        fault = refusal((lambda a=address: pull(a, copy)) if pulling else (lambda a=address: push(bundle, a)))
        if fault == "was accepted":
            # a fault that passes, or met nothing, may be survived; then everything is there
            fault = ""
        elif not fault and pulling and (copy / MANIFEST).exists():
            fault = "a manifest appeared"
        proxy.faults = []
        push(bundle, address)
        open_bundle(pull(address, copy))
        series.count(what, fault or "; ".join(verify(address)))
        shutil.rmtree(copy)
    return series
