"""The film of a run that is over: its checkpoints, read one at a time in order of steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headwise.artefacts import sweep, versions
from headwise.diagnosis.settings import Thresholds
from headwise.errors import ArtefactError, ModelError
from headwise.integrity.locks import one_writer
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.progress import Progress, silent, track
from headwise.provenance import MeasureSettings, Provenance, TextInfo
from headwise.texts.batches import encode_for
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.watch.film import FILM, Film, WatchSettings, append_reading, resumed_film
from headwise.watch.probe import Probe
from headwise.watch.trend import RULES, TrendRule

_NUMBERED = re.compile(r"(?:checkpoint|global_step|step)[-_]?(\d+)")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder with their steps, in order of steps."""
    found = [
        (int(match[1]), path)
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))
    ]
    if not found:
        raise ArtefactError(
            "no checkpoints here",
            where=folder,
            fix="pass the folder that holds checkpoint-100, checkpoint-200, ...",
        )
    return sorted(found)


def watch_checkpoints(
    folder: Path | str,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    max_length: int = 128,
    batch_size: int = 4,
    bos: bool | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    thresholds: Thresholds | None = None,
    rules: Sequence[TrendRule] = RULES,
    resume: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Film:
    """Film a folder of `checkpoint-*`; `resume` goes on with the checkpoints that are new."""
    out, chosen = Path(out), as_text_set(texts, str(folder))
    with one_writer(out):
        old = _old_settings(out, resume)
        if bos is None and old is not None and old.provenance.settings is not None:
            bos = old.provenance.settings.bos
        film: Film | None = None
        last = _last_step(out) if old is not None else -1
        found = [one for one in checkpoints_in(Path(folder)) if one[0] > last]
        for step, path in track(found, "reading checkpoints", progress):
            loaded = load_model(
                str(path),
                dtype=dtype,
                bos=bos,
                tokenizer=tokenizer or _tokenizer_of(path),
                allow_pickle=allow_pickle,
                trust_remote_code=trust_remote_code,
            )
            bos = loaded.bos  # decided once: a later checkpoint must not be read another way
            encoded = encode_for(loaded, chosen.texts, max_length=max_length)
            probe = Probe.of(encoded, batch_size)
            probe.prove(loaded.model)
            if film is None:
                told = chosen.describe(sum(map(len, encoded)))
                settings = _settings(loaded, told, max_length, thresholds, rules)
                film = _begun(out, settings, old)
            reading = film.judged(film.settings.reading(step, probe.read(loaded.model)))
            film = film.with_reading(reading)
            append_reading(out, film)
        return film or Film.load(out)


def _old_settings(out: Path, resume: bool) -> WatchSettings | None:
    if not (out / FILM).exists():
        return None
    if not resume:
        raise ArtefactError(
            "there is a film already",
            where=out / FILM,
            fix="add --resume to go on with it, or choose another --out",
        )
    sweep(out)
    return WatchSettings.load(out)


def _last_step(out: Path) -> int:
    settings = WatchSettings.load(out)
    return max(resumed_film(out, settings, until=10**12).steps, default=-1)


def _begun(out: Path, settings: WatchSettings, old: WatchSettings | None) -> Film:
    if old is not None:
        return resumed_film(out, settings, until=10**12)
    settings.save(out)
    return Film(settings)


def _settings(
    loaded: LoadedModel,
    texts: TextInfo,
    max_length: int,
    thresholds: Thresholds | None,
    rules: Sequence[TrendRule],
) -> WatchSettings:
    how = MeasureSettings(loaded.length(max_length), 0, loaded.bos)
    where = Provenance(texts, how, versions())
    return WatchSettings(loaded.describe(), where, thresholds or Thresholds(), tuple(rules))


def _tokenizer_of(checkpoint: Path) -> str | None:
    """A Trainer without a processing class saves none; the run's own folder may have it."""
    for folder in (checkpoint, checkpoint.parent):
        if any((folder / name).exists() for name in _TOKENIZERS):
            return str(folder)
    raise ModelError(
        "the checkpoint has no tokenizer",
        where=checkpoint,
        fix="pass --tokenizer with the folder or id of the model's tokenizer",
    )
