"""S3 as a remote, through boto3: parallel parts, retries with growing pauses, errors as sentences.

Credentials come from the standard AWS chain alone; nothing that an error may quote is repeated.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from compile.bundle.remote import SCHEME, Told
from model.errors import UserError

# tried this often, with growing pauses, before a request is given up; AWS_MAX_ATTEMPTS overrides it
_ATTEMPTS = "6"
_ABSENT = ("404", "NoSuchKey", "NotFound")
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict")


class S3:
    """A prefix of a bucket, through boto3: parallel parts, retries with growing pauses."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        with self._sentences():
            self.client, self.transfer = _client()

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(key)}

    def size(self, key: str) -> int | None:
        with self._sentences(key), _unless(*_ABSENT) as found:
            found.append(self.client.head_object(**self._at(key))["ContentLength"])
        return found[0] if found else None

    def get(self, key: str, file: Path, told: Told) -> None:
        with self._sentences(key):
            self.client.download_file(self.bucket, self._key(key), str(file), Callback=told, Config=self.transfer)

    def put(self, file: Path, key: str, told: Told) -> None:
        with self._sentences(key):
            self.client.upload_file(str(file), self.bucket, self._key(key), Callback=told, Config=self.transfer)

    def read(self, key: str) -> bytes | None:
        with self._sentences(key), _unless(*_ABSENT) as found:
            found.append(self.client.get_object(**self._at(key))["Body"].read())
        return found[0] if found else None

    def put_new(self, key: str, content: bytes) -> bool:
        # IfNoneMatch lets the server decide between two writers; the look before it serves servers without it
        if self.size(key) is not None:
            return False
        with self._sentences(key), _unless(*_TAKEN) as written:
            written.append(self.client.put_object(**self._at(key), Body=content, IfNoneMatch="*"))
        return bool(written)

    def listing(self) -> Iterator[str]:
        start = f"{self.prefix}/" if self.prefix else ""
        with self._sentences():
            for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start):
                for entry in page.get("Contents", ()):
                    yield entry["Key"][len(start) :]

    @contextlib.contextmanager
    def _sentences(self, key: str = "") -> Iterator[None]:
        """Turn boto3's errors into one sentence; nothing that they may quote is repeated."""
        where = f"{SCHEME}{self.bucket}/{self._key(key)}".rstrip("/")
        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise UserError(f"{where}: {_reason(error)}; the same command goes on from here") from None


def _client() -> tuple[Any, TransferConfig]:
    retries = {"mode": "standard", "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))}
    config = Config(retries=retries, connect_timeout=10, read_timeout=60)  # type: ignore[arg-type, unused-ignore]
    return boto3.Session().client("s3", config=config), TransferConfig(multipart_chunksize=16 << 20, max_concurrency=8)


_BY_CODE = {
    "AccessDenied": "access was denied: the credentials may not do this; ask for the permission",
    # the answer to HEAD has no body, and so no reason
    "403": "access was denied: the credentials may not do this, or this machine's clock is wrong; check both",
    "InvalidAccessKeyId": "the access key is not known there; check which credentials the AWS chain finds",
    "SignatureDoesNotMatch": "the signature was refused; check the secret key and the region",
    "ExpiredToken": "the session token has expired; log in again",
    "NoSuchBucket": "there is no such bucket; create it or correct the name",
    "NoSuchKey": "the object is gone; push the bundle again",
    "404": "the object is gone; push the bundle again",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than the server allows; set the clock",
    "SlowDown": "the server asked to slow down, and still did after every retry; wait a little",
    "503": "the server was too busy, and still was after every retry; wait a little",
    "BadDigest": "the bytes that arrived are not those that were sent; the connection damages data",
}
_BY_KIND = {
    "NoCredentialsError": "no credentials were found in the AWS chain (environment, profile, instance role)",
    "PartialCredentialsError": "the credentials are incomplete; check environment and profile",
    "EndpointConnectionError": "the server could not be reached; check network, region and endpoint",
    "FlexibleChecksumError": "the bytes that arrived have another checksum than those that were sent there; "
    "if that stays so, push the bundle with --again",
}


def _reason(error: Exception) -> str:
    # boto3 wraps what a transfer met: the first cause with a known name speaks
    seen: BaseException | None = error
    while seen is not None:
        code = seen.response["Error"]["Code"] if isinstance(seen, ClientError) else ""
        if code:
            return _BY_CODE.get(code, f"the server answered {code}, also when asked again")
        if type(seen).__name__ in _BY_KIND:
            return _BY_KIND[type(seen).__name__]
        seen = seen.__cause__ or seen.__context__
    for known, sentence in _BY_CODE.items():
        if f"({known})" in str(error):
            return sentence
    return f"the connection was lost ({type(error).__name__}), also when tried again"


@contextlib.contextmanager
def _unless(*codes: str) -> Iterator[list[Any]]:
    """Swallow an answer with one of these codes; the list holds what the request gave otherwise."""
    given: list[Any] = []
    try:
        yield given
    except ClientError as error:
        if error.response["Error"]["Code"] not in codes:
            raise
