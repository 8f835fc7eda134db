"""Encryption of blocks at rest: AES-256-GCM, each block with a nonce of its own, bound to its name and realm.

What is stored is the nonce (12 bytes), the encrypted block and the tag (16 bytes). The key is derived by HMAC-SHA256
from the secret and the realm, so that each model and namespace has its own. Nonces are random: NIST SP 800-38D allows
2**32 blocks a key.
"""

from __future__ import annotations

import hmac
import os

from npu_kvconnector.errors import IntegrityError, OptionError

__all__ = ["OVERHEAD", "Cipher"]

_NONCE = 12
OVERHEAD = _NONCE + 16
"""Bytes by which an encrypted block is longer."""


class Cipher:
    """Encrypts and decrypts the blocks of a realm."""

    def __init__(self, secret: bytes, realm: bytes) -> None:
        """Derive the key.

        Raises:
            OptionError: the library is not installed.
        """
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            msg = 'encrypt needs the package cryptography: pip install "npu-kvconnector[encryption]"'
            raise OptionError(msg) from error
        self._aead = AESGCM(hmac.digest(secret, b"npu-kvconnector durable aes-256-gcm" + realm, "sha256"))
        self._realm = realm

    def encrypt(self, name: bytes, block: bytes | memoryview) -> bytes:
        """Return what is stored of a block."""
        nonce = os.urandom(_NONCE)
        return nonce + self._aead.encrypt(nonce, block, self._realm + name)

    def decrypt(self, name: bytes, payload: memoryview) -> bytes:
        """Return the block.

        Raises:
            IntegrityError: it was encrypted with another key, for another name, or changed.
        """
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(payload[:_NONCE], payload[_NONCE:], self._realm + name)
        except (InvalidTag, ValueError) as error:
            msg = "the block does not decrypt: it is damaged, forged, or was encrypted with another secret"
            raise IntegrityError(msg) from error
