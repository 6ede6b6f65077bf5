"""`HeadWatch`: the heads of a model while it trains, in a Trainer or in a loop of one's own.

    Trainer(..., callbacks=[HeadWatch("out/watch")])

    with HeadWatch("out/watch", model=model, tokenizer=tokenizer) as watch:
        for step in range(1, steps + 1):
            ...                       # forward, backward, optimizer.step()
            if watch.after_step(step):
                break                 # an alarm, and `stop=True`

The film is `watch.jsonl` in that folder. Training ends with the same bits with and without it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from headwise.diagnosis.settings import DiagnoseSettings, Thresholds
from headwise.errors import ArtefactError, HeadwiseError
from headwise.models.loaded_model import LoadedModel
from headwise.texts.batches import Batch
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.watch.film import FILM, WATCH, Film, add_reading, film_settings, open_film
from headwise.watch.overhead import Overhead
from headwise.watch.probe import bare, encode_probe, read_heads, undisturbed
from headwise.watch.trackers import log_reading, trainer_trackers
from headwise.watch.trend import RULES, HeadAlarm, TrendRule

MOST_TEXTS, LENGTH = 8, 128  # of a probe, by default
_log = logging.getLogger("headwise.watch")


class HeadWatch(TrainerCallback):
    """Films every head on fixed probe texts while a model trains, and raises alarms.

    `every` steps a reading; without it as often as `budget`, a share of the training time, allows
    (the steps then depend on the machine's speed). `texts` are the probe: the bundled set if none
    are given, at most `MOST_TEXTS`. `stop` ends training at an alarm. In a Trainer, model and
    tokenizer come from there.
    """

    def __init__(
        self,
        out: Path | str = "out/watch",
        *,
        model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        texts: TextSet | Sequence[str] | None = None,
        every: int | None = None,
        budget: float = 0.02,
        max_length: int = LENGTH,
        batch_size: int = MOST_TEXTS,
        bos: bool | None = None,
        thresholds: Thresholds | None = None,
        rules: Sequence[TrendRule] = RULES,
        stop: bool = False,
        trackers: Sequence[Any] = (),
        resume: bool = False,
        name: str | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise HeadwiseError(f"every={every} steps", fix="pass 1 or more, or leave it out")
        self.out, self.stop, self.resume, self.name = Path(out), stop, resume, name
        self.model, self.tokenizer, self.trackers = model, tokenizer, list(trackers)
        self._texts, self._rules = texts, tuple(rules)
        self._settings = DiagnoseSettings(max_length, batch_size, 0, thresholds or Thresholds())
        self._bos = bos
        self.overhead = Overhead(every, budget)  # what watching has cost so far
        self._film: Film | None = None
        self._probe: tuple[Batch, ...] = ()

    # --- a loop of one's own -----------------------------------------------------------------

    def __enter__(self) -> HeadWatch:
        self.start(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish()

    def after_step(self, step: int) -> bool:
        """Call after the optimizer's step number `step`, from 1; True asks to stop."""
        if self._film is None:
            raise HeadwiseError(
                "the watch has not begun", fix="use `with HeadWatch(...) as watch:`"
            )
        if not self.overhead.allows(step):
            return False
        return self._look(step) and self.stop

    @property
    def film(self) -> Film:
        """What was filmed so far."""
        if self._film is None:
            raise HeadwiseError("nothing has been filmed yet", fix="start training first")
        return self._film

    @property
    def alarms(self) -> tuple[HeadAlarm, ...]:
        """All alarms so far."""
        return self.film.alarms

    # --- transformers' Trainer ---------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Read the model before the first step."""
        if self.stop and args.world_size > 1:
            raise HeadwiseError(
                "stop=True with several processes: only the first one reads, the others would wait",
                fix="leave out stop= and act on the alarms",
            )
        if not state.is_world_process_zero:
            return
        self.model = kwargs["model"]
        self.tokenizer = self.tokenizer or kwargs.get("processing_class")
        self.resume = self.resume or state.global_step > 0
        self.trackers += trainer_trackers(args.report_to or (), args.output_dir or ".")
        self.start(state.global_step, state.max_steps)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Read the model if it is time."""
        if state.is_world_process_zero and self.after_step(state.global_step):
            control.should_training_stop = True

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Write what the watch has cost."""
        if state.is_world_process_zero:
            self.finish()

    # --- the work ----------------------------------------------------------------------------

    def start(self, step: int, total_steps: int | None = None) -> None:
        """Begin the film, or go on with it, with the model as it is after `step` steps."""
        self.overhead = Overhead(self.overhead.every, self.overhead.limit, total_steps)
        if self._bos is None and self.resume and (self.out / WATCH).exists():
            measured = film_settings(self.out)[0].provenance.settings
            if measured is not None:  # decided when the film began
                self._bos = measured.bos
        with self.overhead.spending():
            if (self.out / FILM).exists() and not self.resume:
                raise ArtefactError(
                    "there is a film already",
                    where=self.out / FILM,
                    fix="pass resume=True to go on with it, or another folder",
                )
            self._film = open_film(self.out, self._prepare(), step)
        if not self._film.readings or self._film.steps[-1] < step:
            self._look(step)

    def finish(self) -> None:
        """Write `overhead.json`; the film is on disk already."""
        if self._film is not None:
            self.overhead.save(self.out)

    def _prepare(self) -> Film:
        """Encode the probe texts and prove that headwise reads this model rightly."""
        if self.model is None or self.tokenizer is None:
            what = "model" if self.model is None else "tokenizer"
            raise HeadwiseError(
                f"the watch has no {what}",
                fix="pass model= and tokenizer= to HeadWatch; in a Trainer, tokenizer= or the "
                "Trainer's processing_class=",
            )
        whole = bare(self.model)
        identity = self.name or whole.config._name_or_path or str(whole.config.model_type)
        with undisturbed(self.model):
            loaded = LoadedModel(identity, whole, self.tokenizer).reading(self._bos)
            chosen = as_text_set(self._texts, identity)
            chosen = TextSet(chosen.name, chosen.texts[:MOST_TEXTS])
            self._probe, provenance = encode_probe(loaded, chosen, self._settings)
            described = loaded.describe()
        return Film(
            described,
            provenance,
            self._settings.thresholds,
            self._rules,
            self.overhead.every,
            None if self.overhead.every else self.overhead.limit,
        )

    def _look(self, step: int) -> bool:
        """One reading; True if it raised an alarm."""
        assert self._film is not None
        assert self.model is not None
        with self.overhead.spending():
            maps = read_heads(self.model, self._probe)
            self._film = add_reading(self.out, self._film, step, maps)
            reading = self._film.readings[-1]
            for tracker in self.trackers:
                log_reading(tracker, reading)
        self.overhead.readings += 1
        for alarm in reading.alarms:
            _log.warning("%s", alarm.alarm)
        return bool(reading.alarms)
