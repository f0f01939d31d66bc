"""From an address to its remote: S3 where boto3 is, or a folder."""

from __future__ import annotations

from pathlib import Path

from compile.bundle.remote import SCHEME, Folder, Remote
from model.errors import UserError


def open_remote(address: str) -> Remote:
    """The remote of s3://bucket/prefix, or of a folder."""
    if address.startswith(SCHEME):
        bucket, _, prefix = address[len(SCHEME) :].partition("/")
        if not bucket:
            raise UserError(f"{address} names no bucket; give s3://bucket/prefix")
        try:
            # vendor seam: boto3 is an extra
            from compile.bundle.s3 import S3  # noqa: PLC0415
        except ImportError:
            raise UserError("boto3 is missing and s3:// addresses need it; run pip install 'trnspec[s3]'") from None
        return S3(bucket, prefix.strip("/"))
    if "://" in address or address.startswith("s3:"):
        raise UserError(f"{address} is neither s3://bucket/prefix nor a folder; give one of them")
    return Folder(Path(address))
