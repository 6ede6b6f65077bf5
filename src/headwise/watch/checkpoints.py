"""The film of a run that is over: its checkpoints, read one at a time in order of steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from headwise.artefacts import sweep
from headwise.diagnosis.settings import DiagnoseSettings, Thresholds
from headwise.errors import ArtefactError, ModelError
from headwise.integrity.locks import one_writer
from headwise.models.loading import load_model
from headwise.progress import Progress, silent, track
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.watch.film import (
    FILM,
    Film,
    add_reading,
    film_settings,
    open_film,
    require_same_film,
    resumed_film,
)
from headwise.watch.probe import encode_probe, read_heads, undisturbed
from headwise.watch.trend import RULES, TrendRule

_NUMBERED = re.compile(r"(?:checkpoint|global_step|step)[-_]?(\d+)")
_END = 10**12  # after every step
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a folder with their steps, in order of steps."""
    checkpoints = [
        (int(match[1]), path)
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (match := _NUMBERED.fullmatch(path.name))
    ]
    if not checkpoints:
        raise ArtefactError(
            "no checkpoints here",
            where=folder,
            fix="pass the folder that holds checkpoint-100, checkpoint-200, ...",
        )
    return sorted(checkpoints)


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
    settings = DiagnoseSettings(max_length, batch_size, 0, thresholds or Thresholds())
    with one_writer(out):
        last = -1
        if (out / FILM).exists():
            earlier = _film_to_resume(out, resume)
            last = max(earlier.steps, default=-1)
            measured = earlier.provenance.settings
            if bos is None and measured is not None:
                bos = measured.bos
        film: Film | None = None
        new = [one for one in checkpoints_in(Path(folder)) if one[0] > last]
        for step, path in track(new, "reading checkpoints", progress):
            loaded = load_model(
                str(path),
                dtype=dtype,
                bos=bos,
                tokenizer=tokenizer or _tokenizer_of(path),
                allow_pickle=allow_pickle,
                trust_remote_code=trust_remote_code,
            )
            bos = loaded.bos  # decided once: a later checkpoint must not be read another way
            with undisturbed(loaded.model):
                probe, provenance = encode_probe(loaded, chosen, settings)
            filmed = Film(loaded.describe(), provenance, settings.thresholds, tuple(rules))
            if film is None:
                film = open_film(out, filmed, until=_END)
            else:
                require_same_film(out, film, filmed)
            film = add_reading(out, film, step, read_heads(loaded.model, probe))
        return film or Film.load(out)


def _film_to_resume(out: Path, resume: bool) -> Film:
    """The film that is there, without a half line at its end."""
    if not resume:
        raise ArtefactError(
            "there is a film already",
            where=out / FILM,
            fix="add --resume to go on with it, or choose another --out",
        )
    sweep(out)
    return resumed_film(out, film_settings(out)[0], until=_END)


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
