"""`stream`: which key/value groups need only the first and the recent tokens, proven.

The result is written as the pattern files of DuoAttention, which kvpress reads too: a number for
every layer and group, lowest for the group that was restricted first. A threshold of 0.5, or a
quantile at the share of restricted groups, gives the set that was proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from headwise.artefacts import to_json, write_text
from headwise.errors import ModelError, SettingsError
from headwise.forward.attention import attend_ends
from headwise.forward.first_order import first_order_costs
from headwise.forward.hooked_pass import HookedPass
from headwise.forward.interventions import first_and_recent
from headwise.forward.measurements import Measurement, run_measurement
from headwise.forward.tap import LayerAttention
from headwise.heads import Head
from headwise.integrity.locks import one_writer
from headwise.models.architectures import architecture_of, geometry_of, layer_window
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.stored_weights import stored_weights
from headwise.progress import Budget, Progress, silent, stage, unlimited
from headwise.pruning.search import (
    NestedSearch,
    Unit,
    deal_documents,
    require_units,
)
from headwise.pruning.settings import StreamSettings
from headwise.pruning.values import PATTERN, PATTERN_CONFIG, STREAM, NestedSets
from headwise.texts.batches import batches
from headwise.texts.text_sets import TextSet, as_text_set

ENDS = "attention on both ends"  # an order: groups that look elsewhere least, first


@takes_model
def stream(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    also: TextSet | None = None,
    settings: StreamSettings | None = None,
    bos: bool | None = None,
    resume: bool = False,
    budget: Budget = unlimited,
    progress: Progress = silent,
) -> NestedSets:
    """Find the most groups that can do with a short memory, and write them and their pattern.

    Documents of `texts` are dealt out as for `prune`; those without a middle say nothing and are
    left out.
    """
    how, out = settings or StreamSettings(), Path(out)
    loaded = loaded.reading(bos)
    units = _groups(loaded)
    require_units(units, "group")
    given, length = as_text_set(texts, loaded.id), loaded.length(how.max_length)
    kept = how.first + how.recent
    if kept >= length:
        raise SettingsError(
            f"texts of {length} tokens have nothing between the first {how.first} and the "
            f"{how.recent} recent ones",
            fix="lower --first and --recent, or raise --max-length",
        )
    costs = deal_documents(
        loaded, given, also, how.search, length=length, minimum=kept + 1, progress=progress
    )
    costs.announce(units, how.search, budget)
    with one_writer(out):
        stage("attention on the first and the recent tokens", progress)
        encoded = costs.encoded["choosing"]
        mass = run_measurement(loaded.model, _mass_measurement(loaded, encoded, how))
        short, asked = first_and_recent(how.first, how.recent), [how.first, how.recent]
        costs.begin(short, out, [*asked, how.max_length], resume=resume)
        search = NestedSearch(costs, units, how.search, "group", len(units))
        found = search.run(how, _estimates(search, 1 - mass.ravel()), {ENDS: -mass.ravel()})
        per_token, full, saved = cache_bytes(loaded, found.groups, how)
        found = replace(
            found, mass=mass, bytes_per_token=per_token, full_bytes=full, saved_bytes=saved
        )
        write_pattern(found, out)
        found.save(out / STREAM)
    return found


def _groups(loaded: LoadedModel) -> dict[str, Unit]:
    """The heads of every key/value group by name."""
    model = loaded.model
    if architecture_of(model).order == "latent":
        raise ModelError(
            "the cache of this family is one compressed vector a token, shared by all heads: no "
            "group can have a shorter one",
            where=f"model_type={model.config.model_type!r}",
            fix="choose a model with keys and values of its own for every group",
        )
    groups: dict[str, Unit] = {}
    for layer in geometry_of(model).layers:
        size = geometry_of(model, layer).group
        for kv in range(geometry_of(model, layer).num_kv_heads):
            heads = range(kv * size, (kv + 1) * size)
            groups[f"L{layer}KV{kv}"] = tuple(Head(layer, index) for index in heads)
    return groups


def _mass_measurement(
    loaded: LoadedModel, encoded: list[list[int]], settings: StreamSettings
) -> Measurement[Float[np.ndarray, "layer group"]]:
    """Mean attention on both ends of queries that see something between them, by group."""
    geometry, work = geometry_of(loaded.model), list(batches(encoded, 1))
    sums = np.zeros((geometry.num_layers, geometry.num_kv_heads))
    kept = settings.first + settings.recent

    def read(number: int, attention: LayerAttention) -> Float[np.ndarray, "group"]:
        scores, values = attention.scores, attention.v
        _, lse = attend_ends(scores, values, settings.first, settings.recent)
        share = (lse - attention.lse).exp()[0, :, kept:].double().sum(1)  # by query head
        by_group: np.ndarray = share.unflatten(0, (values.shape[1], -1)).mean(1).cpu().numpy()
        return by_group

    def take(_: int, layer: int | None, shares: Float[np.ndarray, "group"]) -> None:
        assert layer is not None
        sums[geometry.layers.index(layer)] += shares

    yield HookedPass([batch.ids for batch in work], take, observe=read)
    mass: Float[np.ndarray, "layer group"] = sums / sum(len(ids) - kept for ids in encoded)
    return mass


def _estimates(
    search: NestedSearch, between: Float[np.ndarray, "group"]
) -> Float[np.ndarray, "group"]:
    """What each group costs alone: to first order, if not all are measured; else unused."""
    costs, model = search.costs, search.costs.loaded.model
    if len(search.units) <= search.settings.exact or stored_weights(model) is not None:
        return between
    heads = [head for unit in search.units.values() for head in unit]
    encoded, kinds = costs.encoded["choosing"], [costs.intervention]
    rows = first_order_costs(model, encoded, heads, kinds)[:, 0].sum(1)
    by_head = dict(zip(heads, rows / costs.tokens("choosing").sum(), strict=True))
    return np.array([sum(by_head[head] for head in unit) for unit in search.units.values()])


def cache_bytes(
    loaded: LoadedModel, groups: Sequence[str], settings: StreamSettings
) -> tuple[int, int, int]:
    """Bytes of the cache per token, at the context, and what the restricted groups save of it.

    A layer with a sliding window keeps no more than the window as it is.
    """
    model, context = loaded.model, settings.context
    size = torch.finfo(model.dtype).bits // 8
    per_token = full = saved = 0
    for name, unit in _groups(loaded).items():
        shape = geometry_of(model, unit[0].layer)
        each = size * (shape.key_dim + shape.head_dim)
        held = min(context, layer_window(model, unit[0].layer) or context)
        per_token, full = per_token + each, full + each * held
        if name in groups:
            saved += each * max(0, held - settings.first - settings.recent)
    return per_token, full, saved


def write_pattern(found: NestedSets, out: Path) -> list[Path]:
    """Write `full_attention_heads.tsv` and `config.json` as DuoAttention has them.

    Scores ascend in the order of the search: the chosen groups from 0 to 0.5, the others that were
    tried up to 0.6, and those that were not by how much they look at what lies between.
    """
    how, mass = found.settings, found.mass
    assert isinstance(how, StreamSettings)
    assert mass is not None
    scores = 0.6 + 0.4 * (1 - mass)
    rows = {layer: row for row, layer in enumerate(found.model.layer_numbers)}
    tried = len(found.order) - found.chosen
    ascending = [
        *np.linspace(0, 0.5, found.chosen, endpoint=False),
        *np.linspace(0.5, 0.6, tried, endpoint=False),
    ]
    for name, score in zip(found.order, ascending, strict=True):
        layer, _, group = name.removeprefix("L").partition("KV")
        scores[rows[int(layer)], int(group)] = score
    config = {
        "model_name": found.model.id,
        "sink_size": how.first,
        "recent_size": how.recent,
        "threshold": 0.5,
        "sparsity": found.chosen / found.units,
    }
    text = "".join("\t".join(f"{one:.18e}" for one in row) + "\n" for row in scores)
    return [write_text(out / PATTERN, text), write_text(out / PATTERN_CONFIG, to_json(config))]
