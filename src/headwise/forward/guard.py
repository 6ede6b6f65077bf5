"""No verb trusts a row: before its work it compares the model run by headwise with its own run.

A family without a row gets one from its shape, and the whole check must pass on the model at hand
before anything is read with it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from headwise.errors import UnknownArchitectureError
from headwise.forward.faithfulness import SHORTEST, found_difference, require_eval
from headwise.models.architectures import is_proposed
from headwise.models.loaded_model import LoadedModel
from headwise.models.rope import forget_longer_texts
from headwise.models.stored_weights import stored_weights


def guard(model: LoadedModel | PreTrainedModel, longest: int = SHORTEST) -> None:
    """Refuse a model whose attention or losses are not what its row says.

    Two forward passes of one text, as long as the longest to come but not longer than a proof
    needs: against the 120 texts of a diagnosis under 2% of the work.
    """
    if isinstance(model, LoadedModel):
        model = model.model
    if stored_weights(model) is not None:
        return  # it would be read twice over: a streamed layer is compared when it runs
    require_eval(model)
    forget_longer_texts(model)
    if is_proposed(model):
        from headwise.forward.separability import prove_row  # late: few models need it

        prove_row(model)
    difference = found_difference(model, longest)
    if difference:
        raise UnknownArchitectureError(
            f"this {model.config.model_type!r} model is not what its row says: run by headwise "
            f"{difference}",
            where=model.config._name_or_path or None,
            fix="nothing measured on it would be true; `headwise check MODEL` says what differs",
        )
