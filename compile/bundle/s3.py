"""S3 as a remote, through boto3: parallel parts, retries with growing pauses, errors as sentences.

Credentials come from the standard AWS chain; a sentence has an error's code and not its text, which may quote them.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from s3transfer.exceptions import RetriesExceededError

from model.errors import UserError

# of a connection on which nothing moves
TIMEOUT_SECONDS = 30
_TRANSFER = TransferConfig(multipart_chunksize=16 << 20, max_concurrency=8)
_ABSENT, _TAKEN = ("404", "NoSuchKey", "NotFound"), ("PreconditionFailed", "412", "ConditionalRequestConflict")


class S3:
    """Objects by key below s3://bucket/prefix; the methods are those of `Folder`."""

    def __init__(self, address: str) -> None:
        self.address, (self._bucket, _, prefix) = address, address.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix}/" * bool(prefix)
        self._client = self._request("", _client)

    def size(self, key: str) -> int | None:
        head = self._request(key, lambda: self._client.head_object(**self._at(key)), _ABSENT)
        return head and head["ContentLength"]

    def get(self, key: str, size: int, write: Callable[[bytes], object]) -> None:
        # a file that cannot seek: its parts are written in order
        out = {"Fileobj": SimpleNamespace(write=write), "Config": _TRANSFER}
        self._request(key, lambda: self._client.download_fileobj(**self._at(key), **out))

    def put(self, source: Path | bytes, key: str) -> None:
        if isinstance(source, bytes):
            self._request(key, lambda: self._client.put_object(**self._at(key), Body=source))
        else:
            self._request(key, lambda: self._client.upload_file(str(source), **self._at(key), Config=_TRANSFER))

    def put_new(self, key: str, content: bytes) -> bool:
        # IfNoneMatch lets the server decide between two writers; servers without it need the look before
        new = {**self._at(key), "Body": content, "IfNoneMatch": "*"}
        return self.size(key) is None and bool(self._request(key, lambda: self._client.put_object(**new), _TAKEN))

    def keys(self) -> Iterable[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        entries = self._request("", lambda: [entry for page in pages for entry in page.get("Contents", ())])
        return [entry["Key"].removeprefix(self._prefix) for entry in entries]

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _request(self, key: str, work: Callable[[], Any], accepted: tuple[str, ...] = ()) -> Any:
        """The result of a request, None for an answer with one of these codes; UserError for any other error."""
        try:
            return work()
        except (BotoCoreError, ClientError, Boto3Error, RetriesExceededError, ValueError) as error:
            if (code := _code(error)) in accepted:
                return None
            raise UserError(
                f"{self.address}/{key}: {code} after all retries; check the AWS_ variables, profile and credentials, "
                "the address, network and clock, and run the same command again, which goes on from here"
            ) from None


def _client() -> Any:
    retries: Any = {"mode": "standard", "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", "6"))}
    timeouts = {"connect_timeout": 5, "read_timeout": TIMEOUT_SECONDS, "tcp_keepalive": True}
    return boto3.Session().client("s3", config=Config(retries=retries, **timeouts))


def _code(error: BaseException) -> str:
    """The server's code, or the error's class. boto3 wraps the errors of a transfer."""
    seen: BaseException | None = error
    while seen and not isinstance(seen, (ClientError, BotoCoreError)):
        seen = seen.__cause__ or seen.__context__
    code = seen.response["Error"]["Code"] if isinstance(seen, ClientError) else type(seen or error).__name__
    return ascii(code)[1:-1]
