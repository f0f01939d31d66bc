"""S3 as a remote, through boto3: parallel parts, retries with growing pauses, errors as sentences.

Credentials come from the standard AWS chain; a sentence repeats no text of an error, which may quote them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from compile.bundle.remote import SCHEME
from model.errors import UserError
from trnspec.bundle.opening import ProgressFn

# the longest time of a request, retries included, and what each byte adds to it: of a server that drips, too
REQUEST_SECONDS, LEAST_BYTES_PER_SECOND = 120.0, 64 << 10
# tries of a request; AWS_MAX_ATTEMPTS overrides it
_ATTEMPTS = 6
_ABSENT = ("404", "NoSuchKey", "NotFound")
_TAKEN = ("PreconditionFailed", "412", "ConditionalRequestConflict")
# codes of S3 and classes of boto3's errors -> what a user reads
_REASONS = {
    "AccessDenied 403": "access was denied: the credentials may not do this, or this machine's clock is wrong",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than the server allows; set the clock",
    "InvalidAccessKeyId SignatureDoesNotMatch": "the key or the signature was refused; check credentials and region",
    "ExpiredToken CredentialRetrievalError SSOTokenLoadError UnauthorizedSSOTokenError": "log in again",
    "NoCredentialsError PartialCredentialsError": "no complete credentials were found in the AWS chain (environment, "
    "profile, instance role)",
    "NoSuchBucket ParamValidationError": "there is no such bucket; create it or correct the name",
    "NoSuchKey 404": "the object is gone; push the bundle again",
    "SlowDown 503": "the server was too busy, and still was after every retry; wait a little",
    "BadDigest FlexibleChecksumError": "the bytes that arrived have a different checksum from those that were sent; "
    "if that stays so, compile.store verify says what to do",
    "EndpointConnectionError": "the server could not be reached; check network, region and endpoint",
    "ProfileNotFound ConfigParseError ConfigNotFound NoRegionError InvalidRegionError UnknownServiceError "
    "InvalidEndpointConfigurationError ValueError": "the AWS configuration is wrong; correct AWS_PROFILE, "
    "AWS_CONFIG_FILE, AWS_DEFAULT_REGION or AWS_ENDPOINT_URL, which is an address with its scheme",
}
_BY_CODE = {code: reason for codes, reason in _REASONS.items() for code in codes.split()}


class S3:
    """A prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, prefix
        self._late, self._sockets = False, weakref.WeakSet[socket.socket]()
        attempts = os.environ.get("AWS_MAX_ATTEMPTS", str(_ATTEMPTS))
        if not attempts.isdecimal() or not 1 <= int(attempts) <= 100:
            raise UserError(f"AWS_MAX_ATTEMPTS is {attempts!a}; give a whole number from 1 to 100, or unset it")
        config = Config(
            retries={"mode": "standard", "total_max_attempts": int(attempts)},  # type: ignore[arg-type, unused-ignore]
            connect_timeout=5, read_timeout=60, tcp_keepalive=True,
        )  # fmt: skip
        with self._sentences():
            self.client = boto3.Session().client("s3", config=config)
        self._transfer = TransferConfig(multipart_chunksize=16 << 20, max_concurrency=8)
        # botocore has no option for the sockets of one client
        pools = self.client._endpoint.http_session._pool_classes_by_scheme
        for scheme, pool in pools.items():
            connection = _tracked(pool.ConnectionCls, self._sockets)
            pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
        for event in ("before-send.s3", "needs-retry.s3"):
            self.client.meta.events.register(event, self._refuse_late)

    def size(self, key: str) -> int | None:
        with self._sentences(key), _unless(*_ABSENT) as found:
            found.append(self.client.head_object(**self._at(key))["ContentLength"])
        return found[0] if found else None

    def get(self, key: str, size: int, write: Callable[[bytes], object], on_progress: ProgressFn) -> None:
        # a file that cannot seek: its parts are written in order
        with self._sentences(key, size):
            self.client.download_fileobj(
                self.bucket, self._key(key), SimpleNamespace(write=write), Callback=on_progress, Config=self._transfer
            )

    def put(self, source: Path | bytes, key: str, on_progress: ProgressFn) -> None:
        if isinstance(source, bytes):
            with self._sentences(key):
                self.client.put_object(**self._at(key), Body=source)
            return
        with self._sentences(key, source.stat().st_size):
            self.client.upload_file(
                str(source), self.bucket, self._key(key), Callback=on_progress, Config=self._transfer
            )

    def put_new(self, key: str, content: bytes) -> bool:
        # IfNoneMatch lets the server decide between two writers; servers without it need the look before
        if self.size(key) is not None:
            return False
        with self._sentences(key), _unless(*_TAKEN) as written:
            written.append(self.client.put_object(**self._at(key), Body=content, IfNoneMatch="*"))
        return bool(written)

    def keys(self) -> Iterator[str]:
        start = f"{self.prefix}/" if self.prefix else ""
        with self._sentences():
            for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start):
                for entry in page.get("Contents", ()):
                    yield entry["Key"][len(start) :]

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(key)}

    @contextlib.contextmanager
    def _sentences(self, key: str = "", size: int = 0) -> Iterator[None]:
        """Bound the time of a request for `size` bytes, and turn boto3's errors into one sentence."""
        timer = threading.Timer(REQUEST_SECONDS + size / LEAST_BYTES_PER_SECOND, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error, ValueError) as error:
            self._refuse_late()
            where = f"{SCHEME}{self.bucket}/{self._key(key)}".rstrip("/")
            raise UserError(
                f"{where}: {_reason(error)}{'; the same command goes on from here' if key else ''}"
            ) from None
        finally:
            timer.cancel()

    def _end(self) -> None:
        """End all connections: a request took too long, and no other may follow."""
        self._late = True
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _refuse_late(self, **_: Any) -> None:
        if self._late:
            raise UserError(
                f"{SCHEME}{self.bucket}: the server took longer than {REQUEST_SECONDS:g} seconds, and one for each "
                f"{LEAST_BYTES_PER_SECOND >> 10} KiB; check the endpoint and the network, the same command goes on"
            )


def _tracked(connection: Any, sockets: weakref.WeakSet[socket.socket]) -> type[Any]:
    """A class of connections whose sockets are in a set."""

    class Tracked(connection):  # type: ignore[misc]
        def connect(self) -> None:
            super().connect()
            sockets.add(self.sock)

    return Tracked


def _reason(error: BaseException) -> str:
    # boto3 wraps the errors of a transfer, in their text or as causes: the first with a known name decides
    seen: BaseException | None = error
    while seen is not None:
        code = seen.response["Error"]["Code"] if isinstance(seen, ClientError) else type(seen).__name__
        if code in _BY_CODE:
            return f"{_BY_CODE[code]} ({code})"
        if isinstance(seen, ClientError):
            return f"the server answered {ascii(code)[1:-1]}, also when tried again"
        seen = seen.__cause__ or seen.__context__
    known = next((reason for code, reason in _BY_CODE.items() if f"({code})" in str(error)), "")
    return known or f"the connection was lost ({type(error).__name__}), also when tried again"


@contextlib.contextmanager
def _unless(*codes: str) -> Iterator[list[Any]]:
    """Swallow an answer with one of these codes; the list has the result of any other request."""
    given: list[Any] = []
    try:
        yield given
    except ClientError as error:
        if error.response["Error"]["Code"] not in codes:
            raise
