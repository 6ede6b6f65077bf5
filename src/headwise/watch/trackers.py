"""What is logged of a reading: scalars, the head grid as a picture, and histograms.

Three kinds of tracker are known by what they can do: a TensorBoard `SummaryWriter`, and the `log`
of Weights & Biases and of Trackio (their module or their run). Accelerate's trackers are unwrapped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from headwise.errors import HeadwiseError
from headwise.watch.film import FilmReading

PREFIX = "heads"
HISTOGRAMS = ("first_token_mass", "entropy", "output_norm", "max_logit")
_CELL = 16  # pixels of one head
# cividis; loading matplotlib for it would cost more than many readings
_RAMP = ((0, 34, 78), (59, 73, 108), (112, 113, 115), (165, 156, 116), (254, 232, 56))


def head_picture(reading: FilmReading) -> UInt8[np.ndarray, "height width 3"]:
    """First-token mass of every head as an image: layer 0 at the bottom, bright is sick."""
    mass = np.clip(np.flipud(reading.maps["first_token_mass"]), 0, 1) * (len(_RAMP) - 1)
    channels = [np.interp(mass, range(len(_RAMP)), stops) for stops in zip(*_RAMP, strict=True)]
    whole = np.kron(np.stack(channels, -1).round(), np.ones((_CELL, _CELL, 1)))
    return np.asarray(whole.astype(np.uint8))


def log_reading(tracker: Any, reading: FilmReading) -> None:
    """Log one reading in one tracker."""
    if hasattr(tracker, "add_scalar"):
        return _log_to_tensorboard(tracker, reading)
    library = type(tracker).__module__.partition(".")[0]
    if library == "module":  # wandb or trackio itself
        library = tracker.__name__
    if library == "accelerate":
        return log_reading(tracker.tracker, reading)
    if library in ("wandb", "trackio"):
        return _log_to_run(tracker, sys.modules[library], reading)
    raise HeadwiseError(
        f"{type(tracker).__name__} is no tracker that is known",
        fix="pass a TensorBoard SummaryWriter, a wandb run or a trackio run",
    )


def _log_to_tensorboard(writer: Any, reading: FilmReading) -> None:
    for name, value in reading.scalars.items():
        writer.add_scalar(f"{PREFIX}/{name}", value, reading.step)
    picture = head_picture(reading)
    writer.add_image(f"{PREFIX}/grid", picture, reading.step, dataformats="HWC")
    for name in HISTOGRAMS:
        writer.add_histogram(f"{PREFIX}/{name}", reading.maps[name].ravel(), reading.step)
    for alarm in reading.alarms:
        writer.add_text(f"{PREFIX}/alarms", str(alarm.alarm), reading.step)
    writer.flush()


def _log_to_run(run: Any, library: Any, reading: FilmReading) -> None:
    """One log call; the step is a field, as transformers' own callbacks have it."""
    values: dict[str, object] = {f"{PREFIX}/{n}": v for n, v in reading.scalars.items()}
    values[f"{PREFIX}/grid"] = library.Image(head_picture(reading))
    for name in HISTOGRAMS:
        values[f"{PREFIX}/{name}"] = library.Histogram(reading.maps[name].ravel())
    values["train/global_step"] = reading.step
    run.log(values)


def trainer_trackers(report_to: Sequence[str], output_dir: str) -> list[Any]:
    """The trackers of a transformers Trainer whose own callbacks have begun already.

    Its TensorBoard writer is out of a callback's reach, so a second one writes into the folder of
    the first: TensorBoard shows both as one run.
    """
    runs = [name for name in ("wandb", "trackio") if name in report_to and name in sys.modules]
    trackers: list[Any] = [sys.modules[name] for name in runs]
    folder = _event_folder(output_dir) if "tensorboard" in report_to else None
    if folder is not None:
        from torch.utils.tensorboard import SummaryWriter

        trackers.append(SummaryWriter(log_dir=str(folder), filename_suffix=".heads"))
    return trackers


def _event_folder(output_dir: str) -> Path | None:
    """Where this process's newest event file is."""
    root = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", output_dir)).expanduser()
    files: Iterable[Path] = root.rglob(f"events.out.tfevents.*.{os.getpid()}.*")
    newest = max(files, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return None if newest is None else newest.parent
