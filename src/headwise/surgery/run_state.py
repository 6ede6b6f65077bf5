"""Where a run is, and the rows it leaves behind in `trace.jsonl` and `maps.jsonl`.

This is the one place that writes and reads these two files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.artefacts import load_artefact, read_lines, write_text
from headwise.errors import ArtefactError
from headwise.integrity.checksums import checked_rows, sealed_row
from headwise.values import from_plain

BEFORE = -1  # the step of the map of the model before the operation
TRACE, MAPS, RUN = "trace.jsonl", "maps.jsonl", "run.json"
MassMap = list[list[float]]  # [layer][head]


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step; the loss is the mean over its predicted tokens, in nats."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float = 0.0  # 0: an older run did not say

    def to_json(self) -> dict[str, int | float]:
        """A row of the trace."""
        return dict(self.__dict__)


@dataclass
class RunState:
    """Where a run is: the only mutable state besides masters and optimizer."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = -1
    stale: int = 0  # validations since the best one
    stopped: str = ""  # why training ended early, if it did
    rows: list[TrainStep] = field(default_factory=list)
    validations: dict[int, float] = field(default_factory=dict)  # steps done: loss in nats
    maps: dict[int, MassMap] = field(default_factory=dict)  # steps done: first-token mass

    @staticmethod
    def of_finished(run: Path, steps: int) -> RunState:
        """As a finished run left it, from its rows; `steps` were asked for."""
        rows, validations = read_trace(run)
        state = RunState(len(rows), rows=rows, maps=read_maps(run))
        for step, loss in validations.items():
            state.note(step, loss)
        if state.validations and state.step < steps:
            state.stop()
        return state

    def note(self, step: int, loss: float) -> bool:
        """Count a validation after so many steps; True if it is the best so far."""
        self.validations[step] = loss
        better = loss < self.best_loss
        if better:
            self.best_loss, self.best_step = loss, step
        self.stale = 0 if better else self.stale + 1
        return better

    def stop(self) -> None:
        """Training ends early: validation no longer improves."""
        self.stopped = f"no better validation loss in {self.stale} validations"

    def write_rows(self, out: Path, run: str = "") -> None:
        """Write the trace and the maps so far, each row with the identity of its run."""
        maps = [{"step": step, "first_token_mass": mass} for step, mass in self.maps.items()]
        write_text(out / TRACE, _lines(self.trace(), run))
        write_text(out / MAPS, _lines(maps, run))

    def trace(self) -> list[dict[str, int | float]]:
        """The rows of `trace.jsonl`: a validation stands before the step that follows it."""
        checks = [
            (step, 0, {"validated_at": step, "validation_loss": loss})
            for step, loss in self.validations.items()
        ]
        steps = [(row.step, 1, row.to_json()) for row in self.rows]
        return [row for *_, row in sorted([*checks, *steps], key=lambda one: one[:2])]

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint: rows and maps by their number, they lie beside it."""
        numbers = {name: getattr(self, name) for name in _IN_CHECKPOINT}
        rows = len(self.rows) + len(self.validations)
        return {**numbers, "rows": rows, "maps": len(self.maps)}

    @staticmethod
    def from_json(body: dict[str, Any], out: Path) -> RunState:
        """As a checkpoint in `out` knows it; rows that came after it are left out."""
        numbers = {name: body[name] for name in _IN_CHECKPOINT}
        rows, validations = read_trace(out, body["rows"])
        return RunState(
            **numbers, rows=rows, validations=validations, maps=read_maps(out, body["maps"])
        )


_IN_CHECKPOINT = ("step", "best_loss", "best_step", "stale", "stopped")


_SPEED = frozenset({"tokens_per_second"})  # a clock's word, which equal runs do not share


def _lines(rows: Sequence[dict[str, Any]], run: str) -> str:
    return "".join(sealed_row(row, run, place, _SPEED) for place, row in enumerate(rows))


def _rows(run: Path, name: str, first: int | None) -> list[Any]:
    """The `first` rows of a file of a run; those of another run, and damaged ones, are refused."""
    rows = read_lines(run / name)
    if len(rows) < (first or 0):
        raise ArtefactError(
            f"it has {len(rows)} rows, the checkpoint was written after {first}",
            where=run / name,
            fix="put the whole file back, or start anew in another --out",
        )
    body = load_artefact(run / RUN, "run") if (run / RUN).exists() else {}
    least = body.get({TRACE: "trace_rows", MAPS: "map_rows"}[name], 0)
    if isinstance(least, int) and len(rows) < least:
        raise ArtefactError(
            f"it has {len(rows)} rows, the finished run left {least}",
            where=run / name,
            fix="put the undamaged file back, or run again in another --out",
        )
    return checked_rows(rows, str(body.get("identity") or ""), run / name, _SPEED)[:first]


def read_trace(run: Path, first: int | None = None) -> tuple[list[TrainStep], dict[int, float]]:
    """The steps of a run and the loss of each validation; of the `first` rows, if that is said."""
    path, steps, validations = run / TRACE, [], {}
    for row in _rows(run, TRACE, first):
        if isinstance(row, dict) and "validated_at" in row:
            loss = from_plain(float, row.get("validation_loss"), path)
            validations[from_plain(int, row["validated_at"], path)] = loss
        else:
            steps.append(from_plain(TrainStep, row, path))
    return steps, validations


def read_maps(run: Path, first: int | None = None) -> dict[int, MassMap]:
    """The head maps of a run by step; {} if there are none."""
    path, maps = run / MAPS, {}
    for row in _rows(run, MAPS, first):
        body = row if isinstance(row, dict) else {}
        mass = from_plain(MassMap, body.get("first_token_mass"), path)
        maps[from_plain(int, body.get("step"), path)] = mass
    return maps
