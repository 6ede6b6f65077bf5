"""The patch: changed slices with what they replaced; the unit of saving, undoing and merging."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import parse_json
from headwise.errors import ArtefactError
from headwise.heads import Head
from headwise.models.architectures import (
    ROLES,
    attention_layers,
    geometry_of,
    is_transposed,
    projection_name,
    require_plain,
    widths,
)
from headwise.models.families.layout import Role
from headwise.models.offloading import held_tensor
from headwise.models.slices import (
    Span,
    head_spans,
    output_bias_span,
    slices_fingerprint,
    write_slices,
)
from headwise.models.tensor_files import read_safetensors, write_safetensors
from headwise.models.values import PatchInfo, model_name
from headwise.values import from_plain, to_plain

PATCH_SCHEMA = "headwise.patch/1"


@dataclass(frozen=True)
class Slice:
    """One changed range of weights: where, what it was and what it became."""

    span: Span
    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Patch:
    """Changed slices by name, with provenance."""

    slices: Mapping[str, Slice] = field(repr=False)
    info: PatchInfo = field(default_factory=PatchInfo)
    documents: tuple[str, ...] = field(default=(), repr=False)  # hashes of what it was trained on

    def __repr__(self) -> str:
        size = f"{len(self.slices)} slices, {self.num_weights:,} weights"
        return f"Patch(of {model_name(self.info.base_model)}, {size})"

    @property
    def num_weights(self) -> int:
        """How many numbers the patch changes."""
        return sum(part.after.numel() for part in self.slices.values())

    @property
    def dtype(self) -> str:
        """The precision of the model it was made from, e.g. `float32`; `auto` if it is empty."""
        part = next(iter(self.slices.values()), None)
        if part is None:
            return "auto"
        return str(part.before.dtype).removeprefix("torch.")

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing: leaving the model alone was best."""
        return not self.slices

    def without_unchanged(self) -> Patch:
        """The patch without slices whose bits stay what they were."""
        kept = {n: p for n, p in self.slices.items() if not torch.equal(p.before, p.after)}
        return Patch(kept, self.info)

    def base_fingerprint(self) -> str:
        """A hash of what the slices were: the patch fits any model that has these bits there."""
        return slices_fingerprint({name: part.before for name, part in self.slices.items()})

    def fingerprint(self) -> str:
        """A hash of what the slices became: the identity of the patch."""
        return slices_fingerprint({name: part.after for name, part in self.slices.items()})

    def apply(self, model: PreTrainedModel, *, force: bool = False) -> None:
        """Write the `after` values; refuses a base whose slices differ unless forced."""
        self._require(model, "before", "apply", any_bits=force)
        write_slices(model, {part.span: part.after for part in self.slices.values()})

    def undo(self, model: PreTrainedModel, *, force: bool = False) -> None:
        """Write the `before` values back; refuses a model that does not carry this patch."""
        self._require(model, "after", "undo", any_bits=force)
        write_slices(model, {part.span: part.before for part in self.slices.values()})

    def describe(self, path: Path | None = None) -> PatchInfo:
        """What an evaluation records of this patch."""
        return replace(
            self.info,
            path=None if path is None else str(path),
            num_weights=self.num_weights,
            sha256=self.fingerprint(),
        )

    @contextmanager
    def applied(self, model: PreTrainedModel, *, force: bool = False) -> Iterator[None]:
        """The model with the patch while open; afterwards its bits are what they were."""
        with self._exchanged(model, force=force):
            yield

    @contextmanager
    def undone(self, model: PreTrainedModel, *, force: bool = False) -> Iterator[None]:
        """The model without the patch while open; afterwards it carries the patch again."""
        with self._exchanged(model, force=force, undo=True):
            yield

    @contextmanager
    def _exchanged(
        self, model: PreTrainedModel, *, force: bool, undo: bool = False
    ) -> Iterator[None]:
        held = {part.span: part.after if undo else part.before for part in self.slices.values()}
        if force:  # on another base: whatever stands there comes back
            state, verb = ("after", "undo") if undo else ("before", "apply")
            self._require(model, state, verb, any_bits=True)
            held = {span: span.of(model).detach().clone() for span in held}
        (self.undo if undo else self.apply)(model, force=force)
        try:
            yield
        finally:
            write_slices(model, held)

    def _require(self, model: PreTrainedModel, state: str, verb: str, *, any_bits: bool) -> None:
        """Check every slice before one is written; `any_bits` asks for the right shape only."""
        _require_heads_only(model, {name: part.span for name, part in self.slices.items()}, verb)
        parameters = dict(model.named_parameters())
        by_parameter = sorted(self.slices.items(), key=lambda item: item[1].span.parameter)
        for parameter, slices in groupby(by_parameter, key=lambda item: item[1].span.parameter):
            tensor: Tensor | None = parameters.get(parameter)
            if tensor is not None and not any_bits:
                tensor = held_tensor(model, parameter)  # once: it may lie on disk
            for name, part in slices:
                fits = _fits(part, tensor)
                if fits and (any_bits or _holds(tensor, part.span, getattr(part, state))):
                    continue
                raise ArtefactError(
                    f"cannot {verb} the patch: {name} is not what it should be "
                    f"({'other bits' if fits else 'no such weights'})",
                    where=f"patch made for {self.info.base_model}",
                    fix="use the model the patch was made from" + (", or --force" if fits else ""),
                )

    def save(self, path: Path) -> Path:
        """Write `patch.safetensors` atomically."""
        require_sound(self.slices, path)
        tensors = {}
        for name, part in self.slices.items():
            tensors[f"{name}.after"] = part.after.contiguous()
            tensors[f"{name}.before"] = part.before.contiguous()
        spans = {
            name: [part.span.parameter, part.span.axis, part.span.start, part.span.stop]
            for name, part in self.slices.items()
        }
        metadata = {
            "schema": PATCH_SCHEMA,
            "spans": json.dumps(spans, sort_keys=True),
            "info": json.dumps(to_plain(self.info), sort_keys=True),
            "base_slices_sha256": self.base_fingerprint(),
        }
        if self.documents:
            metadata["documents"] = " ".join(self.documents)
        return write_safetensors(path, tensors, metadata)

    @staticmethod
    def load(path: Path) -> Patch:
        """Read a patch file; a damaged, cut-off or foreign file is an `ArtefactError`."""
        path = Path(path)
        tensors, metadata = read_safetensors(path, PATCH_SCHEMA)
        places = parse_json(metadata.get("spans", ""), path)
        spans = from_plain(dict[str, tuple[str, int, int, int]], places, path)
        wanted = {f"{name}.{state}" for name in spans for state in ("before", "after")}
        if wanted != set(tensors):
            raise ArtefactError("its slices and their places do not go together", where=path)
        slices = {
            name: Slice(Span(*span), tensors[f"{name}.before"], tensors[f"{name}.after"])
            for name, span in spans.items()
        }
        require_sound(slices, path)
        info = from_plain(PatchInfo, parse_json(metadata.get("info", ""), path), path)
        patch = Patch(slices, info, tuple(metadata.get("documents", "").split()))
        if patch.base_fingerprint() != metadata.get("base_slices_sha256"):
            raise ArtefactError("the patch is damaged: its base slices do not match", where=path)
        return patch


