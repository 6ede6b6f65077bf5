"""Survey: the same read-out over a family of models (the paper's Table 1 and Fig. 2).

The layer share of a band is computed as what it says: for each head index of the band, the share of
layers in which that head is sick. (The paper's column holds index / number of heads instead.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headwise.artefacts import read_json, save_artefact, versions
from headwise.diagnosis.bimodality import BETWEEN
from headwise.diagnosis.bloom_maps import maps_as_diagnoses
from headwise.diagnosis.settings import DiagnoseSettings, Thresholds
from headwise.diagnosis.values import Diagnosis
from headwise.errors import ArtefactError, HeadwiseError
from headwise.frames import frame
from headwise.keywords import keywords_of
from headwise.progress import Progress, silent, stage
from headwise.tables import tables_html
from headwise.values import plain_fields, to_plain

if TYPE_CHECKING:
    import pandas as pd

    from headwise.models.loaded_model import LoadedModel
    from headwise.texts.text_sets import TextSet


@dataclass(frozen=True)
class SurveyRow:
    """One model: how many heads are sick, and where."""

    model: str
    num_parameters: int | None
    num_layers: int
    num_heads: int
    positions: str
    total_heads: int
    sick: int
    dead: int
    sick_share: float
    band: tuple[int, ...]
    band_layer_share_min: float | None
    band_layer_share_max: float | None
    sick_layers: tuple[int, int] | None
    sick_count_by_index: tuple[int, ...]
    spearman_slope_sick_share: float | None
    share_between: float  # of the heads, with a mass from 0.4 to 0.6
    read: str | None = None  # on what and how; a published map does not tell

    def to_json(self) -> dict[str, Any]:
        """The row in `survey.json`."""
        body = plain_fields(self)
        body[BETWEEN] = body.pop("share_between")
        return body


@dataclass(frozen=True)
class Survey:
    """One row a model, in the order given."""

    rows: tuple[SurveyRow, ...]
    diagnoses: tuple[Diagnosis, ...] = field(repr=False)

    def __repr__(self) -> str:
        sick = ", ".join(f"{row.model} {row.sick}/{row.total_heads}" for row in self.rows)
        return f"Survey(sick heads: {sick})"

    def save(self, path: Path) -> Path:
        """Write `survey.json`."""
        body = {
            "rows": [row.to_json() for row in self.rows],
            "maps": [d.maps["first_token_mass"].tolist() for d in self.diagnoses],
            "provenance": {"versions": versions()},
        }
        return save_artefact(path, "survey", body)

    def to_frame(self) -> pd.DataFrame:
        """One row per model (needs pandas)."""
        return frame([row.to_json() for row in self.rows])

    def _repr_html_(self) -> str:
        from headwise.diagnosis.view import survey_table

        return tables_html([survey_table(self)])


def survey(
    sources: Iterable[Diagnosis | LoadedModel | Path | str],
    *,
    texts: TextSet | None = None,
    max_length: int = 512,
    batch_size: int = 4,
    skip_queries: int = 0,
    thresholds: Thresholds | None = None,
    progress: Progress = silent,
) -> Survey:
    """Compare several models: diagnoses in hand, files of them (.json), or models to diagnose.

    Without `texts` a model is diagnosed on its default ones; the other options are for models too.
    A name is loaded as `load_model` does by default. A generator of loaded models holds one of them
    in memory at a time: `survey(load_model(name, dtype="bfloat16") for name in names)`.
    """
    settings = DiagnoseSettings(max_length, batch_size, skip_queries, thresholds or Thresholds())
    diagnoses: list[Diagnosis] = []
    for source in sources:
        if isinstance(source, Diagnosis):
            diagnoses.append(source)
        elif isinstance(source, (str, Path)) and str(source).endswith(".json"):
            diagnoses += read_diagnoses(Path(source))
        else:
            diagnoses.append(_diagnose(source, texts, settings, progress))
        del source  # a model goes before the next one is loaded
    if not diagnoses:
        raise HeadwiseError("nothing to survey", fix="name at least one model or diagnosis.json")
    _require_alike(diagnoses)
    return Survey(tuple(_row(diagnosis) for diagnosis in diagnoses), tuple(diagnoses))


def _require_alike(diagnoses: Sequence[Diagnosis]) -> None:
    """Masses and classes are compared at equal lengths, queries and thresholds alone."""
    seen: dict[str, str] = {}
    for diagnosis in diagnoses:
        how = diagnosis.provenance.settings
        if how is not None:
            cuts = ", ".join(f"{key} {cut}" for key, cut in to_plain(diagnosis.thresholds).items())
            settings = f"max_length {how.max_length}, skip_queries {how.skip_queries}, {cuts}"
            seen.setdefault(settings, diagnosis.model.id)
    if len(seen) > 1:
        each = "; ".join(f"{model}: {settings}" for settings, model in seen.items())
        raise HeadwiseError(
            f"these were read with different settings: {each}",
            fix="diagnose all of them with the same options, --max-length first",
        )


def _read(diagnosis: Diagnosis) -> str | None:
    """Texts, length and first token of a diagnosis in a few words."""
    how, texts = diagnosis.provenance.settings, diagnosis.provenance.texts
    if how is None:
        return None
    name = "" if texts is None else f"{texts.name}, "
    return f"{name}{how.max_length} tokens, {'' if how.bos else 'no '}BOS"


def _diagnose(
    source: LoadedModel | Path | str,
    texts: TextSet | None,
    settings: DiagnoseSettings,
    progress: Progress,
) -> Diagnosis:
    from headwise.diagnosis.diagnose import diagnose  # late: a survey of files needs no torch
    from headwise.models.loading import load_model

    if isinstance(source, (str, Path)):
        source = load_model(str(source))
    stage(f"{source.id}: {source.first_token}", progress)
    return diagnose(source, texts, **keywords_of(settings), progress=progress)


def _row(diagnosis: Diagnosis) -> SurveyRow:
    counts, model = diagnosis.counts, diagnosis.model
    shares = [diagnosis.sick_share_by_index[index] for index in diagnosis.band]
    sick_layers = np.flatnonzero(diagnosis.sick.any(1))
    return SurveyRow(
        model=model.id,
        num_parameters=model.num_parameters,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        positions=model.positions,
        total_heads=counts["total"],
        sick=counts["sick"],
        dead=counts["dead"],
        sick_share=counts["sick"] / counts["total"],
        band=diagnosis.band,
        band_layer_share_min=min(shares) if shares else None,
        band_layer_share_max=max(shares) if shares else None,
        sick_layers=(int(sick_layers[0]), int(sick_layers[-1])) if len(sick_layers) else None,
        sick_count_by_index=tuple(int(n) for n in diagnosis.sick.sum(0)),
        spearman_slope_sick_share=slope_correlation(diagnosis),
        share_between=diagnosis.threshold_sweep.share_between,
        read=_read(diagnosis),
    )


def slope_correlation(diagnosis: Diagnosis) -> float | None:
    """Spearman correlation over head indices of ALiBi slope with the share of sick layers."""
    share = diagnosis.sick.mean(0)
    if "slope" not in diagnosis.maps or len(share) < 3 or share.std() == 0:
        return None
    return rank_correlation(diagnosis.maps["slope"][0], share)


def rank_correlation(x: Float[np.ndarray, " one"], y: Float[np.ndarray, " one"]) -> float:
    """Spearman's, the correlation of mean ranks (as scipy's, whose import takes a second)."""
    return float(np.corrcoef(_mean_ranks(x), _mean_ranks(y))[0, 1])


def _mean_ranks(values: Float[np.ndarray, " one"]) -> Float[np.ndarray, " one"]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def read_diagnoses(path: Path) -> list[Diagnosis]:
    """Diagnoses in a file: one `diagnosis.json`, or several as {model: [layer][head]} maps."""
    body = read_json(path)
    if "schema" not in body:
        return maps_as_diagnoses(body, path)
    if body["schema"] != "headwise.diagnosis/1":
        raise ArtefactError(
            f"schema is {body['schema']!r}, expected headwise.diagnosis/1", where=path
        )
    return [Diagnosis.from_json(body, path)]
