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
class Film:
    """What is filmed, on which texts, when a head is an alarm, and the readings by step."""

    model: ModelInfo  # as it was when the film began
    provenance: Provenance = field(default_factory=Provenance, repr=False)
    thresholds: Thresholds = field(default_factory=Thresholds)
    rules: tuple[TrendRule, ...] = ()
    every: int | None = None  # steps between readings; None: as the budget allows
    budget: Finite | None = None  # share of training time
    readings: tuple[FilmReading, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        last = f", sick heads {int(self.diagnosis().sick.sum())}" if self.readings else ""
        alarms = f", {len(self.alarms)} alarms" if self.alarms else ""
        return f"Film({self.model.short_name}, {len(self.readings)} readings{last}{alarms})"

    @property
    def identity(self) -> str:
        """A hash of what decides the film's numbers; the weights do not, they are trained."""
        measured = self.provenance
        parts = [self.model.shape, measured.texts, measured.settings, self.thresholds]
        return content_hash([to_json(to_plain(parts))])

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
        row = self.model.layer_numbers.index(at.layer)
        return np.array([reading.maps[measure][row, at.index] for reading in self.readings])

    def diagnosis(self, place: int = -1) -> Diagnosis:
        """One reading as a diagnosis; the last one by default."""
        return self._diagnosed(self.readings[place].maps)

    def _diagnosed(self, maps: Mapping[str, np.ndarray]) -> Diagnosis:
        return diagnosis_from(
            model=self.model, maps=maps, thresholds=self.thresholds, provenance=self.provenance
        )

    def with_reading(self, reading: FilmReading) -> Film:
        """The film with one more reading."""
        if self.readings and reading.step <= self.readings[-1].step:
            raise ArtefactError(
                f"a film goes forward: step {reading.step} after {self.readings[-1].step}",
                fix="pass increasing steps, or resume the film where training resumes",
            )
        return replace(self, readings=(*self.readings, reading))

    def with_maps(self, step: int, maps: Mapping[str, np.ndarray]) -> Film:
        """The film with one more reading, its sick heads and the alarms that it raises.

        Each head and kind of alarm is called once.
        """
        model, sick = self.model, heads_where(self._diagnosed(maps).sick, self.model.layers)
        film = self.with_reading(FilmReading(step, maps, tuple(str(head) for head in sick)))
        known = {(alarm.kind, alarm.head) for alarm in self.alarms}
        names = [[str(Head(n, i)) for i in range(model.num_heads)] for n in model.layer_numbers]
        alarms: list[HeadAlarm] = []
        for rule in self.rules:
            last = film.readings[-rule.readings :]
            values = np.array([one.maps[rule.measure] for one in last])
            alarms += rule_alarms(rule, [one.step for one in last], values, names)
        fresh = tuple(alarm for alarm in alarms if (alarm.kind, alarm.head) not in known)
        return self.with_reading(replace(film.readings[-1], alarms=fresh))

    def to_frame(self) -> pd.DataFrame:
        """One row per step and head: layer, head, sick and every measure (needs pandas)."""
        from headwise.frames import frame

        return frame([row for reading in self.readings for row in self._rows(reading)])

    def _rows(self, reading: FilmReading) -> list[dict[str, object]]:
        model = self.model
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

    def save(self, folder: Path, count: int | None = None) -> Path:
        """Write `watch.json`: all but the readings, and how many the film has at least."""
        settings = plain_fields(replace(self, readings=()))
        settings["readings"] = len(self.readings) if count is None else count
        return save_artefact(folder / WATCH, "watch", settings)

    @staticmethod
    def load(folder: Path | str) -> Film:
        """Read a finished film; a half line at its end is an error."""
        folder = Path(folder)
        if folder.name == FILM:
            folder = folder.parent
        film, count = film_settings(folder)
        rows = checked_rows(read_lines(folder / FILM), film.identity, folder / FILM)
        if len(rows) < count:
            raise ArtefactError(
                f"{count - len(rows)} readings are missing at its end",
                where=folder / FILM,
                fix="restore the file, or film again into another folder",
            )
        for reading in (from_plain(FilmReading, row, folder / FILM) for row in rows):
            _require_shape(reading, film.model.shape, folder / FILM)
            film = film.with_reading(reading)
        return film


def film_settings(folder: Path) -> tuple[Film, int]:
    """A film without its readings, and how many it has at least: fewer have lost its end."""
    path = Path(folder) / WATCH
    body = dict(load_artefact(path, "watch"))
    count = from_plain(int, body.pop("readings", 0), path)
    return from_plain(Film, body, path), count


def _require_shape(reading: FilmReading, shape: tuple[int, int], path: Path) -> None:
    wrong = [name for name, values in reading.maps.items() if values.shape != shape]
    if wrong:
        raise ArtefactError(
            f"{wrong[0]} at step {reading.step} is not of {shape} heads", where=path
        )


def add_reading(folder: Path, film: Film, step: int, maps: Mapping[str, np.ndarray]) -> Film:
    """The film with one more reading and the alarms it raises, written as one line and flushed."""
    film = film.with_maps(step, maps)
    row = json.loads(json.dumps(to_plain(film.readings[-1]), sort_keys=True, allow_nan=False))
    line = sealed_row(row, film.identity, len(film.readings) - 1)
    try:
        with (folder / FILM).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ArtefactError(f"cannot write the film ({error})", where=folder / FILM) from None
    film.save(folder)
    return film


def open_film(folder: Path, film: Film, until: int) -> Film:
    """A new film, or the one that is there, to go on with after step `until`."""
    if (folder / FILM).exists():
        return resumed_film(folder, film, until)
    film.save(folder)
    return film


def resumed_film(folder: Path, like: Film, until: int) -> Film:
    """A film to go on with: half a line and readings after step `until` are cut off.

    What decides the numbers must be what it is in `like`; the weights need not, they are trained.
    """
    path = folder / FILM
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    lines = kept.splitlines(True)
    rows = [row for row in lines if _step_of(row, path) <= until]
    earlier, count = film_settings(folder)
    if len(rows) < min(len(lines), count):  # before the cut: a kill leaves none short
        count = len(rows)
        earlier.save(folder, count)
    if b"".join(rows) != whole:
        write_bytes(path, b"".join(rows))
    film = Film.load(folder)
    if count < len(film.readings):  # killed between a row and its count
        film.save(folder)
    require_same_film(folder, film, like)
    return film


def require_same_film(folder: Path, begun: Film, like: Film) -> None:
    """Refuse a reading of another model, precision or texts than the film's."""
    require_same_origin(
        Origin(str(folder / WATCH), kind=_kind(begun.model)),
        Origin(like.model.id, kind=_kind(like.model)),
        fix="go on with the model and the precision it began with, or choose another folder",
    )
    if begun.identity != like.identity:
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
