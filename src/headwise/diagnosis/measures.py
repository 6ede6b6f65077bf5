"""Per-head measures of attention, exact and without the T x T matrix.

A reader on the tap turns each layer into sums over real queries, text by text: a map's value is the
mean over texts of the text's own mean, so long texts do not outvote short ones. All sums are taken
in float64 from float32 numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from headwise.diagnosis.role_measures import RoleReader
from headwise.diagnosis.roles import LOCAL_WINDOW, PROBE
from headwise.errors import ModelError
from headwise.forward.attention import (
    Moments,
    mass_at,
    max_logits,
    sink_share,
)
from headwise.forward.hooked_pass import HookedPass, Visit
from headwise.forward.losses import shifted_targets
from headwise.forward.measurements import Measurement, run_measurement
from headwise.forward.tap import LayerAttention
from headwise.heads import Head
from headwise.models.architectures import (
    dense_weight,
    geometry_of,
    projection_of,
)
from headwise.progress import Progress, silent
from headwise.texts.batches import Batch

FIXED = 8  # positions at which a sink is looked for

MEASURES = (
    "first_token_mass",
    "entropy",
    "normalized_entropy",
    "local_mass",
    "previous_token_mass",
    "mean_distance",
    "first_4_token_mass",
    "strongest_mass",
    "strongest_position",
    "learned_sink_share",
    "max_logit",
    "max_logit_upper",
    "output_norm",
    "output_norm_ratio",
    "projected_norm",
    "constant_share",
    "first_token_contribution",
    "value_norm_ratio",
)


@dataclass(frozen=True)
class Measured:
    """Every measure for every text and head, and the first-token mass by query position."""

    # a role that has several columns keeps them: `fixed_position` is the strongest over all texts
    values: dict[str, np.ndarray]  # (text, layer, head)
    profile_sum: Float[np.ndarray, "bucket layer head"]
    profile_count: Int[np.ndarray, "bucket"]
    pooled_sum: Float[np.ndarray, "layer head bucket bucket"]  # query x key buckets
    sample_loss: float = 0.0  # of the beginnings of some texts, in nats
    # how awake heads are: sums by token and kind (`TokenRows`), and token by token on one text
    awake_sum: Float[np.ndarray, "layer head row"] | None = None
    awake_text: Float[np.ndarray, "layer head token"] | None = None

    @property
    def num_buckets(self) -> int:
        """Of query positions, up to that of the longest text."""
        return len(self.profile_count)

    def add(self, texts: list[int], row: int, seen: _LayerMeasures) -> None:
        """Put what one layer showed on one batch in its place."""
        values, profile, pooled, awake = seen
        for name, value in values.items():
            self.values[name][texts, row] = value
        self.profile_sum[:, row] += profile
        if pooled is not None:
            self.pooled_sum[row] += pooled
        if self.awake_sum is not None and self.awake_text is not None and awake is not None:
            self.awake_sum[row] += awake[0]
            if awake[1] is not None:
                self.awake_text[row] = awake[1]

    def means(self) -> dict[str, Float[np.ndarray, "layer head"]]:
        """Mean over the texts that have a value."""
        means = {name: _over_texts(value)[0] for name, value in self.values.items()}
        maps = {name: value if value.ndim == 2 else value.max(-1) for name, value in means.items()}
        strongest = {n: v.argmax(-1) + 1.0 for n, v in means.items() if v.ndim == 3}
        return {**maps, **{f"{name}_at": at for name, at in strongest.items()}}

    def spreads(self) -> dict[str, Float[np.ndarray, "layer head"]]:
        """Standard deviation over texts (0 for a single text); the probe has no texts."""
        spreads = {}
        for name, value in self.values.items():
            if name == PROBE:
                continue
            mean, spread = _over_texts(value)
            if mean.ndim == 3:
                spread = np.take_along_axis(spread, mean.argmax(-1)[..., None], -1)[..., 0]
            spreads[name] = spread
        return spreads


def _over_texts(value: Float[np.ndarray, "text *rest"]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation over the texts that have a value; 0 where none has."""
    known = np.isfinite(value)
    count = known.sum(0)
    mean = np.where(known, value, 0).sum(0) / np.maximum(count, 1)
    square = np.where(known, value - mean, 0) ** 2
    return mean, np.sqrt(square.sum(0) / np.maximum(count - 1, 1))


def position_bucket(position: int) -> int:
    """Bucket 0 is query 0; bucket b covers queries 2^(b-1) .. 2^b - 1."""
    return position.bit_length()


def measure_heads(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    progress: Progress = silent,
    **options: Any,
) -> Measured:
    """Run the model over batches and measure every head; options are `heads_measurement`'s."""
    return run_measurement(model, heads_measurement(model, batches, **options), progress=progress)


