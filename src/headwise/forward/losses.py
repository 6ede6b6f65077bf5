"""Next-token losses of any family without the T x vocabulary logits existing at once.

One definition for training, perplexity and ablation: the backbone's last hidden states, then the
model's own output head, one chunk of positions at a time. The gradient of the hidden states is
taken chunk by chunk in the forward pass, so logits are not kept for the backward one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.forward.replaced_forward import replaced_forward
from headwise.models.architectures import architecture_of
from headwise.models.stored_weights import at_hand, stored_weights

IGNORED = -100
_CHUNK_LOGITS = 2**26  # numbers alive at once, at most: 256 MiB in float32
_CHUNK_ROWS = 256  # enough rows for a GEMM to be worth reading the output head's weights
_TILE_ROWS, _TILE_TOKENS = 1024, 4096  # logits without a gradient: 16 MiB in float32
_CACHED_LOGITS = 2**16  # that are summed at once: 256 KiB
_CACHED_ROWS = 16  # rows of logits that softmax takes at once: they stay in the cache
Adjust = Callable[[Tensor], Tensor]
Logits = Float[Tensor, "row token"]


def shifted_targets(
    ids: Int[Tensor, "text position"], lengths: Int[Tensor, "text"]
) -> Int[Tensor, "text position"]:
    """What each position must predict; the last real token and padding predict nothing."""
    targets = torch.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    position = torch.arange(ids.shape[1], device=ids.device)
    return targets.masked_fill(position[None] >= (lengths.to(ids.device) - 1)[:, None], IGNORED)


def logits_of(model: PreTrainedModel, hidden: Float[Tensor, "... hidden"]) -> Tensor:
    """The model's own output head: projection, then the scaling or cap of its family."""
    scale, before = _scale_of(model), architecture_of(model).before_logits
    if before:
        hidden = model.get_submodule(before)(hidden)
    return scale.logits(model.get_output_embeddings()(hidden))


@dataclass(frozen=True)
class _LogitScale:
    """What a family does to the projected hidden states before they are logits."""

    times: float
    over: float
    cap: float | None

    def linear(self, x: Tensor) -> Tensor:
        """All but the cap; gradients go back through the same map."""
        if self.times != 1.0:
            x = x * self.times
        return x if self.over == 1.0 else x / self.over

    def logits(self, x: Tensor) -> Tensor:
        """All of it."""
        x = self.linear(x)
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)


def _scale_of(model: PreTrainedModel) -> _LogitScale:
    row, config = architecture_of(model), model.config.get_text_config()

    def number(name: str) -> float | None:
        return getattr(config, name, None) or None if name else None

    times, over = number(row.logits_times), number(row.logits_over)
    return _LogitScale(times or 1.0, over or 1.0, number(row.logits_cap))


def token_losses(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    targets: Int[Tensor, "text position"],
) -> Float[Tensor, "text position"]:
    """Loss in nats at every predicting position, 0 elsewhere; no gradient."""
    if stored_weights(model) is not None and _is_linear(model):
        return stored_losses(model, [hidden], [targets])[0]
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    losses = torch.zeros(wanted.shape, dtype=torch.float32, device=hidden.device)
    chosen = torch.nonzero(wanted != IGNORED).squeeze(1)
    if _is_linear(model):
        adjust = _scale_of(model).logits
        losses[chosen] = _by_head(model, _tiled_losses, adjust, flat[chosen], wanted[chosen])
        return losses.view(targets.shape)
    for rows in _chunks(model, chosen):
        logits = logits_of(model, flat[rows]).float()
        losses[rows] = F.cross_entropy(logits, wanted[rows], reduction="none")
    return losses.view(targets.shape)


def _by_head(
    model: PreTrainedModel, compute: Callable[..., Any], how: object, *tensors: Tensor
) -> Any:
    """`compute` as the output head's own forward, so that accelerate's hook brings its weights."""
    head = model.get_output_embeddings()
    with replaced_forward([head], lambda module, _: partial(compute, module, how)):
        return head.forward(*tensors)


def stored_losses(
    model: PreTrainedModel,
    hidden: Sequence[Tensor],  # each (text, position, hidden)
    targets: Sequence[Tensor],  # each (text, position), as the losses
) -> list[Tensor]:
    """The same for several batches of a streamed model, whose output head is read once for all."""
    stored = stored_weights(model)
    if stored is None or not _is_linear(model):
        with _head_at_hand(model):
            return [token_losses(model, *one) for one in zip(hidden, targets, strict=True)]
    parts = [_Rows(one, wanted) for one, wanted in zip(hidden, targets, strict=True)]
    scale, name = _scale_of(model), _head_name(model)
    bias = stored.get(f"{name}.bias")
    for start, piece in stored.pieces(f"{name}.weight"):
        own = None if bias is None else bias[start : start + len(piece)]
        for part in parts:
            part.meet(start, piece, own, scale)
    return [part.losses() for part in parts]


