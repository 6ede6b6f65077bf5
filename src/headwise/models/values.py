"""What artefacts say about models and patches: values without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import NonNegativeInt

from headwise.values import MOST_HEADS, OMITTED, Count, Finite, Width


@dataclass(frozen=True)
class ModelInfo:
    """The identity and shape of a model; what is not known of a published map is None."""

    id: str
    model_type: str
    fingerprint: str
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count | None
    hidden_size: Width | None
    qkv_bias: bool
    output_bias: bool
    positions: str
    num_parameters: NonNegativeInt | None
    dtype: str | None = field(default=None, metadata=OMITTED)
    slopes: tuple[Finite, ...] | None = field(default=None, metadata=OMITTED)
    # weights of a head's q, k, v and o slices, biases included, where head_dim does not give them
    slice_weights: tuple[Count, ...] | None = field(default=None, metadata=OMITTED)
    # numbers of the layers with attention, where these are not all; rows of maps are these
    layers: tuple[int, ...] | None = field(default=None, metadata=OMITTED)
    # numbers of the layers whose attention reaches back over a window only, if there are any
    sliding: tuple[int, ...] | None = field(default=None, metadata=OMITTED)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} keys")
        if self.num_layers * self.num_heads > MOST_HEADS:
            raise ValueError(f"{self.num_layers} layers of {self.num_heads} heads are too many")
        if self.layers is not None and len(self.layers) != self.num_layers:
            raise ValueError(f"layers: {len(self.layers)} numbers for {self.num_layers} layers")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's own number of each row of a map."""
        return tuple(range(self.num_layers)) if self.layers is None else self.layers

    @property
    def sliding_rows(self) -> list[int]:
        """Rows of a map that slide over a window, where others see the whole text."""
        rows = [self.layer_numbers.index(layer) for layer in self.sliding or ()]
        return rows if len(rows) < self.num_layers else []

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.num_layers, self.num_heads

    @property
    def short_name(self) -> str:
        """The name as a title can carry it: the last part of a path, without its ending."""
        name = model_name(self.id).removesuffix(".gguf")
        return name if len(name) <= 32 else name[:29] + "..."


def model_name(identifier: str) -> str:
    """The last part of a hub id or a path; a folder called `hf` is named by its parent."""
    if identifier.rstrip("/").rpartition("/")[2] in (".", ".."):
        identifier = str(Path(identifier).resolve())  # a model is called by its directory
    *above, last = identifier.rstrip("/").split("/")
    return above[-1] if last == "hf" and above and above[-1] else last


@dataclass(frozen=True)
class PatchInfo:
    """Where a patch comes from; an evaluation adds which file it was and how much it changes."""

    base_model: str = "an unknown model"
    plan: Mapping[str, object] | None = field(default=None, metadata=OMITTED)  # as JSON
    path: str | None = field(default=None, metadata=OMITTED)
    num_weights: int | None = field(default=None, metadata=OMITTED)
    sha256: str | None = field(default=None, metadata=OMITTED)  # of what its slices became
    # heads that give their mean output, by how: bias, parked, or zeroed where it cannot be had
    retired: Mapping[str, str] | None = field(default=None, metadata=OMITTED)

    @property
    def bos(self) -> bool | None:
        """Whether the texts of its training started with a BOS; None if its plan does not say."""
        bos = (self.plan or {}).get("bos")
        return bos if isinstance(bos, bool) else None
