"""Roles of one layer on one batch: attention on sets of keys, minus what chance gives them.

Sets that are the same for every query ride as value channels in the pass that pools attention
anyway; sets that follow the query are a dot product a key. What chance gives is the same reading of
uniform attention. It is the same in every layer that sees the same keys, so it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from headwise.diagnosis.roles import LOCAL_WINDOW, PROBE, ROLES, KeySet, TokenBatch
from headwise.diagnosis.token_rows import TokenRows, token_rows
from headwise.forward.attention import Scores, indicator_mass, mass_at, pair_mass
from headwise.forward.tap import LayerAttention
from headwise.models.architectures import alibi_slopes
from headwise.models.loaded_model import LoadedModel
from headwise.texts.batches import Batch, batches
from headwise.texts.token_kinds import DELIMITER, ENDS, KINDS, SPACE, token_codes

PROBE_TEXTS, PROBE_TOKENS = 4, 50  # as in TransformerLens' demo: 4 rows of 50 tokens, twice
BASELINE = "_positional_baseline"
_EPSILON = 1e-6  # a share of uniform attention below this, or that close to 1, leaves no choice

Sets = Mapping[str, KeySet]


@dataclass(frozen=True)
class _Chance:
    """What uniform attention gives to every set, and the weights of queries that have a choice."""

    weights: Mapping[str, Tensor]  # (text, query, column)
    value: Mapping[str, Tensor]  # (text, 1, column)
    baseline: Mapping[str, Tensor]  # (text, head, 1), excess by an ALiBi bias alone


@dataclass(frozen=True)
class RoleReader:
    """The sets of every batch, and how a layer's attention on them is read."""

    sets: Sequence[Sets]
    columns: Sequence[Tensor]  # (text, key, column) of all sets that do not follow the query
    rows: TokenRows
    biased: bool  # the model has ALiBi
    probe: Batch | None = None  # read behind the batches, for induction alone
    kept: dict[tuple[int, int | None], _Chance] = field(default_factory=dict, repr=False)

    def excess(
        self,
        number: int,
        attention: LayerAttention,
        shares: Float[Tensor, "text head query column"],
        back: Sequence[Float[Tensor, "text head query"]],
        weights: Float[Tensor, "text query"],
    ) -> dict[str, Tensor]:
        """Every role of every head on every text; NaN where no query of a text has a choice.

        `shares` is the attention on `columns[number]`, `back` that on the last few tokens.
        """
        sets = self.sets[number]
        chance = self._chance(number, attention.scores, weights)
        masses = _masses(attention.scores, attention.lse, sets, shares, back)
        excess = {
            name: _mean(masses[name], chance.weights[name]) - chance.value[name] for name in sets
        }
        excess |= chance.baseline
        return {n: v if v.shape[-1] > 1 else v[..., 0] for n, v in excess.items()}

    def shapes(self) -> list[tuple[str, int | None, tuple[int, ...]]]:
        """The name, own number of texts (None: as the batches) and columns of every role."""
        shapes: list[tuple[str, int | None, tuple[int, ...]]] = []
        for name, one in self.sets[0].items():
            count = 1 if one.columns is None else one.columns.shape[-1]
            shapes.append((name, None, (count,) if count > 1 else ()))
            if self.biased and one.offsets:
                shapes.append((name + BASELINE, None, ()))
        if self.probe is not None:
            shapes.append((PROBE, len(self.probe.ids), ()))
        return shapes

    def _chance(self, number: int, scores: Scores, weights: Tensor) -> _Chance:
        key = (number, scores.window)
        if key not in self.kept or scores.mask is not None:  # a mask may differ by layer
            self.kept[key] = self._measured_chance(number, scores, weights)
        return self.kept[key]

    def _measured_chance(self, number: int, scores: Scores, weights: Tensor) -> _Chance:
        uniform = self._blank(number, replace(scores, bias=None))
        choice = {
            name: _normal(weights[..., None] * ((share > _EPSILON) & (share < 1 - _EPSILON))[:, 0])
            for name, share in uniform.items()
        }
        value = {name: _mean(uniform[name], choice[name]) for name in choice}
        baseline = {}
        if scores.bias is not None:
            biased, sets = self._blank(number, scores), self.sets[number]
            for name in (name for name, one in sets.items() if one.offsets):
                baseline[name + BASELINE] = _mean(biased[name], choice[name]) - value[name]
        return _Chance(choice, value, baseline)

    def _blank(self, number: int, scores: Scores) -> dict[str, Tensor]:
        """What each set gets from heads with q.k = 0; one head stands for all without a bias."""
        columns = self.columns[number].to(scores.q.device)
        heads = 1 if scores.bias is None else scores.q.shape[1]
        width = columns.shape[-1] + -columns.shape[-1] % 8 or 8
        zeros = torch.zeros(len(scores.q), heads, scores.length, width, device=columns.device)
        blank = replace(scores, q=zeros, k=zeros[:, :1], sinks=None, softcap=None)
        shares, lse = indicator_mass(blank, columns)
        return _masses(blank, lse, self.sets[number], shares, local_masses(blank, lse))