def require_sound(slices: Mapping[str, Slice], where: object) -> None:
    """Refuse slices that no repair makes: odd places, shapes or types, NaN, or an overlap."""
    for name, part in slices.items():
        fault = _fault(part)
        if fault:
            raise ArtefactError(f"the slice {name} {fault}", where=where, fix=_REMAKE)
    _require_apart({name: part.span for name, part in slices.items()}, where)


_REMAKE = "use a patch that headwise wrote"


def _fault(part: Slice) -> str:
    span, before, after = part.span, part.before, part.after
    if span.axis not in (0, 1) or not 0 <= span.start < span.stop:
        return f"has no place: axis {span.axis}, {span.start} to {span.stop}"
    if not (before.is_floating_point() and before.dtype == after.dtype):
        return f"turns {before.dtype} into {after.dtype}"
    if before.shape != after.shape or before.dim() not in (1, 2) or span.axis >= before.dim():
        return f"turns a shape {tuple(before.shape)} into {tuple(after.shape)}"
    if before.shape[span.axis] != span.stop - span.start:
        return f"has {before.shape[span.axis]} rows for {span.stop - span.start} places"
    return "" if bool(torch.isfinite(after).all()) else "holds NaN or infinity"


@contextmanager
def applied(
    model: PreTrainedModel, patches: Sequence[Patch], *, force: bool = False
) -> Iterator[None]:
    """The model with several patches on it, in order."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch.applied(model, force=force))
        yield


def _fits(part: Slice, tensor: Tensor | None) -> bool:
    if tensor is None or tensor.shape[part.span.axis] < part.span.stop:
        return False
    return part.span.within(tensor).shape == part.after.shape


def _holds(tensor: Tensor | None, span: Span, value: Tensor) -> bool:
    """Whether a parameter has these bits, in this precision, at a span."""
    if tensor is None or tensor.dtype != value.dtype:
        return False
    return torch.equal(span.within(tensor).detach().cpu(), value.detach().cpu())


_HEAD = re.compile(r"L(\d{1,6})(H|KV)(\d{1,6})\.([qkvo])(?:_bias)?")
_BIAS = re.compile(r"L(\d{1,6})\.o_bias")


def _require_heads_only(model: PreTrainedModel, spans: Mapping[str, Span], verb: str) -> None:
    """Refuse a span that is not where the architecture has what its name says."""
    layers = set(attention_layers(model))
    require_plain(model)
    for name, span in spans.items():
        expected = _span_of(model, name, layers)
        if expected is None or span != expected:
            place = "nothing of that name" if expected is None else str(expected)
            raise ArtefactError(
                f"cannot {verb} the patch: {name} is no slice of a head of this model "
                f"({span}, the model has {place})",
                where=model.config.model_type,
                fix="use the model the patch was made from, and a patch that headwise wrote",
            )


def _span_of(model: PreTrainedModel, name: str, layers: set[int]) -> Span | None:
    """Where a slice of this name is; of a whole projection (lora) any stretch of it."""
    head, bias = _HEAD.fullmatch(name), _BIAS.fullmatch(name)
    if head is not None and int(head[1]) in layers:
        geometry = geometry_of(model, int(head[1]))
        grouped = head[2] == "KV"
        index = int(head[3]) * (geometry.group if grouped else 1)
        if index < geometry.num_heads:
            role: Role = head[4]  # type: ignore[assignment]
            return head_spans(model, Head(int(head[1]), index), role).get(name)
    if bias is not None and int(bias[1]) in layers:
        return output_bias_span(model, int(bias[1])).get(name)
    module = re.sub(r"\.lora\d{1,6}$", "", name)
    projections = {projection_name(model, n, role) for n in layers for role in ROLES}
    if module != name and module in projections:
        reads, writes = widths(model.get_submodule(module))
        rows = reads if is_transposed(model.get_submodule(module)) else writes
        return Span(f"{module}.weight", 0, 0, rows)
    return None


def _require_apart(spans: Mapping[str, Span], where: object) -> None:
    """Refuse slices that overlap: undoing them in any order would not give the weights back."""
    named = sorted((span.parameter, span.axis, span.start, span.stop) for span in spans.values())
    axes: dict[str, int] = {}
    for parameter, axis, _, _ in named:
        if axes.setdefault(parameter, axis) != axis:
            raise ArtefactError(f"slices of {parameter} cross each other", where=where)
    for (parameter, _, _, stop), (other, _, start, _) in pairwise(named):
        if parameter == other and start < stop:
            raise ArtefactError(f"slices of {parameter} overlap at {start}", where=where)
