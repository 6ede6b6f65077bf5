"""`prune`: which heads can go, proven; the product is a patch that takes them out.

A head that is out gives its mean output at every token (or nothing): by the output bias where the
family has one, else by parking the head on a first token that is always the same. Where neither is
possible it gives nothing, in the search as in the patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwise.artefacts import content_hash, to_json, versions
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ModelError
from headwise.forward.first_order import first_order_costs
from headwise.forward.guard import guard
from headwise.forward.interventions import ZERO, Intervention, mean_output
from headwise.forward.mean_outputs import measure_means
from headwise.heads import Head, all_heads, format_heads
from headwise.integrity.locks import one_writer
from headwise.models.architectures import geometry_of, require_plain
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.models.stored_weights import stored_weights
from headwise.progress import Budget, Progress, Work, silent, stage, unlimited
from headwise.proof.perplexity import text_losses
from headwise.pruning.search import (
    Documents,
    JointCosts,
    NestedSearch,
    candidates,
    deal_documents,
    random_orders,
    require_units,
)
from headwise.pruning.settings import PruneSettings, SearchSettings
from headwise.pruning.values import RANDOM, NestedSets, Prune
from headwise.surgery.operation import silence
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import Dose, retire, treat
from headwise.texts.batches import Batch, batches
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.triaging.triage import query_plan
from headwise.values import to_plain

PRUNE, PATCH, GAIN = "prune.json", "patch.safetensors", "gain.safetensors"
FEWER = "--max-texts, --max-length, --exact, --width, --most"
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
) -> Prune:
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
    require_units([(head,) for head in heads], "head")
    given = as_text_set(texts, loaded.id)
    documents = deal_documents(loaded, given, also, how.search, max_length=how.max_length)
    budget(loaded.model, search_work(documents, how.search, len(heads)))
    guard(loaded, documents.longest)
    with one_writer(out):
        removal = _Removal.of(loaded, documents, how, progress)
        costs = JointCosts(
            loaded.model,
            documents,
            removal.intervention,
            identity=_identity(loaded, documents, how),
            folder=out,
            resume=resume,
            progress=progress,
        )
        nested, chosen, gaining = _search(costs, removal, heads, how)
        found = Prune(
            model=removal.diagnosis.model,
            settings=how,
            bos=loaded.bos,
            nested=nested,
            heads=tuple(map(str, chosen)),
            gain_heads=tuple(map(str, gaining)),
            versions=versions(),
        )
        patches = {PATCH: removal.patch(chosen)}
        if gaining:
            patches[GAIN] = removal.patch(gaining)
        _require_as_measured(loaded, documents, how, patches[PATCH], nested)
        (out / GAIN).unlink(missing_ok=True)  # of an earlier run
        for name, patch in patches.items():
            patch.save(out / name)
        found.save(out / PRUNE)
    return found


def search_work(documents: Documents, search: SearchSettings, units: int) -> Work:
    """At most: single costs of half the layers each, every step of the search, and every test."""
    exact, most = min(search.exact, units), min(search.most or units, search.exact, units)
    choosing, validation, held_out, other = (
        sum(map(len, documents.encoded.get(part, [])))
        for part in ("choosing", "validation", "held_out", "other")
    )
    work = choosing * (6 + exact / 2 + most * (search.width + 1)) + validation * 1.25 * most
    work += (held_out + other) * 8 * (search.curve + 2)
    return Work(work, 8 * documents.longest, kept=documents.longest, less=FEWER)


def _identity(loaded: LoadedModel, documents: Documents, settings: PruneSettings) -> str:
    """What the measured losses depend on: not on the limit, nor on how much is tried."""
    texts = {part: one.sha256 for part, one in documents.texts.items()}
    asked = [loaded.describe().fingerprint, texts, settings.replacement, settings.max_length]
    return content_hash([to_json(to_plain([*asked, loaded.bos]))])


@dataclass(frozen=True)
class _Removal:
    """How heads are taken out of one model: in a measurement, and by a patch."""

    loaded: LoadedModel
    documents: Documents
    settings: PruneSettings
    diagnosis: Diagnosis = field(repr=False)
    means: Float[Tensor, "layer head value"] | None = field(repr=False)  # None: nothing is given

    @staticmethod
    def of(
        loaded: LoadedModel, documents: Documents, settings: PruneSettings, progress: Progress
    ) -> _Removal:
        """Measure what is needed of the heads on choosing text."""
        stage("what the heads give on choosing text", progress)
        texts = documents.texts["choosing"]
        length = loaded.length(settings.max_length)
        diagnosis = diagnose(loaded, texts, max_length=length, bos=loaded.bos)
        removal = _Removal(loaded, documents, settings, diagnosis, None)
        if settings.replacement == "zero":
            return removal
        geometry, blocks = geometry_of(loaded.model), removal.blocks
        every = all_heads(geometry.num_layers, geometry.num_heads, geometry.layers)
        try:
            directions = measure_directions(loaded.model, blocks, geometry.layers)
        except ModelError:  # latent attention, or layers of different widths
            stage("this family cannot hold mean outputs: heads that are out give nothing", progress)
            return removal
        given = dict.fromkeys(every, Dose("retire", 1.0))
        plan = query_plan(diagnosis, every)
        retired = treat(loaded.model, plan, given, directions=directions).info.retired or {}
        means = measure_means(loaded.model, blocks)
        for head in plan.heads_of(retired["zeroed"]) if "zeroed" in retired else []:
            means[geometry.layers.index(head.layer), head.index] = 0
        return replace(removal, means=means)

    @property
    def blocks(self) -> list[Batch]:
        """The choosing text in batches."""
        return list(batches(self.documents.encoded["choosing"], 4))

    @property
    def intervention(self) -> Intervention:
        """What a head gives when it is out."""
        return ZERO if self.means is None else mean_output(self.loaded.model, self.means)

    def patch(self, heads: Sequence[Head]) -> Patch:
        """The patch that takes heads out; its `info.retired` says how each."""
        plan, model = query_plan(self.diagnosis, heads), self.loaded.model
        if self.means is None or not heads:
            patch = silence(model, plan)
            info = replace(patch.info, retired={"zeroed": format_heads(heads)} if heads else None)
            return replace(patch, info=info)
        return retire(model, plan, self.blocks, self.means)


def _search(
    costs: JointCosts, removal: _Removal, heads: Sequence[Head], settings: PruneSettings
) -> tuple[NestedSets, list[Head], list[Head]]:
    """The nested sets, the heads of the chosen one, and those of a set that surely gains."""
    names, units = [str(head) for head in heads], {str(head): (head,) for head in heads}
    search = NestedSearch(costs, units, settings.search, "head", len(heads))
    ranks, estimates = _other_orders(removal, heads)
    exact = len(names) if settings.even else settings.search.exact
    search.measure_singles(candidates(names, estimates, exact))
    if settings.even:
        search = _even_search(search, ranks, heads)
        rivals = {name: [[f"{name} {i}" for i in range(search.total)]] for name in ranks}
        rivals[RANDOM] = [[f"{RANDOM} {i}" for i in range(search.total)]]
    else:
        search.grow()
        rivals = {
            name: [[names[i] for i in np.argsort(row, kind="stable")]]
            for name, row in ranks.items()
        }
        rivals[RANDOM] = random_orders(names, settings.search.seed)
    nested = search.result(rivals)
    gaining = nested.lowest if nested.gain not in ("none", "chance") else 0
    chosen, lower = (
        [head for name in nested.order[:count] for head in search.units[name]]
        for count in (nested.chosen, gaining)
    )
    return nested, chosen, lower


def _other_orders(
    removal: _Removal, heads: Sequence[Head]
) -> tuple[dict[str, Float[np.ndarray, "head"]], Float[np.ndarray, "head"]]:
    """How others would order heads, and a first-order estimate of what each costs alone.

    A streamed model is not run backwards; its estimate is the size of what a head gives.
    """
    maps = removal.diagnosis.maps
    norm = maps["output_norm_ratio"].ravel()
    ranks = {"first-token mass": -maps["first_token_mass"].ravel(), "output norm": norm}
    if stored_weights(removal.loaded.model) is not None:
        return ranks, norm
    encoded = removal.documents.encoded["choosing"]
    kinds = [ZERO, removal.intervention]
    costs = first_order_costs(removal.loaded.model, encoded, heads, kinds)
    tokens = removal.documents.tokens("choosing")
    # Michel et al. 2019, eq. 2: the mean over documents of the absolute estimate
    ranks["first order (Michel)"] = np.abs(costs[:, 0] / tokens).mean(1)
    return ranks, costs[:, 1].sum(1) / tokens.sum()


def _even_search(search: NestedSearch, ranks: Ranks, heads: Sequence[Head]) -> NestedSearch:
    """A search in which one head of every layer leaves at a time, the cheapest first.

    Where query heads share keys it is one head of every group, so that groups stay alike.
    """
    geometry = geometry_of(search.costs.model)
    places: dict[tuple[int, int], list[int]] = {}
    for at, head in enumerate(heads):
        group = head.index // geometry.group if geometry.group > 1 else 0
        places.setdefault((head.layer, group), []).append(at)
    rows = [np.array(some) for some in places.values()]
    total = min(map(len, rows))
    generator = np.random.default_rng([search.settings.seed, len(heads)])
    own = np.array([search.singles[str(head)].value for head in heads])
    every = {"row": own, **ranks, RANDOM: generator.random(len(heads))}
    units = {
        f"{name} {i}": tuple(heads[some[np.argsort(row[some], kind="stable")[i]]] for some in rows)
        for name, row in every.items()
        for i in range(total)
    }
    even = NestedSearch(search.costs, units, search.settings, "row", total, search.singles)
    even.take_in_order([f"row {i}" for i in range(total)])
    return even


@torch.inference_mode()
def _require_as_measured(
    loaded: LoadedModel,
    documents: Documents,
    settings: PruneSettings,
    patch: Patch,
    nested: NestedSets,
) -> None:
    """Raise if the model with the patch is not what was measured: its loss on held-out text."""
    measured = nested.cost(nested.chosen, "held_out")
    if measured is None:
        return
    texts = documents.texts["held_out"]
    losses = []
    for patches in ([], [patch]):
        with applied(loaded.model, patches):
            losses.append(text_losses(loaded, texts, max_length=settings.max_length, whole=False))
    stock, pruned = (one.loss.value for one in losses)
    if abs(pruned - stock - measured.value) > _DIFFERENCE:
        raise ModelError(
            f"the patch changes the loss by {pruned - stock:+.4f}, measured was "
            f"{measured.value:+.4f}: it does not take the heads out as it should",
            where=loaded.id,
            fix="use --replacement zero",
        )
