"""S3 as a remote, through boto3: parallel parts, retries with growing pauses, errors as sentences.

Credentials come from the standard AWS chain alone; a message repeats no text of an error, which may quote them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)

from compile.bundle import watch
from compile.bundle.remote import SCHEME, Told
from compile.bundle.watch import Watch
from model.errors import UserError
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST_BYTES

# tried this often, with growing pauses, before a request is given up; AWS_MAX_ATTEMPTS overrides it
_ATTEMPTS = "6"
_GOES_ON = "; the same command goes on from here"
# seconds between the reads of an answer that was cut
_PAUSES = (0.2, 1.0, 3.0)
_ABSENT = ("404", "NoSuchKey", "NotFound")
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict")


class S3:
    """A prefix of a bucket, through boto3: parallel parts, retries with growing pauses."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.watch = Watch()
        with self._sentences():
            self.client, self.transfer = _client()
        # before a request, and before one is tried again
        for event in ("before-send.s3", "needs-retry.s3"):
            self.client.meta.events.register(event, self._refuse_stalled)

    def _refuse_stalled(self, **_: Any) -> None:
        if self.watch.stalled:
            raise UserError(
                f"{self._where('')}: the server moved less than {watch.LEAST_BYTES >> 10} KiB in "
                f"{watch.STALLED_SECONDS:g} seconds; check the endpoint and the network, the same command goes on"
            )

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(key)}

    def size(self, key: str) -> int | None:
        with self._sentences(key), _unless(*_ABSENT) as found:
            found.append(self.client.head_object(**self._at(key))["ContentLength"])
        return found[0] if found else None

    def get(self, key: str, file: Path, told: Told) -> None:
        with self._sentences(key, _GOES_ON):
            self.client.download_file(self.bucket, self._key(key), str(file), Callback=told, Config=self.transfer)

    def put(self, file: Path, key: str, told: Told) -> None:
        with self._sentences(key, _GOES_ON):
            self.client.upload_file(str(file), self.bucket, self._key(key), Callback=told, Config=self.transfer)

    def read(self, key: str) -> bytes | None:
        with self._sentences(key), _unless(*_ABSENT) as found:
            found.append(self._beginning(key))
        return found[0] if found else None

    def _beginning(self, key: str) -> bytes:
        """As much of an object as a manifest may have, and a byte more; boto3 retries requests, not bodies."""
        for pause in (*_PAUSES, None):
            body = self.client.get_object(**self._at(key))["Body"]
            try:
                content: bytes = body.read(MANIFEST_BYTES + 1)
                # the second read holds the length against the head's
                return content if len(content) > MANIFEST_BYTES else content + body.read()
            except (ResponseStreamingError, IncompleteReadError, HTTPClientError):
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def sha256(self, key: str, told: Told) -> str | None:
        digest = hashlib.sha256()
        # a file that cannot seek: its parts are written in order
        sink = SimpleNamespace(write=digest.update)
        with self._sentences(key), _unless(*_ABSENT) as found:
            self.client.download_fileobj(self.bucket, self._key(key), sink, Callback=told, Config=self.transfer)
            found.append(digest.hexdigest())
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

    def _where(self, key: str) -> str:
        return f"{SCHEME}{self.bucket}/{self._key(key)}".rstrip("/")

    @contextlib.contextmanager
    def _sentences(self, key: str = "", then: str = "") -> Iterator[None]:
        """Turn boto3's errors into one sentence, without their text, which may quote credentials."""
        try:
            with self.watch.request():
                yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            self._refuse_stalled()
            raise UserError(f"{self._where(key)}: {_reason(error)}{then}") from None


def _client() -> tuple[Any, TransferConfig]:
    asked = os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS)
    if not asked.isdecimal() or not 1 <= int(asked) <= 100:
        raise UserError(f"AWS_MAX_ATTEMPTS is {shown(asked)}; give a whole number from 1 to 100, or unset it")
    config = Config(retries={"mode": "standard", "total_max_attempts": int(asked)}, connect_timeout=5, read_timeout=60)  # type: ignore[arg-type, unused-ignore]
    try:
        client = boto3.Session().client("s3", config=config)
    except ValueError as error:
        # boto3 does not name this one: the value is in the environment or in the profile
        raise UserError(
            "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or the profile's endpoint_url is no address; "
            "give one with its scheme, as http://localhost:9000"
        ) from error
    return client, TransferConfig(multipart_chunksize=16 << 20, max_concurrency=8)


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
    "ProfileNotFound": "AWS_PROFILE names a profile that is in no configuration file; correct it or unset it",
    "ConfigParseError": "the AWS configuration file cannot be read; correct it",
    "ConfigNotFound": "the AWS configuration file is not there; correct AWS_CONFIG_FILE or unset it",
    "NoRegionError": "no region is set; set AWS_DEFAULT_REGION",
    "InvalidRegionError": "the region is not the name of one; correct AWS_DEFAULT_REGION",
    "ParamValidationError": "the bucket's name is not one that S3 takes; correct the address",
    "InvalidEndpointConfigurationError": "the endpoint in the AWS configuration is no address; correct it",
    "UnknownServiceError": "boto3 does not know S3 here; check AWS_DATA_PATH",
    "CredentialRetrievalError": "the credentials could not be fetched; log in again",
    "SSOTokenLoadError": "the login has expired; log in again",
    "UnauthorizedSSOTokenError": "the login has expired; log in again",
    "FlexibleChecksumError": "the bytes that arrived have a different checksum from those that were sent there; "
    "if that stays so, compile.store verify says what to do",
}


def _reason(error: Exception) -> str:
    # boto3 wraps a transfer's errors: the first cause with a known name decides
    seen: BaseException | None = error
    while seen is not None:
        code = seen.response["Error"]["Code"] if isinstance(seen, ClientError) else ""
        if code:
            return _BY_CODE.get(code, f"the server answered {code}, also when tried again")
        if type(seen).__name__ in _BY_KIND:
            return _BY_KIND[type(seen).__name__]
        seen = seen.__cause__ or seen.__context__
    for known, sentence in _BY_CODE.items():
        if f"({known})" in str(error):
            return sentence
    return f"the connection was lost ({type(error).__name__}), also when tried again"


@contextlib.contextmanager
def _unless(*codes: str) -> Iterator[list[Any]]:
    """Swallow an answer with one of these codes; the list holds the result of any other request."""
    given: list[Any] = []
    try:
        yield given
    except ClientError as error:
        if error.response["Error"]["Code"] not in codes:
            raise
