"""`stream`: which key/value groups need only the first and the recent tokens, proven.

The result is written as the pattern files of DuoAttention, which kvpress reads too: a number for
every layer and group, lowest for the group that was restricted first. A threshold of 0.5, or a
quantile at the share of restricted groups, gives the set that was proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from headwise.artefacts import content_hash, to_json, versions, write_text
from headwise.errors import ModelError, SettingsError
from headwise.forward.attention import attend_ends
from headwise.forward.first_order import first_order_costs
from headwise.forward.guard import guard
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
from headwise.pruning.prune import search_work
from headwise.pruning.search import (
    Documents,
    JointCosts,
    NestedSearch,
    Unit,
    candidates,
    deal_documents,
    random_orders,
    require_units,
)
from headwise.pruning.settings import StreamSettings
from headwise.pruning.values import RANDOM, NestedSets, Streaming
from headwise.texts.batches import batches
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.values import to_plain

STREAM = "stream.json"
PATTERN, PATTERN_CONFIG = "full_attention_heads.tsv", "config.json"  # DuoAttention's own names
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
) -> Streaming:
    """Find the most groups that can do with a short memory, and write them and their pattern.

    Documents of `texts` are dealt out as for `prune`; those without a middle say nothing and are
    left out.
    """
    how, out = settings or StreamSettings(), Path(out)
    loaded = loaded.reading(bos)
    units = _groups(loaded)
    require_units(list(units.values()), "group")
    documents = _documents(loaded, as_text_set(texts, loaded.id), also, how)
    budget(loaded.model, search_work(documents, how.search, len(units)))
    guard(loaded, documents.longest)
    with one_writer(out):
        stage("attention on the first and the recent tokens", progress)
        encoded = documents.encoded["choosing"]
        mass = run_measurement(loaded.model, _mass_measurement(loaded, encoded, how))
        costs = JointCosts(
            loaded.model,
            documents,
            first_and_recent(how.first, how.recent),
            identity=_identity(loaded, documents, how),
            folder=out,
            resume=resume,
            progress=progress,
        )
        nested = _search(costs, units, mass, how)
        per_token, full, saved = cache_bytes(loaded, nested.order[: nested.chosen], how)
        found = Streaming(
            model=loaded.describe(),
            settings=how,
            bos=loaded.bos,
            nested=nested,
            groups=nested.order[: nested.chosen],
            mass=mass,
            bytes_per_token=per_token,
            full_bytes=full,
            saved_bytes=saved,
            versions=versions(),
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


def _documents(
    loaded: LoadedModel, texts: TextSet, also: TextSet | None, settings: StreamSettings
) -> Documents:
    """Documents that are longer than what a restricted group keeps."""
    kept, length = settings.first + settings.recent, loaded.length(settings.max_length)
    if kept >= length:
        raise SettingsError(
            f"texts of {length} tokens have nothing between the first {settings.first} and the "
            f"{settings.recent} recent ones",
            fix="lower --first and --recent, or raise --max-length",
        )
    return deal_documents(
        loaded, texts, also, settings.search, max_length=settings.max_length, minimum=kept + 1
    )


def _identity(loaded: LoadedModel, documents: Documents, settings: StreamSettings) -> str:
    """What the measured losses depend on."""
    texts = {part: one.sha256 for part, one in documents.texts.items()}
    asked = [loaded.describe().fingerprint, texts, settings.first, settings.recent]
    return content_hash([to_json(to_plain([*asked, settings.max_length, loaded.bos]))])


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


def _search(
    costs: JointCosts,
    units: dict[str, Unit],
    mass: Float[np.ndarray, "layer group"],
    settings: StreamSettings,
) -> NestedSets:
    names, model = list(units), costs.model
    estimates = 1 - mass.ravel()
    if len(names) > settings.search.exact and stored_weights(model) is None:
        encoded = costs.documents.encoded["choosing"]
        heads = [head for unit in units.values() for head in unit]
        rows = first_order_costs(model, encoded, heads, [costs.intervention])[:, 0].sum(1)
        by_head = dict(zip(heads, rows / costs.documents.tokens("choosing").sum(), strict=True))
        estimates = np.array([sum(by_head[head] for head in unit) for unit in units.values()])
    search = NestedSearch(costs, units, settings.search, "group", len(units))
    search.measure_singles(candidates(names, estimates, settings.search.exact))
    search.grow()
    by_mass = [names[i] for i in np.argsort(-mass.ravel(), kind="stable")]
    return search.result({ENDS: [by_mass], RANDOM: random_orders(names, settings.search.seed)})


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


def write_pattern(found: Streaming, out: Path) -> list[Path]:
    """Write `full_attention_heads.tsv` and `config.json` as DuoAttention has them.

    Scores ascend in the order of the search: the chosen groups from 0 to 0.5, the others that were
    tried up to 0.6, and those that were not by how much they look at what lies between.
    """
    nested, scores = found.nested, 0.6 + 0.4 * (1 - found.mass)
    rows = {layer: row for row, layer in enumerate(found.model.layer_numbers)}
    tried = len(nested.order) - nested.chosen
    ascending = [
        *np.linspace(0, 0.5, nested.chosen, endpoint=False),
        *np.linspace(0.5, 0.6, tried, endpoint=False),
    ]
    for name, score in zip(nested.order, ascending, strict=True):
        layer, _, group = name.removeprefix("L").partition("KV")
        scores[rows[int(layer)], int(group)] = score
    config = {
        "model_name": found.model.id,
        "sink_size": found.settings.first,
        "recent_size": found.settings.recent,
        "threshold": 0.5,
        "sparsity": nested.chosen / nested.units,
    }
    text = "".join("\t".join(f"{one:.18e}" for one in row) + "\n" for row in scores)
    return [write_text(out / PATTERN, text), write_text(out / PATTERN_CONFIG, to_json(config))]
