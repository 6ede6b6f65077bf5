"""The film of a training run: `watch.json` says what is filmed and how, `watch.jsonl` is the film.

One line of `watch.jsonl` is one reading: every head's measures after so many steps, which heads
count as sick then, and the alarms raised at that step. Lines are appended and flushed to disk, so a
killed run leaves at most one half line, which `resumed_film` cuts off. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.artefacts import (
    content_hash,
    load_artefact,
    read_lines,
    save_artefact,
    to_json,
    write_bytes,
)
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import Diagnosis, diagnosis_from
from headwise.errors import ArtefactError
from headwise.heads import Head, heads_where
from headwise.integrity.checksums import checked_rows, sealed_row
from headwise.models.values import ModelInfo
from headwise.provenance import Origin, Provenance, require_same_origin
from headwise.values import Finite, HeadArray, from_plain, plain_fields, to_plain
from headwise.watch.trend import HeadAlarm, TrendRule, rule_alarms

if TYPE_CHECKING:
    import pandas as pd

WATCH, FILM = "watch.json", "watch.jsonl"


@dataclass(frozen=True)
class FilmReading:
    """Every head after so many optimizer steps, on the probe texts."""

    step: int
    maps: Mapping[str, HeadArray] = field(repr=False)
    sick: tuple[str, ...] = ()
    alarms: tuple[HeadAlarm, ...] = ()

    @property
    def scalars(self) -> dict[str, float]:
        """What a tracker plots: sick heads, sink rate, median entropy, the largest logit."""
        return {
            "sick_heads": float(len(self.sick)),
            "sink_rate": float(self.maps["sink_rate"].mean()),
            "median_entropy": float(np.median(self.maps["entropy"])),
            "max_logit": float(self.maps["max_logit"].max()),
        }

    def to_json(self) -> dict[str, Any]:
        """One line of `watch.jsonl`."""
        return {**plain_fields(self), **self.scalars}


@dataclass(frozen=True)
class WatchSettings:
    """What is filmed, on which texts, and when a head is an alarm."""

    model: ModelInfo  # as it was when the film began
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    thresholds: Thresholds = field(default_factory=Thresholds)
    rules: tuple[TrendRule, ...] = ()
    every: int | None = None  # steps between readings; None: as the budget allows
    budget: Finite | None = None  # share of training time
    readings: int = 0  # lines that the film has at least: a shorter one has lost its end

    def save(self, folder: Path) -> Path:
        """Write `watch.json`."""
        return save_artefact(folder / WATCH, "watch", to_plain(self))

    @staticmethod
    def load(folder: Path) -> WatchSettings:
        """Read `watch.json`."""
        path = Path(folder) / WATCH
        return from_plain(WatchSettings, load_artefact(path, "watch"), path)

    @property
    def identity(self) -> str:
        """A hash of what decides the film's numbers; the weights do not, they are trained."""
        measured = self.provenance
        parts = [self.model.shape, measured.texts, measured.settings, self.thresholds]
        return content_hash([to_json(to_plain(parts))])

    def reading(self, step: int, maps: Mapping[str, np.ndarray]) -> FilmReading:
        """A reading with its sick heads named."""
        diagnosis = self.diagnosed(maps)
        heads = heads_where(diagnosis.sick, self.model.layers)
        return FilmReading(step, maps, tuple(str(head) for head in heads))

    def diagnosed(self, maps: Mapping[str, np.ndarray]) -> Diagnosis:
        """The maps of one reading with the classes of heads, by the rule of a diagnosis."""
        return diagnosis_from(
            model=self.model, maps=maps, thresholds=self.thresholds, provenance=self.provenance
        )


