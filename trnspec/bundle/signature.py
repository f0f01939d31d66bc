"""Proof of who built a bundle: the manifest, signed as minisign signs files, is checked if a public key is given.

The manifest holds the digest of every file, so its signature is the bundle's. A bundle never holds a key. Off by
default: a key is given by an option or by the environment, and then an unsigned bundle is refused too.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Any

from model.errors import UserError
from trnspec.bundle.manifest import MANIFEST

SIGNATURE = f"{MANIFEST}.minisig"
VARIABLE = "TRNSPEC_PUBLIC_KEY"


def _minisign() -> Any:
    try:
        # vendor seam: an extra
        import minisign  # noqa: PLC0415
    except ImportError:
        raise UserError("py-minisign is missing and signatures need it; run pip install 'trnspec[sign]'") from None
    return minisign


def key_of(option: str = "") -> str:
    """The public key that bundles must be signed with: the option's, else the environment's; "" requires none.

    UserError for an empty variable: a deployment whose key got lost must not load unsigned bundles.
    """
    key = option or os.environ.get(VARIABLE)
    if key is not None and not key.strip():
        raise UserError(f"{VARIABLE} is set and empty; set it to a public key, or unset it to load unsigned bundles")
    return key or ""


def check_signature(content: bytes, signature: bytes | None, key: str, where: str) -> None:
    """Raise UserError unless a signature of a manifest's bytes is the key's own.

    `key` is a line of base64, or the file that minisign wrote.
    """
    minisign = _minisign()
    try:
        public = minisign.PublicKey.from_file(key) if Path(key).is_file() else minisign.PublicKey.from_base64(key)
    except ValueError as error:
        raise UserError(f"{key!r} is neither a public key of minisign nor its file; give one of them") from error
    if signature is None:
        raise UserError(f"{where} is not signed and a signature is required; sign it: python -m compile.store sign")
    try:
        public.verify(content, minisign.Signature.from_bytes(signature))
    except ValueError as error:
        raise UserError(
            f"{where} is not signed by the required key ({error}); do not load it, or correct the key"
        ) from error


def sign(content: bytes, name: str, key_file: Path) -> bytes:
    """The signature of a manifest's bytes by minisign's secret key; `name` is the bundle's, in the trusted comment."""
    minisign = _minisign()
    try:
        key = minisign.SecretKey.from_file(key_file)
        if key.is_encrypted():
            key.decrypt(getpass.getpass(f"password of {key_file}: "))
        signature = key.sign(content, trusted_comment=f"bundle {name}")
    except (ValueError, EOFError) as error:
        raise UserError(f"{key_file} cannot sign ({error}); give a secret key that minisign -G wrote") from error
    return bytes(signature) + b"\n"
