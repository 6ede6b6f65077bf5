"""The published BLOOM head maps as diagnoses, so that every view can be tried on real numbers.

They were digitised from the paper's figures (see data/bloom/README.md): first-token mass only, so
nobody is `low_entropy` in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.artefacts import content_hash
from headwise.bundled import DATA
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import Diagnosis, diagnosis_from
from headwise.errors import ArtefactError
from headwise.models.values import ModelInfo
from headwise.provenance import Provenance

BLOOM = DATA / "bloom"
STOCK_MAPS = BLOOM / "bloom_stock_first_token_mass.json"
_HIDDEN = {"560m": 1024, "1b7": 2048, "3b": 2560, "7b1": 4096}
_VOCABULARY = 250_880


def maps_as_diagnoses(maps: Mapping[str, Any], path: Path) -> list[Diagnosis]:
    """Turn {model: [layer][head]} into diagnoses."""
    try:
        arrays = {name: np.array(rows, dtype=float) for name, rows in maps.items()}
    except (TypeError, ValueError):
        arrays = {}
    if not arrays or any(array.ndim != 2 for array in arrays.values()):
        raise ArtefactError(
            "neither a headwise artefact nor a file of head maps",
            where=path,
            fix="pass diagnosis.json, or {model: [[first-token mass of each head] of each layer]}",
        )
    return [published_diagnosis(name, array) for name, array in arrays.items()]


def published_diagnosis(name: str, mass: np.ndarray) -> Diagnosis:
    """A diagnosis of one BLOOM from its first-token masses alone."""
    num_layers, num_heads = mass.shape
    size = name.rsplit("-", 1)[-1].lower()
    return diagnosis_from(
        model=ModelInfo(
            id=name,
            model_type="bloom",
            fingerprint=content_hash([mass.tobytes()]),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=_HIDDEN[size] // num_heads if size in _HIDDEN else None,
            hidden_size=_HIDDEN.get(size),
            qkv_bias=True,
            output_bias=True,
            positions="alibi",
            num_parameters=_num_parameters(_HIDDEN.get(size), num_layers),
        ),
        maps={
            "first_token_mass": mass,
            "slope": np.tile(published_slopes(num_heads), (num_layers, 1)),
        },
        thresholds=Thresholds(),
        provenance=Provenance(source="digitised from the published figures", resolution=0.002),
    )


def _num_parameters(hidden: int | None, num_layers: int) -> int | None:
    """BLOOM's count from its shape: embeddings, two norms, and 12 h^2 + 13 h a layer."""
    if hidden is None:
        return None
    return _VOCABULARY * hidden + 4 * hidden + num_layers * (12 * hidden**2 + 13 * hidden)


def published_slopes(num_heads: int) -> Float[np.ndarray, " head"]:
    """ALiBi slopes of BLOOM: powers of 2^(-8/n) for a power of two n, odd half powers beyond it."""
    whole = 2 ** int(math.log2(num_heads))
    base = np.float32(2.0 ** (-8 / whole))  # in float32, as BLOOM executes them
    half = np.float32(2.0 ** (-4 / whole))
    odd = np.arange(1, 2 * (num_heads - whole), 2, dtype=np.float32)
    powers = np.arange(1, whole + 1, dtype=np.float32)
    return np.concatenate([base**powers, half**odd]).astype(float)