def heads_measurement(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    skip_queries: int = 0,
    visit: Visit | None = None,
    sample: Mapping[int, int] | None = None,
    roles: RoleReader | None = None,
) -> Measurement[Measured]:
    """Every measure of every head on every text, in passes that other measurements may share.

    The loss of a `sample`, texts and how many of their tokens, is taken in the same passes, and
    `visit` sees each layer once.
    """
    geometry, work = geometry_of(model), list(batches)
    probe = None if roles is None else roles.probe
    read = work if probe is None else [*work, probe]
    measured = _nothing(model, work, roles)
    weights = [query_weights(batch, 0 if batch is probe else skip_queries) for batch in read]
    grams: dict[int, Tensor] = {}
    loss = 0.0

    def take(number: int, layer: int | None, one: _LayerMeasures | Tensor | None) -> None:
        nonlocal loss
        if isinstance(one, Tensor):
            loss += float(one.double().sum())
        elif layer is not None and one is not None:
            measured.add(list(read[number].index), geometry.layers.index(layer), one)

    def observe(number: int, attention: LayerAttention) -> _LayerMeasures:
        scores, layer = attention.scores, attention.layer
        real = weights[number].to(scores.q.device)
        if number >= len(work):
            assert roles is not None
            nothing = attention.lse[..., None][..., :0]
            return _arrays(roles.excess(number, attention, nothing, (), real)), 0.0, None, None
        if layer not in grams:  # when it first runs its weights are at hand, also if streamed
            grams[layer] = _output_gram(model, layer)
        buckets = _buckets(work[number])
        columns = [torch.eye(scores.length, FIXED), one_hot(buckets, measured.num_buckets).float()]
        sets = torch.cat(columns, -1)[None]
        if roles is not None:
            own = roles.columns[number]
            sets = torch.cat([sets.expand(len(own), -1, -1), own], -1)
        # asked first: the layer's output comes out of the same pass
        moment, awake = attention.moments(sets, LOCAL_WINDOW), None
        counts = [FIXED, measured.num_buckets, sets.shape[-1] - FIXED - measured.num_buckets]
        first, by_bucket, shares = moment.shares.clamp(max=1).split(counts, -1)
        mass, back = first[..., 0], moment.back.unbind(-1)
        measures = {
            **_core_measures(attention, mass, moment, real),
            **_attention_measures(attention, moment, first, real),
        }
        measures |= _output_measures(attention, mass, real, grams[layer], measures["output_norm"])
        if roles is not None:
            measures |= roles.excess(number, attention, shares, back, real)
            awake = roles.rows.sums(number, 1 - mass - sink_share(scores, attention.lse), real)
        profile = _by_bucket(mass, real, buckets, measured.num_buckets)
        return _arrays(measures), profile, _pooled(by_bucket, real, buckets), awake

    yield HookedPass(
        [batch.ids for batch in read],
        take,
        observe=observe,
        targets=[_sample_targets(batch, sample or {}) for batch in work],
        visit=visit,
        title="measuring heads",
    )
    for batch, real in zip(work, weights, strict=False):
        np.add.at(measured.profile_count, _buckets(batch).numpy(), (real > 0).sum(0).numpy())
    _require_finite(measured, geometry.layers)
    return replace(measured, sample_loss=loss)


# one layer on one batch: the measures, the profile of first-token mass, the pooled attention, and
# how awake heads were by token and on the text that is shown
_LayerMeasures = tuple[
    dict[str, np.ndarray],  # (text, head), and (text, head, column) of a role that has several
    Float[np.ndarray, "bucket head"] | float,
    Float[np.ndarray, "head bucket bucket"] | None,
    tuple[Float[np.ndarray, "head row"], Float[np.ndarray, "head token"] | None] | None,
]


def _nothing(model: PreTrainedModel, work: Sequence[Batch], roles: RoleReader | None) -> Measured:
    """Zeros to add to."""
    geometry, texts = geometry_of(model), sum(len(batch.lengths) for batch in work)
    shape = geometry.num_layers, geometry.num_heads
    count = position_bucket(max(batch.ids.shape[1] for batch in work) - 1) + 1
    values = {name: np.zeros((texts, *shape)) for name in MEASURES}
    awake: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if roles is not None:
        for name, own_texts, columns in roles.shapes():
            values[name] = np.full((own_texts or texts, *shape, *columns), np.nan)
        rows = roles.rows
        awake = np.zeros((*shape, rows.count)), np.zeros((*shape, rows.shown_length))
    return Measured(
        values,
        np.zeros((count, *shape)),
        np.zeros(count, dtype=np.int64),
        np.zeros((*shape, count, count)),
        0.0,
        *awake,
    )


