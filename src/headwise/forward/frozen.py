"""A model whose own parameters ask for no gradient for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter asks for a gradient; afterwards each asks as before.

    By name: accelerate makes a new parameter each time it loads or offloads one.
    """
    asked = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for name in asked:
            model.get_parameter(name).requires_grad_(True)
