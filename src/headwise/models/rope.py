"""Rotary frequencies that depend on what else is run: which texts may share a batch.

transformers chooses longrope's frequencies by the longest row of a batch: a short text beside a
long one would be measured with the long one's. Texts of one length class get the same frequencies
together as each alone. Dynamic NTK turns at the model's positions, where every text is cut, but it
remembers longer texts that were run before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

LengthClass = Callable[[int], int]  # of a text's tokens


def length_class(model: PreTrainedModel) -> LengthClass:
    """The class of a length: texts of the same class may share a batch."""
    config = model.config.get_text_config()
    turns = {
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(config.to_dict())
        # phimoe scales by the longest row, whatever its rope type
        if rope["rope_type"] == "longrope"
        or (config.model_type == "phimoe" and rope["rope_type"] != "default")
    }
    return lambda length: sum(length > turn for turn in turns)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope parameters of a config; some families have one set for each type of layer."""
    parameters = config.get("rope_parameters")
    for one in (parameters, *parameters.values()) if isinstance(parameters, Mapping) else ():
        if isinstance(one, Mapping) and one.get("rope_type"):
            yield one


def forget_longer_texts(model: PreTrainedModel) -> None:
    """Reset dynamic NTK to the frequencies of texts within the model's positions.

    transformers does so itself only for texts that are shorter than them.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_prefix = (
            {f"{name}_": kind for name, kind in kinds.items()}
            if isinstance(kinds, Mapping)
            else {"": kinds}
        )
        for prefix, kind in by_prefix.items():
            if "dynamic" in str(kind):
                original = getattr(module, f"{prefix}original_inv_freq")
                setattr(module, f"{prefix}inv_freq", original.clone())
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