def _sample_targets(batch: Batch, sample: Mapping[int, int]) -> Tensor | None:
    """What is to be predicted in the beginnings of those texts of a batch that are in a sample."""
    lengths = torch.tensor([sample.get(text, 0) for text in batch.index])
    return shifted_targets(batch.ids, lengths) if lengths.any() else None


def _arrays(measures: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.cpu().numpy() for name, value in measures.items()}


def _buckets(batch: Batch) -> Int[Tensor, "query"]:
    return torch.tensor([position_bucket(t) for t in range(batch.ids.shape[1])])


def query_weights(batch: Batch, skip: int) -> Float[Tensor, "text query"]:
    """1 / (number of measured queries) at measured queries, 0 elsewhere."""
    position = torch.arange(batch.ids.shape[1])
    chosen = (position[None] < batch.lengths[:, None]) & (position[None] >= skip)
    return chosen / chosen.sum(1, keepdim=True).clamp_min(1)


def _mean(value: Tensor, weights: Tensor) -> Float[Tensor, "text head"]:
    """Mean over measured queries; padding may hold anything, so it is replaced, not multiplied."""
    weights = weights[:, None].double()
    return (torch.where(weights > 0, value.double(), 0.0) * weights).sum(-1)


def _later(weights: Tensor) -> Tensor:
    """Weights that leave out query 0, where a measure is undefined."""
    weights = weights.clone()
    weights[:, 0] = 0
    return weights / weights.sum(1, keepdim=True).clamp_min(1e-30)


def watched_measures(
    attention: LayerAttention, weights: Float[Tensor, "text query"]
) -> dict[str, Float[Tensor, "text head"]]:
    """The few measures that a model is watched by while it trains."""
    moment = attention.moments()
    mass = mass_at(attention.scores, attention.lse, None)
    return _core_measures(attention, mass, moment, weights)


def _core_measures(
    attention: LayerAttention, mass: Tensor, moment: Moments, weights: Tensor
) -> dict[str, Tensor]:
    largest, upper = max_logits(attention.scores, attention.lse, weights > 0, moment.largest)
    return {
        "first_token_mass": _mean(mass, weights),
        "entropy": _mean(moment.entropy, weights),
        "learned_sink_share": _mean(sink_share(attention.scores, attention.lse), weights),
        "max_logit": largest,
        "max_logit_upper": upper,
        "output_norm": _mean(attention.out.float().square().sum(-1).sqrt(), weights),
    }


