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


@dataclass(frozen=True)
class Validation:
    """The validation loss after so many steps, in nats per token."""

    step: int
    loss: float

    def to_json(self) -> dict[str, int | float]:
        """A row of the trace."""
        return {"validated_at": self.step, "validation_loss": self.loss}


@dataclass(frozen=True)
class StepMap:
    """First-token mass of every head after so many steps."""

    step: int
    first_token_mass: MassMap = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """A row of the maps."""
        return {"step": self.step, "first_token_mass": self.first_token_mass}


TraceRow = TrainStep | Validation


@dataclass
class RunState:
    """Where a run is: the only mutable state besides masters and optimizer."""

    step: int = 0
    best_loss: float = math.inf
    best_step: int = -1
    stale: int = 0  # validations since the best one
    stopped: str = ""  # why training ended early, if it did
    rows: list[TraceRow] = field(default_factory=list)
    maps: list[StepMap] = field(default_factory=list)

    @property
    def validations(self) -> list[Validation]:
        """The validations so far."""
        return [row for row in self.rows if isinstance(row, Validation)]

    @staticmethod
    def of_finished(run: Path, steps: int) -> RunState:
        """As a finished run left it, from its rows; `steps` were asked for."""
        state = RunState(rows=read_trace(run), maps=read_maps(run))
        state.step = sum(isinstance(row, TrainStep) for row in state.rows)
        for row in state.validations:
            state.note(row)
        if state.validations and state.step < steps:
            state.stop()
        return state

    def note(self, row: Validation) -> bool:
        """Count a validation; True if it is the best so far."""
        better = row.loss < self.best_loss
        if better:
            self.best_loss, self.best_step = row.loss, row.step
        self.stale = 0 if better else self.stale + 1
        return better

    def stop(self) -> None:
        """Training ends early: validation no longer improves."""
        self.stopped = f"no better validation loss in {self.stale} validations"

    def write_rows(self, out: Path, run: str = "") -> None:
        """Write the trace and the maps so far, each row with the identity of its run."""
        write_text(out / TRACE, _lines(self.rows, run))
        write_text(out / MAPS, _lines(self.maps, run))

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint: rows and maps by their number, they lie beside it."""
        numbers = {name: getattr(self, name) for name in _IN_CHECKPOINT}
        return {**numbers, "rows": len(self.rows), "maps": len(self.maps)}

    @staticmethod
    def from_json(body: dict[str, Any], out: Path) -> RunState:
        """As a checkpoint in `out` knows it; rows that came after it are left out."""
        numbers = {name: body[name] for name in _IN_CHECKPOINT}
        rows, maps = read_trace(out)[: body["rows"]], read_maps(out)[: body["maps"]]
        for name, kept, told in ((TRACE, rows, body["rows"]), (MAPS, maps, body["maps"])):
            if len(kept) < told:
                raise ArtefactError(
                    f"it has {len(kept)} rows, the checkpoint was written after {told}",
                    where=out / name,
                    fix="put the whole file back, or start anew in another --out",
                )
        return RunState(**numbers, rows=rows, maps=maps)


_IN_CHECKPOINT = ("step", "best_loss", "best_step", "stale", "stopped")


_SPEED = frozenset({"tokens_per_second"})  # a clock's word, which equal runs do not share


def _lines(rows: Sequence[TraceRow] | Sequence[StepMap], run: str) -> str:
    return "".join(sealed_row(row.to_json(), run, place, _SPEED) for place, row in enumerate(rows))


def _rows(run: Path, name: str) -> list[Any]:
    """The rows of a file of a run; those of another run, and damaged ones, are refused."""
    rows = read_lines(run / name)
    body = load_artefact(run / RUN, "run") if (run / RUN).exists() else {}
    least = body.get({TRACE: "trace_rows", MAPS: "map_rows"}[name], 0)
    if isinstance(least, int) and len(rows) < least:
        raise ArtefactError(
            f"it has {len(rows)} rows, the finished run left {least}",
            where=run / name,
            fix="put the undamaged file back, or run again in another --out",
        )
    return checked_rows(rows, str(body.get("identity") or ""), run / name, _SPEED)


def read_trace(run: Path) -> list[TraceRow]:
    """The steps and validations of a run, in order; [] if there is no trace."""
    return [_trace_row(row, run / TRACE) for row in _rows(run, TRACE)]


def _trace_row(row: Any, path: Path) -> TraceRow:
    if isinstance(row, dict) and "validated_at" in row:
        told = {"step": row["validated_at"], "loss": row.get("validation_loss")}
        return from_plain(Validation, told, path)
    return from_plain(TrainStep, row, path)


def read_maps(run: Path) -> list[StepMap]:
    """The head maps of a run, in order; [] if there are none."""
    return [from_plain(StepMap, row, run / MAPS) for row in _rows(run, MAPS)]