def _head_name(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    name: str = next(name for name, module in model.named_modules() if module is head)
    return name


@contextmanager
def _head_at_hand(model: PreTrainedModel) -> Iterator[None]:
    """While open an output head that must be called as it is stays in memory, if streamed."""
    before = architecture_of(model).before_logits
    with ExitStack() as stack:
        for one in (_head_name(model), before) if stored_weights(model) is not None else ():
            if one:
                stack.enter_context(at_hand(model, one))
        yield


class _Rows:
    """The predicting positions of one batch, as they meet the output head piece by piece."""

    def __init__(self, hidden: Tensor, targets: Tensor) -> None:
        self.shape, flat = targets.shape, targets.flatten()
        self.chosen = torch.nonzero(flat != IGNORED).squeeze(1)
        self.hidden, self.targets = hidden.flatten(0, 1)[self.chosen], flat[self.chosen]
        self.total = torch.full((len(self.chosen),), -torch.inf)
        self.own = torch.zeros(len(self.chosen))

    def meet(self, start: int, piece: Tensor, bias: Tensor | None, scale: _LogitScale) -> None:
        """Take in the logits of some tokens, from `start` on."""
        stop = start + len(piece)
        for rows in torch.arange(len(self.chosen)).split(max(1, _CHUNK_LOGITS // len(piece))):
            logits = scale.logits(F.linear(self.hidden[rows], piece, bias).float())
            self.total[rows] = torch.logaddexp(self.total[rows], logits.logsumexp(-1))
            wanted = self.targets[rows]
            here = (wanted >= start) & (wanted < stop)
            self.own[rows[here]] = logits[here, wanted[here] - start]

    def losses(self) -> Float[Tensor, "text position"]:
        """Loss in nats at every predicting position, 0 elsewhere."""
        losses = torch.zeros(self.shape.numel())
        losses[self.chosen] = self.total - self.own
        return losses.view(self.shape)


def summed_loss(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    targets: Int[Tensor, "text position"],
) -> Float[Tensor, ""]:
    """Sum of the losses, differentiable in `hidden`."""
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    chosen = torch.nonzero(wanted != IGNORED).squeeze(1)
    total: Tensor = _ChunkedLoss.apply(flat, chosen, wanted, model)
    return total


def _chunks(model: PreTrainedModel, chosen: Int[Tensor, "row"]) -> Sequence[Tensor]:
    """The chosen rows in chunks of even size."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = max(1, min(_CHUNK_ROWS, _CHUNK_LOGITS // vocabulary))
    return chosen.tensor_split(max(1, math.ceil(len(chosen) / rows)))


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of the model's head on some rows, with d loss / d hidden computed alongside."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "row hidden"],
        chosen: Int[Tensor, "chosen"],
        targets: Int[Tensor, "row"],
        model: PreTrainedModel,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        scale = _scale_of(model)
        in_place = _is_linear(model) and scale.cap is None
        for rows in _chunks(model, chosen):
            part, wanted = hidden[rows], targets[rows]
            if in_place:
                how = (scale, gradient is not None)
                loss, slope = _by_head(model, _in_place, how, part, wanted)
            else:
                loss, slope = _autograd_chunk(model, part, wanted, gradient is not None)
            total += loss
            if gradient is not None and slope is not None:
                gradient[rows] = slope
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].to(ctx.saved_tensors[0]) * ctx.saved_tensors[0], None, None, None


def _is_linear(model: PreTrainedModel) -> bool:
    """Whether the output head is a plain projection; one with a foreign forward must be called."""
    head = model.get_output_embeddings()
    own = "forward" not in vars(head) or "_hf_hook" in vars(head)
    return type(head) is nn.Linear and own and not architecture_of(model).before_logits


def _in_place(
    head: Any, how: tuple[_LogitScale, bool], hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Loss and its gradient from one buffer: logits become probabilities, then their slope."""
    scale, sloped = how
    buffer = F.linear(hidden, head.weight, head.bias)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for piece, wanted in zip(buffer.split(_CACHED_ROWS), targets.split(_CACHED_ROWS), strict=True):
        logits = scale.linear(piece.float())
        lse = logits.logsumexp(-1, keepdim=True)
        total += (lse - logits.gather(1, wanted[:, None])).sum()
        if sloped:
            slope = torch.exp(logits - lse).scatter_add_(1, wanted[:, None], -torch.ones_like(lse))
            piece.copy_(scale.linear(slope))
    return total, buffer @ head.weight if sloped else None


def _autograd_chunk(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, sloped: bool
) -> tuple[Tensor, Tensor | None]:
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(True)
        loss = F.cross_entropy(logits_of(model, leaf).float(), targets, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, leaf)[0] if sloped else None


def _tiled_losses(
    head: nn.Module,
    adjust: Adjust,
    hidden: Float[Tensor, "row hidden"],
    targets: Int[Tensor, "row"],
) -> Float[Tensor, "row"]:
    """Loss in nats of each row; `adjust` makes logits of what a linear head gives.

    A whole row of logits is never needed: the log-sum-exps of its tiles give that of the row. Tiles
    of many rows read the head's weights seldom: SmolLM2's, 113 MB, are multiplied at 92 GFLOP/s in
    tiles of 4,096 tokens and at 72 whole with 256 rows.
    """
    assert isinstance(head.weight, Tensor)
    losses = [torch.zeros(0, dtype=torch.float32, device=hidden.device)]
    buffer = hidden.new_empty(min(_TILE_ROWS, len(hidden)) * min(_TILE_TOKENS, len(head.weight)))
    with torch.no_grad():
        for rows, wanted in zip(hidden.split(_TILE_ROWS), targets.split(_TILE_ROWS), strict=True):
            if len(head.weight) <= _TILE_TOKENS:
                logits = _projected(head, 0, rows, buffer)
                for piece, own in _pieces(logits, wanted):
                    losses.append(F.cross_entropy(adjust(piece.float()), own, reduction="none"))
            else:
                losses.append(_over_tiles(head, adjust, rows, wanted, buffer))
    return torch.cat(losses)


def _over_tiles(
    head: nn.Module, adjust: Adjust, rows: Tensor, wanted: Tensor, buffer: Tensor
) -> Float[Tensor, "row"]:
    sums, own = [], torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
    for start in range(0, len(head.weight), _TILE_TOKENS):  # type: ignore[arg-type]
        logits = _projected(head, start, rows, buffer)
        here = ((wanted >= start) & (wanted < start + _TILE_TOKENS)).nonzero().squeeze(1)
        own[here] = adjust(logits[here, wanted[here] - start].float())
        pieces = [adjust(piece.float()).logsumexp(-1) for piece, _ in _pieces(logits, wanted)]
        sums.append(torch.cat(pieces))
    return torch.stack(sums).logsumexp(0) - own


def _projected(head: nn.Module, start: int, rows: Tensor, buffer: Tensor) -> Logits:
    """The head's answers for one tile of tokens, in memory that all tiles share."""
    weight, bias = head.weight[start : start + _TILE_TOKENS], head.bias  # type: ignore[index]
    logits = buffer[: len(rows) * len(weight)].view(len(rows), len(weight))
    torch.mm(rows, weight.T, out=logits)
    if isinstance(bias, Tensor):
        logits += bias[start : start + _TILE_TOKENS]
    return logits


def _pieces(logits: Logits, wanted: Int[Tensor, "row"]) -> list[tuple[Tensor, Tensor]]:
    """A few rows at a time, so that they stay in a core's cache."""
    rows = max(1, _CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return list(zip(logits.split(rows), wanted.split(rows), strict=True))


def divergence(
    model: PreTrainedModel,
    hidden: Float[Tensor, "text position hidden"],
    stock: Float[Tensor, "text position hidden"],
    lengths: Int[Tensor, "text"],
) -> Float[Tensor, ""]:
    """Mean KL(stock || model) in nats per token over the real positions."""
    real = torch.arange(hidden.shape[1])[None] < lengths[:, None]
    now, then = hidden[real.to(hidden.device)], stock[real.to(stock.device)]
    total = torch.zeros((), device=hidden.device)
    for some, kept in zip(now.split(_CHUNK_ROWS), then.split(_CHUNK_ROWS), strict=True):
        wanted = logits_of(model, kept).float().log_softmax(-1)
        given = logits_of(model, some).float().log_softmax(-1)
        total = total + (wanted.exp() * (wanted - given)).sum()
    return total / len(now)