def local_masses(scores: Scores, lse: Float[Tensor, "text head query"]) -> list[Tensor]:
    """Attention on this token, the one before, and so on through the local window."""
    return [mass_at(scores, lse, offset) for offset in range(LOCAL_WINDOW)]


def _masses(
    scores: Scores, lse: Tensor, sets: Sets, shares: Tensor, back: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Attention on every set; `shares` holds the columns of the sets in their order."""
    masses, at = dict[str, Tensor](), 0
    for name, one in sets.items():
        if one.columns is not None:
            count = one.columns.shape[-1]
            masses[name] = shares[..., at : at + count]
            at += count
        elif one.pairs is not None:
            pairs = torch.from_numpy(one.pairs).to(lse.device)
            masses[name] = pair_mass(scores, lse, pairs)[..., None]
        else:
            masses[name] = torch.stack([back[offset] for offset in one.offsets]).sum(0)[..., None]
    return masses


def _mean(mass: Tensor, weights: Tensor) -> Float[Tensor, "text head column"]:
    """Mean over queries, by text; padding may hold anything, so it is replaced."""
    weights = weights[:, None].double()
    return (torch.where(weights > 0, mass.double(), 0.0) * weights).sum(2)


def _normal(weights: Tensor) -> Tensor:
    """Weights of queries that sum to 1 in every text, NaN where none has any."""
    weights = weights.double()
    return weights / weights.sum(1, keepdim=True)


def role_reader(loaded: LoadedModel, work: Sequence[Batch], skip_queries: int = 0) -> RoleReader:
    """The sets of all roles on the batches, and of the probe, which is read behind them."""
    ids = {int(one) for batch in work for one in batch.ids.unique()}
    codes, probe = token_codes(loaded.tokenizer, ids), _probe_batch(loaded)
    biased = alibi_slopes(loaded.model) is not None
    sets = [_role_sets(batch, codes) for batch in work]
    columns = [_joined(one, batch.ids) for one, batch in zip(sets, work, strict=True)]
    if probe is not None:
        sets.append(_probe_sets(probe))
        columns.append(_joined(sets[-1], probe.ids))
    return RoleReader(sets, columns, token_rows(work, codes, skip_queries), biased, probe)


def _role_sets(batch: Batch, codes: Mapping[int, int]) -> Sets:
    ids = batch.ids.numpy()
    code = np.vectorize(codes.__getitem__, otypes=[np.int64])(ids)
    kind, ends = code % ENDS, code >= ENDS
    delimiter = (kind == DELIMITER) | ((kind == SPACE) & ends)
    tokens = TokenBatch(ids, batch.lengths.numpy(), delimiter, _sentence_starts(kind, ends))
    return {role.name: role.keys(tokens) for role in ROLES}


def _sentence_starts(kind: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The first token after the end of a sentence that is no space, delimiter or special token."""
    starts = np.zeros(kind.shape, dtype=bool)
    for text, row in enumerate(kind):
        open_ = False
        for place, one in enumerate(row):
            if ends[text, place]:
                open_ = True
            elif open_ and KINDS[one] in ("number", "word", "piece"):
                starts[text, place], open_ = True, False
    return starts


def _probe_sets(probe: Batch) -> Sets:
    """Each token of the second half looks at what followed it in the first."""
    half = probe.ids.shape[1] // 2  # a BOS aside
    start = probe.ids.shape[1] - half
    pairs = [
        (text, query, query - half + 1)
        for text in range(len(probe.ids))
        for query in range(start, start + half)
    ]
    return {PROBE: KeySet(pairs=np.array(pairs, dtype=np.int64))}


def _joined(sets: Sets, ids: Tensor) -> Float[Tensor, "text key column"]:
    parts = [one.columns for one in sets.values() if one.columns is not None]
    empty = np.zeros((*ids.shape, 0), dtype=bool)
    return torch.from_numpy(np.concatenate([empty, *parts], -1)).float()


def _probe_batch(loaded: LoadedModel) -> Batch | None:
    """Random tokens, twice in a row: what follows a token is known from its first time alone."""
    special = set(loaded.tokenizer.all_special_ids)
    count = min(len(loaded.tokenizer), loaded.num_embeddings)
    usable = np.array([one for one in range(count) if one not in special])
    first = [loaded.tokenizer.bos_token_id] if loaded.bos else []
    half = min(PROBE_TOKENS, (loaded.length(2 * PROBE_TOKENS + 1) - len(first)) // 2)
    if half < 4 or len(usable) < 2:
        return None
    draws = np.random.default_rng(0).choice(usable, (PROBE_TEXTS, half))
    rows = [[*first, *draw.tolist(), *draw.tolist()] for draw in draws]
    return next(batches(rows, PROBE_TEXTS))