def _attention_measures(
    attention: LayerAttention, moment: Moments, first: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    scores = attention.scores
    position = torch.arange(scores.length, device=scores.q.device, dtype=torch.float32)
    uniform = scores.num_visible.log()  # 0 where a query sees one key: its entropy is 0 too
    later = _later(weights)
    strongest = _columns(first, weights).max(-1)
    return {
        "normalized_entropy": _mean(moment.entropy / uniform.clamp_min(1e-6), later),
        "local_mass": _mean(moment.back.sum(-1), weights),
        "previous_token_mass": _mean(moment.back[..., 1], later),
        "mean_distance": _mean(position - moment.mean_key, weights),
        "first_4_token_mass": _mean(first[..., :4].sum(-1).clamp(max=1.0), weights),
        "strongest_mass": strongest.values,
        "strongest_position": strongest.indices.double(),
    }


def _columns(
    first: Float[Tensor, "text head query key"], weights: Tensor
) -> Float[Tensor, "text head key"]:
    """What the queries after each of the first keys give it, on average.

    0 for keys that less than half of the text's queries come after: few queries prove no sink.
    """
    keys = torch.arange(first.shape[-1], device=first.device)
    queries = torch.arange(first.shape[2], device=first.device)
    after = (weights[:, :, None] > 0) & (queries[:, None] > keys)  # (text, query, key)
    counts = after.sum(1)
    means = torch.where(after[:, None], first.double(), 0.0).sum(2) / counts.clamp_min(1)[:, None]
    enough = 2 * counts >= (weights > 0).sum(1, keepdim=True)
    return torch.where(enough[:, None], means, 0.0)


def _output_measures(
    attention: LayerAttention, mass: Tensor, weights: Tensor, gram: Tensor, norm: Tensor
) -> dict[str, Tensor]:
    out = attention.out.float()
    if bool((weights == 0).any()):  # padding may hold anything
        out = torch.where(weights[:, None, :, None] > 0, out, 0.0)
    group = out.shape[1] // attention.v.shape[1]
    norms = attention.v.float().norm(dim=-1).repeat_interleave(group, 1)  # (text, head, key)
    power = out.square().sum(-1)
    center = (weights[:, None, None].to(out) @ out)[:, :, 0]  # (text, head, value)
    first, others = norms[:, :, 0].double(), _mean(norms, _later((weights > 0).float()))
    along = _along_first_value(attention, out)
    projected = ((out @ gram) * out).sum(-1).clamp_min(0).sqrt()
    return {
        "output_norm_ratio": norm / norm.mean(1, keepdim=True).clamp_min(1e-30),
        "projected_norm": _mean(projected, weights),
        "constant_share": center.double().square().sum(-1) / _mean(power, weights).clamp_min(1e-30),
        "first_token_contribution": _mean(mass * along / power.clamp_min(1e-30), weights),
        "value_norm_ratio": torch.where(first > 0, first / others, 0.0),  # 0 for erased values
    }


def _along_first_value(
    attention: LayerAttention, out: Float[Tensor, "text head query value"]
) -> Float[Tensor, "text head query"]:
    """The head's output times the first value, as a gate would let that through."""
    first = attention.v[:, :, 0].float().repeat_interleave(out.shape[1] // attention.v.shape[1], 1)
    if attention.before_gate is None:
        return (out @ first[..., None])[..., 0]
    gate = out / attention.before_gate.float()
    return (out * gate.nan_to_num(0.0, 0.0, 0.0) * first[:, :, None]).sum(-1)


def _output_gram(model: PreTrainedModel, layer: int) -> Float[Tensor, "head value value"]:
    """W_O^T W_O of every head: the norm of what it adds to the residual stream, from o alone."""
    columns = dense_weight(projection_of(model, layer, "o")).T  # (head * value, hidden)
    heads = columns.unflatten(0, (geometry_of(model, layer).num_heads, -1))
    gram: Tensor = heads @ heads.transpose(1, 2)
    return gram


def _by_bucket(
    mass: Tensor, weights: Tensor, buckets: Tensor, num_buckets: int
) -> Float[np.ndarray, "bucket head"]:
    masked = torch.where(weights[:, None] > 0, mass.double(), 0.0).sum(0).cpu()  # (head, query)
    sums = torch.zeros(num_buckets, mass.shape[1], dtype=torch.float64)
    return sums.index_add_(0, buckets, masked.T.contiguous()).numpy()


def _pooled(
    shares: Float[Tensor, "text head query bucket"],
    weights: Tensor,
    buckets: Tensor,
) -> Float[np.ndarray, "head bucket bucket"]:
    """Sums over measured queries of one query bucket: [head][query bucket][key bucket]."""
    masked = torch.where(weights[:, None, :, None] > 0, shares.double(), 0.0).sum(0).cpu()
    _, heads, _, count = shares.shape
    sums = torch.zeros(heads, count, count, dtype=torch.float64)
    return sums.index_add_(1, buckets, masked).numpy()


def _require_finite(measured: Measured, layers: tuple[int, ...]) -> None:
    for name, value in measured.values.items():
        # no query of a text may have a choice in a layer: then none of its heads has a value
        undefined = np.isnan(value).all(2, keepdims=True) & (name not in MEASURES)
        bad = np.argwhere(~np.isfinite(value) & ~undefined)
        if len(bad):
            text, row, head, *_ = (int(i) for i in bad[0])
            raise ModelError(
                f"{name} of {Head(layers[row], head)} on text {text} is not a finite number",
                fix="the model overflows on this text (try --dtype float32), or the text is\n"
                "nothing but padding (leave it out)",
            )


def positional_baseline(
    slopes: Float[np.ndarray, "head"], lengths: Iterable[int], skip_queries: int = 0
) -> dict[str, Float[np.ndarray, "head"]]:
    """First-token mass and entropy of heads whose q.k is 0, mean over texts; slope 0 is uniform."""
    lengths = list(lengths)
    longest = max(lengths)
    distance = np.arange(longest, dtype=np.float64)
    mass = np.zeros((len(slopes), longest))
    entropy = np.zeros_like(mass)
    for head, slope in enumerate(np.asarray(slopes, dtype=np.float64)):
        weight = np.exp(-slope * distance)  # key at this distance from the query
        total = np.cumsum(weight)
        mass[head] = weight / total
        entropy[head] = np.log(total) + slope * np.cumsum(weight * distance) / total
    result = {}
    for name, rows in (("first_token_mass", mass), ("entropy", entropy)):
        means = [rows[:, min(skip_queries, n - 1) : n].mean(1) for n in lengths]
        result[f"{name}_positional_baseline"] = np.mean(means, axis=0)
    return result
