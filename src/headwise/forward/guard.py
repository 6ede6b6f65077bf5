"""No verb trusts a row: before its work it compares the model run by headwise with its own run.

A family without a row gets one from its shape, and the whole check must pass on the model at hand
before anything is read with it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from headwise.errors import HeadwiseError, UnknownArchitectureError
from headwise.forward.faithfulness import SHORTEST, wrong_positions
from headwise.forward.separability import check
from headwise.models.architectures import architecture_of, is_proposed, keep_row
from headwise.models.families.architecture import Architecture
from headwise.models.families.proposal import propose_rows
from headwise.models.loaded_model import LoadedModel
from headwise.models.stored_weights import stored_weights

_PROVED = "_headwise_proved"  # on the model itself: its row, once the check has passed


def guard(model: LoadedModel | PreTrainedModel, longest: int = SHORTEST) -> None:
    """Refuse a model whose attention or losses are not what its row says.

    Two forward passes of one text, as long as the longest to come but not longer than a proof
    needs: against the 120 texts of a diagnosis under 2% of the work.
    """
    if isinstance(model, LoadedModel):
        model = model.model
    if stored_weights(model) is not None:
        return  # it would be read twice over: a streamed layer is compared when it runs
    if is_proposed(model):
        prove_row(model)
    wrong, worst = wrong_positions(model, longest)
    if bool(wrong.any()):
        raise UnknownArchitectureError(
            f"this {model.config.model_type!r} model is not what its row says: run by headwise "
            f"its logits differ by {worst:.1e} of their size",
            where=f"{int(wrong.sum())} of {wrong.numel()} positions",
            fix="nothing measured on it would be true; `headwise check MODEL` says what differs",
        )


def prove_row(model: PreTrainedModel) -> Architecture:
    """The row that this model's shape suggests, if one passes the whole check on it."""
    proved: Architecture | None = vars(model).get(_PROVED)
    if proved is not None:
        return proved
    architecture_of(model)  # a family that is refused by name, or has no shape to read
    reasons = []
    for row in propose_rows(model):
        reason = _tried(model, row)
        if not reason:
            vars(model)[_PROVED] = row
            return row
        reasons.append(reason)
    keep_row(model, None)
    raise UnknownArchitectureError(
        f"no head layout is known for model_type={model.config.model_type!r}, and the one that its "
        f"modules suggest does not hold: {reasons[0]}",
        fix="choose a model of another family; `headwise check` lists the known ones",
    )


def _tried(model: PreTrainedModel, row: Architecture) -> str:
    """Why a row does not hold for the model; nothing if it does."""
    keep_row(model, row)
    try:
        wrong, worst = wrong_positions(model, SHORTEST)
        if bool(wrong.any()):
            return f"run by headwise its logits differ by {worst:.1e} of their size"
        return check(model).reason()
    except HeadwiseError as error:
        return str(error).partition("\n")[0]
    except (RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
