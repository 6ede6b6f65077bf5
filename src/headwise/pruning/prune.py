"""`prune`: which heads can go, proven; the product is a patch that takes them out.

A head that is out gives its mean output at every token (or nothing): by the output bias where the
family has one, else by parking the head on a first token that is always the same. Where neither is
possible it gives nothing, in the search as in the patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ModelError
from headwise.forward.first_order import first_order_costs
from headwise.forward.interventions import ZERO, mean_output
from headwise.forward.mean_outputs import measure_means
from headwise.heads import Head, all_heads, format_heads
from headwise.integrity.locks import one_writer
from headwise.models.architectures import geometry_of, require_plain
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.stored_weights import stored_weights
from headwise.progress import Budget, Progress, silent, stage, unlimited
from headwise.proof.perplexity import text_losses
from headwise.pruning.search import JointCosts, NestedSearch, deal_documents, require_units
from headwise.pruning.settings import PruneSettings
from headwise.pruning.values import GAIN, PATCH, PRUNE, RANDOM, NestedSets
from headwise.surgery.operation import silence
from headwise.surgery.plan import SurgeryPlan
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import Dose, retire, treat
from headwise.texts.batches import Batch, batches
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.triaging.triage import query_plan

_DIFFERENCE = 1e-3  # nats per token by which a patch may differ from what was measured

Ranks = Mapping[str, Float[np.ndarray, "head"]]  # by order: the lowest leave first


@takes_model
def prune(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    also: TextSet | None = None,
    settings: PruneSettings | None = None,
    bos: bool | None = None,
    resume: bool = False,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> NestedSets:
    """Find the largest set of heads that can go, and write it and its patch into `out`.

    Documents of `texts` are dealt out: some to choose on, some to validate, some to check. `also`
    is another kind of text to check on, by default the bundled one. `budget` hears how much work
    it is, before it starts.
    """
    how, out = settings or PruneSettings(), Path(out)
    require_plain(loaded.model)
    loaded = loaded.reading(bos)
    geometry = geometry_of(loaded.model)
    heads = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
    units = {str(head): (head,) for head in heads}
    require_units(units, "head")
    given, length = as_text_set(texts, loaded.id), loaded.length(how.max_length)
    costs = deal_documents(loaded, given, also, how.search, length=length, progress=progress)
    costs.announce(units, how.search, budget)
    with one_writer(out):
        stage("what the heads give on choosing text", progress)
        diagnosis = diagnose(loaded, costs.texts["choosing"], max_length=length, bos=loaded.bos)
        blocks = list(batches(costs.encoded["choosing"], 4))
        means = None
        if how.replacement == "mean":
            means = _means(loaded.model, query_plan(diagnosis, heads), blocks, progress)
        gives = ZERO if means is None else mean_output(loaded.model, means)
        costs.begin(gives, out, [how.replacement, how.max_length], resume=resume)
        search = NestedSearch(costs, units, how.search, "head", len(units))
        ranks, estimates = _other_orders(costs, diagnosis, heads)
        found = _even(search, ranks, how) if how.even else search.run(how, estimates, ranks)

        def without(names: Sequence[str]) -> Patch:
            plan = query_plan(diagnosis, [Head.parse(name) for name in names])
            return _patch(loaded.model, plan, blocks, means)

        patches = {PATCH: without(found.heads)}
        if found.gain_heads:
            patches[GAIN] = without(found.gain_heads)
        _require_as_measured(costs, patches[PATCH], found)
        (out / GAIN).unlink(missing_ok=True)  # of an earlier run
        for name, patch in patches.items():
            patch.save(out / name)
        found = replace(found, patch=patches[PATCH].fingerprint())
        found.save(out / PRUNE)
    return found


def _means(
    model: PreTrainedModel, plan: SurgeryPlan, blocks: Sequence[Batch], progress: Progress
) -> Float[Tensor, "layer head value"] | None:
    """What each head of the plan gives when it is out, as a patch can write it; None: nothing."""
    geometry = geometry_of(model)
    try:
        directions = measure_directions(model, blocks, geometry.layers)
    except ModelError:  # latent attention, or layers of different widths
        stage("this family cannot hold mean outputs: heads that are out give nothing", progress)
        return None
    doses = dict.fromkeys(plan.target_heads, Dose("retire", 1.0))
    retired = treat(model, plan, doses, directions=directions).info.retired or {}
    means = measure_means(model, blocks)
    for head in plan.heads_of(retired["zeroed"]) if "zeroed" in retired else []:
        means[geometry.layers.index(head.layer), head.index] = 0
    return means


def _patch(
    model: PreTrainedModel,
    plan: SurgeryPlan,
    blocks: Sequence[Batch],
    means: Float[Tensor, "layer head value"] | None,
) -> Patch:
    """The patch that takes the plan's heads out; its `info.retired` says how each."""
    heads = plan.target_heads
    if heads and means is not None:
        return retire(model, plan, blocks, means)
    patch = silence(model, plan)
    info = replace(patch.info, retired={"zeroed": format_heads(heads)} if heads else None)
    return replace(patch, info=info)


