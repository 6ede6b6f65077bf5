"""One way to put another forward on modules for a while, and to leave them as they were found.

accelerate keeps its hook on the instance too: `module.forward` becomes a wrapper that brings
weights and arguments to their device and then calls `module._old_forward`. What computes with a
module's weights is therefore put under the hook, in place of `_old_forward`; what runs the whole
module later, or not at all, is put around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]

Replacement = Callable[
    [nn.Module, Forward], Forward
]  # (module, the forward found there) -> another

_NOTHING = object()


@contextmanager
def replaced_forward(
    modules: Sequence[nn.Module], replacement: Replacement, *, around_hooks: bool = False
) -> Iterator[None]:
    """Give each module `replacement(module, previous)`; afterwards its instance is as before."""
    places = [(module, _place(module, around_hooks)) for module in modules]
    found = [vars(module).get(name, _NOTHING) for module, name in places]
    try:
        for module, name in places:
            vars(module)[name] = replacement(module, getattr(module, name))
        yield
    finally:
        for (module, name), before in zip(places, found, strict=True):
            if before is _NOTHING:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = before


def _place(module: nn.Module, around_hooks: bool) -> str:
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    return "_old_forward" if hooked and not around_hooks else "forward"