@dataclass(frozen=True)
class Film:
    """A run's readings in order of steps."""

    settings: WatchSettings
    readings: tuple[FilmReading, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        last = f", sick heads {int(self.diagnosis().sick.sum())}" if self.readings else ""
        alarms = f", {len(self.alarms)} alarms" if self.alarms else ""
        return (
            f"Film({self.settings.model.short_name}, {len(self.readings)} readings{last}{alarms})"
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the readings."""
        return tuple(reading.step for reading in self.readings)

    @property
    def alarms(self) -> tuple[HeadAlarm, ...]:
        """All alarms, in order."""
        return tuple(alarm for reading in self.readings for alarm in reading.alarms)

    @cached_property
    def first_sick(self) -> dict[str, int]:
        """The step at which each head that was ever sick first counted as sick."""
        steps: dict[str, int] = {}
        for reading in self.readings:
            for head in reading.sick:
                steps.setdefault(head, reading.step)
        return steps

    def trajectory(self, head: Head | str, measure: str = "first_token_mass") -> np.ndarray:
        """One measure of one head, reading by reading."""
        at = Head.parse(head) if isinstance(head, str) else head
        row = self.settings.model.layer_numbers.index(at.layer)
        return np.array([reading.maps[measure][row, at.index] for reading in self.readings])

    def diagnosis(self, place: int = -1) -> Diagnosis:
        """One reading as a diagnosis; the last one by default."""
        return self.settings.diagnosed(self.readings[place].maps)

    def with_reading(self, reading: FilmReading) -> Film:
        """The film with one more reading."""
        if self.readings and reading.step <= self.readings[-1].step:
            raise ArtefactError(
                f"a film goes forward: step {reading.step} after {self.readings[-1].step}",
                fix="pass increasing steps, or resume the film where training resumes",
            )
        return replace(self, readings=(*self.readings, reading))

    def judged(self, reading: FilmReading) -> FilmReading:
        """The next reading with the alarms it raises; each head and kind is called once."""
        later, model = self.with_reading(reading), self.settings.model
        known = {(alarm.kind, alarm.head) for alarm in self.alarms}
        names = [[str(Head(n, i)) for i in range(model.num_heads)] for n in model.layer_numbers]
        alarms: list[HeadAlarm] = []
        for rule in self.settings.rules:
            last = later.readings[-rule.readings :]
            values = np.array([one.maps[rule.measure] for one in last])
            alarms += rule_alarms(rule, [one.step for one in last], values, names)
        fresh = [alarm for alarm in alarms if (alarm.kind, alarm.head) not in known]
        return replace(reading, alarms=tuple(fresh))

    def to_frame(self) -> pd.DataFrame:
        """One row per step and head: layer, head, sick and every measure (needs pandas)."""
        from headwise.frames import frame

        return frame([row for reading in self.readings for row in self._rows(reading)])

    def _rows(self, reading: FilmReading) -> list[dict[str, object]]:
        model = self.settings.model
        return [
            {
                "step": reading.step,
                "layer": model.layer_numbers[row],
                "head": index,
                "sick": str(Head(model.layer_numbers[row], index)) in reading.sick,
                **{name: float(values[row, index]) for name, values in reading.maps.items()},
            }
            for row, index in np.ndindex(*model.shape)
        ]

    def _repr_html_(self) -> str:
        from headwise.diagnosis.view import grid_html

        if not self.readings:
            return "<p>no reading</p>"
        line = f"step {self.steps[-1]}, {len(self.alarms)} alarms"
        return f"<p>{line}</p>" + grid_html(self.diagnosis())

    @staticmethod
    def load(folder: Path | str) -> Film:
        """Read a finished film; a half line at its end is an error."""
        folder = Path(folder)
        if folder.name == FILM:
            folder = folder.parent
        settings = WatchSettings.load(folder)
        rows = checked_rows(read_lines(folder / FILM), settings.identity, folder / FILM)
        if len(rows) < settings.readings:
            raise ArtefactError(
                f"{settings.readings - len(rows)} readings are missing at its end",
                where=folder / FILM,
                fix="restore the file, or film again into another folder",
            )
        film = Film(settings)
        for reading in (from_plain(FilmReading, row, folder / FILM) for row in rows):
            _require_shape(reading, settings.model.shape, folder / FILM)
            film = film.with_reading(reading)
        return film


def _require_shape(reading: FilmReading, shape: tuple[int, int], path: Path) -> None:
    wrong = [name for name, values in reading.maps.items() if values.shape != shape]
    if wrong:
        raise ArtefactError(
            f"{wrong[0]} at step {reading.step} is not of {shape} heads", where=path
        )


def add_reading(folder: Path, film: Film, step: int, maps: Mapping[str, np.ndarray]) -> Film:
    """The film with one more reading and the alarms it raises, written as one line and flushed."""
    film = film.with_reading(film.judged(film.settings.reading(step, maps)))
    row = json.loads(json.dumps(to_plain(film.readings[-1]), sort_keys=True, allow_nan=False))
    line = sealed_row(row, film.settings.identity, len(film.readings) - 1)
    try:
        with (folder / FILM).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ArtefactError(f"cannot write the film ({error})", where=folder / FILM) from None
    replace(film.settings, readings=len(film.readings)).save(folder)
    return film


def open_film(folder: Path, settings: WatchSettings, until: int) -> Film:
    """A new film, or the one that is there, to go on with after step `until`."""
    if (folder / FILM).exists():
        return resumed_film(folder, settings, until)
    settings.save(folder)
    return Film(settings)


def resumed_film(folder: Path, settings: WatchSettings, until: int) -> Film:
    """A film to go on with: half a line and readings after step `until` are cut off.

    What decides the numbers must be what it was; the weights need not, they are trained.
    """
    path = folder / FILM
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    lines = kept.splitlines(True)
    rows = [row for row in lines if _step_of(row, path) <= until]
    earlier = WatchSettings.load(folder)
    if len(rows) < min(len(lines), earlier.readings):  # before the cut: a kill leaves none short
        replace(earlier, readings=len(rows)).save(folder)
    if b"".join(rows) != whole:
        write_bytes(path, b"".join(rows))
    film = Film.load(folder)
    if film.settings.readings < len(film.readings):  # killed between a row and its count
        film = replace(film, settings=replace(film.settings, readings=len(film.readings)))
        film.settings.save(folder)
    require_same_film(folder, film.settings, settings)
    return film


def require_same_film(folder: Path, begun: WatchSettings, settings: WatchSettings) -> None:
    """Refuse a reading of another model, precision or texts than the film's."""
    require_same_origin(
        Origin(str(folder / WATCH), kind=_kind(begun.model)),
        Origin(settings.model.id, kind=_kind(settings.model)),
        fix="go on with the model and the precision it began with, or choose another folder",
    )
    if begun.identity != settings.identity:
        raise ArtefactError(
            "this film was made of another model, or on other texts or lengths",
            where=folder / WATCH,
            fix="go on with the settings it began with, or choose another folder",
        )


def _kind(model: ModelInfo) -> str:
    """What training does not change: family, shape and precision."""
    shape = f"{model.num_layers} layers x {model.num_heads} heads"
    keys = f"{model.num_kv_heads} key/value heads of {model.head_dim}"
    return f"{model.model_type} of {shape}, {keys}, {model.dtype}"


def _step_of(row: bytes, path: Path) -> int:
    try:
        return int(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ArtefactError(
            f"a line of the film cannot be read ({error})", where=path, fix="choose another folder"
        ) from None