def _other_orders(
    costs: JointCosts, diagnosis: Diagnosis, heads: Sequence[Head]
) -> tuple[dict[str, Float[np.ndarray, "head"]], Float[np.ndarray, "head"]]:
    """How others would order heads, and a first-order estimate of what each costs alone.

    A streamed model is not run backwards; its estimate is the size of what a head gives.
    """
    maps, model = diagnosis.maps, costs.loaded.model
    norm = maps["output_norm_ratio"].ravel()
    ranks = {"first-token mass": -maps["first_token_mass"].ravel(), "output norm": norm}
    if stored_weights(model) is not None:
        return ranks, norm
    encoded, tokens = costs.encoded["choosing"], costs.tokens("choosing")
    estimates = first_order_costs(model, encoded, heads, [ZERO, costs.intervention])
    # Michel et al. 2019, eq. 2: the mean over documents of the absolute estimate
    ranks["first order (Michel)"] = np.abs(estimates[:, 0] / tokens).mean(1)
    return ranks, estimates[:, 1].sum(1) / tokens.sum()


def _even(search: NestedSearch, ranks: Ranks, how: PruneSettings) -> NestedSets:
    """One head of every layer leaves at a time, the cheapest first.

    Where query heads share keys it is one head of every group, so that groups stay alike.
    """
    heads = [unit[0] for unit in search.units.values()]
    geometry = geometry_of(search.costs.loaded.model)
    search.measure_singles(list(search.units))
    places: dict[tuple[int, int], list[int]] = {}
    for at, head in enumerate(heads):
        group = head.index // geometry.group if geometry.group > 1 else 0
        places.setdefault((head.layer, group), []).append(at)
    rows = [np.array(some) for some in places.values()]
    total = min(map(len, rows))
    generator = np.random.default_rng([how.search.seed, len(heads)])
    own = np.array([search.singles[str(head)].value for head in heads])
    every = {"row": own, **ranks, RANDOM: generator.random(len(heads))}
    units = {
        f"{name} {i}": tuple(heads[some[np.argsort(row[some], kind="stable")[i]]] for some in rows)
        for name, row in every.items()
        for i in range(total)
    }
    orders = {name: [f"{name} {i}" for i in range(total)] for name in every}
    even = NestedSearch(search.costs, units, how.search, "row", total, search.singles)
    even.take_in_order(orders.pop("row"))
    return even.result(how, {name: [order] for name, order in orders.items()})


@torch.inference_mode()
def _require_as_measured(costs: JointCosts, patch: Patch, found: NestedSets) -> None:
    """Raise if the model with the patch is not what was measured: its loss on held-out text."""
    measured = found.cost(found.chosen, "held_out")
    if measured is None:
        return
    loaded, texts, losses = costs.loaded, costs.texts["held_out"], []
    length = found.settings.max_length
    for patches in ([], [patch]):
        with applied(loaded.model, patches):
            losses.append(text_losses(loaded, texts, max_length=length, whole=False))
    stock, pruned = (one.loss.value for one in losses)
    if abs(pruned - stock - measured.value) > _DIFFERENCE:
        raise ModelError(
            f"the patch changes the loss by {pruned - stock:+.4f}, measured was "
            f"{measured.value:+.4f}: it does not take the heads out as it should",
            where=loaded.id,
            fix="use --replacement zero",
        )
