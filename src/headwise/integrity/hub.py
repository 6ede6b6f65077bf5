"""Is the hub in reach? Asked before transformers is, which would try again for minutes."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from headwise.errors import ModelError

_PATIENCE = 3.0  # seconds until the hub counts as out of reach


def require_hub(name: str) -> None:
    """Refuse a hub id at once if it is not in the local cache and the hub cannot be reached.

    transformers itself would try again and again for minutes.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ModelError(
            "no such model directory, nor a hub id", where=name, fix="check the name"
        ) from None
    if isinstance(cached, str) or (not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)):
        return
    raise ModelError(
        f"offline: {constants.ENDPOINT} cannot be reached, and this model is not in the cache",
        where=name,
        fix="pass a local model directory or a .gguf file, or check the network",
    )


def _answers(endpoint: str) -> bool:
    """Whether a host takes connections; behind a proxy only the proxy knows."""
    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    address = urlsplit(endpoint)
    try:
        socket.create_connection((address.hostname, address.port or 443), _PATIENCE).close()
    except OSError:
        return False
    return True
