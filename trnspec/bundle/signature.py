"""Signatures of minisign: a manifest contains the digest of every file, so its signature is the bundle's.

Off by default. With a public key, from an option or the environment, an unsigned bundle is refused too.
"""

import getpass
import os
from pathlib import Path
from typing import Any

from model.errors import UserError
from model.strict import shown
from trnspec.bundle.manifest import MANIFEST

SIGNATURE = f"{MANIFEST}.minisig"
VARIABLE = "TRNSPEC_PUBLIC_KEY"


def _minisign() -> Any:
    try:
        # an optional dependency
        import minisign  # noqa: PLC0415
    except ImportError:
        raise UserError("py-minisign is missing and signatures need it; run pip install 'trnspec[sign]'") from None
    return minisign


def key_of(option: str = "") -> str:
    """The required public key, of the option or else of the environment; "" if no signature is required.

    UserError for an empty variable: a deployment that lost its key must not load unsigned bundles.
    """
    key = option or os.environ.get(VARIABLE)
    if key is not None and not key.strip():
        raise UserError(f"{VARIABLE} is set and empty; set it to a public key, or unset it to load unsigned bundles")
    return (key or "").strip()


def check_signature(content: bytes, signature: bytes | None, key: str, where: str) -> None:
    """Raise UserError unless `signature` is the key's signature of a manifest's bytes.

    `key` is a line of base64, the content of minisign's public key file, or the path of that file.
    """
    minisign = _minisign()
    try:
        text = Path(key).read_text(encoding="utf-8") if Path(key).is_file() else key
        public = minisign.PublicKey.from_base64(text.strip().splitlines()[-1].strip())
    except (ValueError, IndexError, OSError) as error:
        raise UserError(f"{shown(key)} is not a public key of minisign; give its file or its base64 line") from error
    if signature is None:
        raise UserError(f"{where} is not signed and a signature is required; sign it: python -m compile.store sign")
    try:
        public.verify(content, minisign.Signature.from_bytes(signature))
    except ValueError as error:
        raise UserError(f"{where} is not signed by the required key ({error}); do not load it") from error


def sign(content: bytes, name: str, key_file: Path) -> bytes:
    """The signature of a manifest's bytes with minisign's secret key; the trusted comment has the bundle's `name`."""
    try:
        key = _minisign().SecretKey.from_file(key_file)
        if key.is_encrypted():
            key.decrypt(getpass.getpass(f"password of {key_file}: "))
        return bytes(key.sign(content, trusted_comment=f"bundle {name}")) + b"\n"
    except (ValueError, EOFError) as error:
        why = error or "no password"
        raise UserError(f"{key_file} cannot sign ({why}); give a secret key of minisign, and its password") from error
