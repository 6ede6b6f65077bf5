"""LoRA as a control: the same heads' projections, the same number of trained weights, with PEFT.

A low-rank update touches whole matrices, so its patch holds whole projections of the operated
layers. The rank is the nearest one to the slices' weight count and is stored in the patch's names.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from headwise.errors import HeadwiseError, ModelError
from headwise.models.architectures import is_transposed, projection_name
from headwise.models.families.layout import Role
from headwise.models.patch import Slice
from headwise.models.slices import Span
from headwise.surgery.plan import SurgeryPlan


class LoraAdapter:
    """PEFT layers in a model while open; closing it gives the model back bit for bit."""

    def __init__(self, model: PreTrainedModel, plan: SurgeryPlan, budget: int, seed: int) -> None:
        self._model = model
        layers = sorted({head.layer for head in plan.target_heads})
        roles: tuple[Role, ...] = ("q", "k", "v", "o")
        names = {projection_name(model, layer, role) for layer in layers for role in roles}
        self._names = sorted(names)
        widths = [sum(model.get_submodule(name).weight.shape) for name in self._names]  # type: ignore[arg-type]
        self.rank = max(1, round(budget / sum(widths)))
        self._seed = seed
        offloaded = [n for n in self._names if self._weight(n).is_meta]
        if offloaded:
            raise ModelError(
                "lora cannot train offloaded weights: PEFT makes its factors where the weight is",
                where=offloaded[0],
                fix="place the planned layers on a device in --device-map, or use another mode",
            )

    def __enter__(self) -> LoraAdapter:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise HeadwiseError(
                "the lora mode needs PEFT", fix="pip install 'headwise[lora]'"
            ) from None
        self._before = {n: self._weight(n).detach().clone() for n in self._names}
        self._flags = {n: p.requires_grad for n, p in self._model.named_parameters()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.rank,
                target_modules=self._names,
                lora_dropout=0.0,
                fan_in_fan_out=is_transposed(self._model.get_submodule(self._names[0])),
            )
            inject_adapter_in_model(config, self._model)
        named = sorted(self._model.named_parameters())
        for name, parameter in named:
            parameter.requires_grad_("lora_" in name)
        self.parameters = [p for name, p in named if "lora_" in name]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in self._names:
            parent, _, child = name.rpartition(".")
            layer: Any = self._model.get_submodule(name)
            setattr(self._model.get_submodule(parent), child, layer.get_base_layer())
        if hasattr(self._model, "peft_config"):
            del self._model.peft_config
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self._flags[name])

    def _weight(self, name: str) -> torch.Tensor:
        layer: Any = self._model.get_submodule(name)
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
        weight: torch.Tensor = base.weight
        return weight

    def merged_slices(self) -> dict[str, Slice]:
        """Whole projections before and after adding the low-rank update."""
        slices = {}
        for name in self._names:
            layer: Any = self._model.get_submodule(name)
            before = self._before[name]
            delta = layer.get_delta_weight("default").detach().float()
            after = (before.float() + delta).to(before.dtype)
            span = Span(f"{name}.weight", 0, 0, before.shape[0])
            slices[f"{name}.lora{self.rank}"] = Slice(span, before, after)
        return slices
