"""Look at a model as long as the budget lasts: diagnosis at once, then what promises most.

Stages come in order of promise: triage of the heads that may sleep, then heads that can go, then
groups that need few keys. Before each stage its work is estimated and made to fit; a stage that
takes longer than it should is stopped when the time is over, and the answer says so. Finished
stages are used again if weights, texts and settings are the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwise.artefacts import content_hash, to_json
from headwise.checkups.settings import CheckupSettings
from headwise.checkups.values import CHECKUP, Checkup, Opportunity, checkup_of
from headwise.cost import seconds_per_token
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError, ModelError, TextError
from headwise.forward.separability import check
from headwise.heads import Head, format_heads
from headwise.integrity.locks import one_writer
from headwise.intervals import Interval
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.values import ModelInfo
from headwise.progress import Progress, silent, stage
from headwise.pruning.prune import prune, search_work
from headwise.pruning.search import deal_documents
from headwise.pruning.settings import PruneSettings, SearchSettings, StreamSettings
from headwise.pruning.stream import stream
from headwise.pruning.values import Prune, Streaming
from headwise.report.write import write_report
from headwise.surgery.sink_directions import measure_directions
from headwise.texts.batches import batches, encode_for
from headwise.texts.text_sets import TextSet, as_text_set
from headwise.triaging.settings import TriageSettings
from headwise.triaging.texts import triage_texts
from headwise.triaging.triage import INTERVENTIONS, most_promising, query_plan, triage
from headwise.triaging.values import Triage
from headwise.values import to_plain

DIAGNOSIS, TRIAGE, PAGE = "diagnosis.json", "triage.json", "report.html"
_TRIAGE_SHARE = 0.5  # of the time that is left, where heads that can go are looked for too
_MOST_TEXTS = 120  # of a diagnosis
_FEWEST = 4  # heads that a triage is worth starting for
# how thoroughly heads that can go are looked for: the first that fits the time is taken
_SEARCHES = (
    SearchSettings(curve=0),
    SearchSettings(max_texts=48, exact=64, width=2, most=16, curve=0),
    SearchSettings(max_texts=32, exact=32, width=1, most=8, curve=0),
    SearchSettings(max_texts=24, exact=8, width=1, most=3, curve=0),
)


class _OutOfTime(Exception):
    """The budget is used up in the middle of a stage."""


@dataclass(frozen=True)
class _Clock:
    """What is left of the budget."""

    end: float
    seconds_per_token: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def tokens(self, share: float = 1.0) -> float:
        """How many tokens still go through the model."""
        return max(self.left, 0.0) * share / self.seconds_per_token

    def timed(self, progress: Progress) -> Progress:
        """Progress that ends the stage when time is over."""

        def tell(title: str, done: int, total: int, note: str) -> None:
            progress(title, done, total, note)
            if self.left < 0:
                raise _OutOfTime

        return tell


@takes_model
def checkup(
    loaded: LoadedModel,
    texts: TextSet | Sequence[str] | None = None,
    *,
    out: Path | str,
    settings: CheckupSettings | None = None,
    bos: bool | None = None,
    progress: Progress = silent,
) -> Checkup:
    """Check, diagnose and judge a model within a budget, and write it with a page into `out`.

    It starts with what is known: finished stages of the same model, texts and settings lie in
    `out` and are used again.
    """
    how, out, start = settings or CheckupSettings(), Path(out), time.monotonic()
    loaded = loaded.reading(bos)
    given = None if texts is None else as_text_set(texts, loaded.id)
    speed = seconds_per_token(loaded.model)
    clock = _Clock(start + how.seconds, speed)
    with one_writer(out):
        work = _Work(loaded, given, how, out, clock, progress)
        return work.run()


@dataclass(frozen=True)
class _Work:
    """One check-up on its way."""

    loaded: LoadedModel
    texts: TextSet | None
    settings: CheckupSettings
    out: Path
    clock: _Clock
    progress: Progress

    def run(self) -> Checkup:
        diagnosis, earlier = self._diagnosed()
        answer = checkup_of(diagnosis, self.settings, self._identity())
        answer = replace(answer, stages=("diagnose",))
        answer.save(self.out / CHECKUP)
        stages = (("triage", self._triage), ("prune", self._prune), ("stream", self._stream))
        for name, look in stages:
            try:
                answer = look(answer, diagnosis, earlier)
            except _OutOfTime:
                answer = _skipped(answer, f"{name}: the budget ended while it was measured")
            except TextError:
                answer = _skipped(answer, f"{name}: too few documents (--texts with 30 or more)")
            except HeadwiseError as error:  # a family or texts that this stage cannot use
                answer = _skipped(answer, f"{name}: {str(error).splitlines()[0]}")
            answer.save(self.out / CHECKUP)
        write_report(self.out, self.out)
        return answer

    def _identity(self) -> str:
        texts = None if self.texts is None else self.texts.sha256
        asked = to_plain(replace(self.settings, budget="1s"))
        parts = [weight_fingerprint(self.loaded.model), texts, asked, self.loaded.bos]
        return content_hash([to_json(to_plain(parts))])

    def _diagnosed(self) -> tuple[Diagnosis, Checkup | None]:
        """The diagnosis, measured or as it lies in the folder, and the earlier check-up."""
        path = self.out / CHECKUP
        earlier = Checkup.load(path) if path.exists() else None
        if earlier is not None and earlier.identity != self._identity():
            earlier = None
            (self.out / TRIAGE).unlink(missing_ok=True)  # of another model or other texts
        if earlier is not None and (self.out / DIAGNOSIS).exists():
            return Diagnosis.load(self.out / DIAGNOSIS), earlier
        stage("checking that heads are separable", self.progress)
        result = check(self.loaded.model, seed=self.settings.seed)
        if not result.passed:
            raise ModelError(
                f"the heads of this model are not separable: {result.reason()}",
                where=self.loaded.id,
                fix="headwise check MODEL says more",
            )
        measured = diagnose(
            self.loaded,
            self._diagnosed_texts(),
            max_length=self.settings.max_length,
            progress=self.progress,
        )
        measured.save(self.out / DIAGNOSIS)
        return measured, None

    def _diagnosed_texts(self) -> TextSet | None:
        """As many of the given texts as a third of the budget reads, eight at least."""
        if self.texts is None:
            return None
        most = int(self.clock.tokens(1 / 3) / self.settings.max_length)
        return TextSet(self.texts.name, self.texts.texts[: min(max(most, 8), _MOST_TEXTS)])

    def _triage(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Why heads are sick, those first that to first order promise most."""
        sick = diagnosis.head_sets()["sick"]
        if not sick:
            return answer
        known = self.out / TRIAGE
        if earlier is not None and "triage" in earlier.stages and known.exists():
            triaged = Triage.load(known)
            if len(triaged.heads) == len(sick) or self.settings.seconds <= earlier.settings.seconds:
                return self._judged(answer, triaged, len(sick))
        how = TriageSettings(max_length=self.settings.max_length, seed=self.settings.seed)
        given = triage_texts(self.loaded.id) if self.texts is None else self.texts
        some = TextSet(given.name, given.texts[: how.max_texts])
        encoded = encode_for(self.loaded, some.texts, max_length=how.max_length)
        tokens = sum(map(len, encoded))
        # heads that are decided early need less: half of the documents is what they took
        most = int(self.clock.tokens(_TRIAGE_SHARE) / (tokens * INTERVENTIONS / 4))
        if most < min(_FEWEST, len(sick)):
            return _skipped(answer, f"triage: no time for {_FEWEST} heads (a longer --budget)")
        progress, chosen = self.clock.timed(self.progress), sick
        if most < len(sick):
            chosen = self._promising(diagnosis, sick, encoded, most)
        triaged = triage(
            self.loaded,
            diagnosis,
            some,
            heads=format_heads(chosen),
            settings=how,
            progress=progress,
        )
        triaged.save(known)
        return self._judged(answer, triaged, len(sick))

    def _promising(
        self, diagnosis: Diagnosis, sick: list[Head], encoded: list[list[int]], most: int
    ) -> list[Head]:
        model, plan, some = self.loaded.model, query_plan(diagnosis, sick), encoded[:8]
        blocks = list(batches(some, 4))
        layers = sorted({head.layer for head in sick})
        directions = measure_directions(model, blocks, layers)
        return most_promising(
            model, plan, some, directions, most, progress=self.clock.timed(self.progress)
        )

    def _judged(self, answer: Checkup, triaged: Triage, sick: int) -> Checkup:
        answer = replace(answer, why=dict(triaged.counts), stages=(*answer.stages, "triage"))
        if len(triaged.heads) < sick:
            rest = sick - len(triaged.heads)
            answer = _skipped(answer, f"triage of {rest} sick heads (a longer --budget)")
        asleep = triaged.of_class("asleep")
        if not asleep:
            return answer
        best = min(asleep, key=lambda head: triaged.heads[str(head)].release.value)
        gain = triaged.heads[str(best)].release
        finding = (
            f"{len(asleep)} of the sick heads sleep; {best} released alone "
            f"changes the loss by {_told(gain)} nats per token"
        )
        return _worth(answer, Opportunity("repair", finding, _repair(answer.model), gain))

    def _prune(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Which heads can go, as thoroughly as the time allows."""
        folder, given = self.out / "prune", as_text_set(self.texts, self.loaded.id)
        known = folder / "prune.json"
        if earlier is not None and "prune" in earlier.stages and known.exists():
            return self._pruned(answer, Prune.load(known))
        units = diagnosis.model.num_layers * diagnosis.model.num_heads
        for one in _SEARCHES:
            search = replace(one, max_loss=self.settings.max_loss, seed=self.settings.seed)
            length = self.settings.max_length
            documents = deal_documents(self.loaded, given, None, search, max_length=length)
            if search_work(documents, search, units).tokens < self.clock.tokens(0.9):
                how = PruneSettings(search=search, max_length=length)
                progress = self.clock.timed(self.progress)
                found = prune(
                    self.loaded, given, out=folder, settings=how, resume=True, progress=progress
                )
                return self._pruned(answer, found)
        return _skipped(answer, "which heads can go (a longer --budget)")

    def _pruned(self, answer: Checkup, found: Prune) -> Checkup:
        answer, nested = replace(answer, stages=(*answer.stages, "prune")), found.nested
        name, texts = answer.model.id, self._texts_argument()
        if found.gain_heads:
            gain = nested.cost(nested.lowest, "held_out") or nested.cost(
                nested.lowest, "validation"
            )
            if gain is not None and gain.high < 0:
                where = {"here": "on text like this", "costs elsewhere": "here, not elsewhere"}
                told = f"without {', '.join(found.gain_heads)} the loss falls by {_told(gain)} nats"
                told += f" {where.get(nested.gain, 'here and on other text')}"
                command = f"headwise apply {name} {self.out}/prune/gain.safetensors --out better"
                answer = _worth(answer, Opportunity("retire", told, command, gain))
        if found.heads:
            cost = nested.cost(nested.chosen, "held_out")
            told = f"{len(found.heads)} of {nested.units} heads can go below "
            told += f"{self.settings.max_loss:g} nats"
            told += "" if cost is None else f"; on held-out text {_told(cost)}"
            command = f"headwise prune {name}{texts} --out out/prune"
            answer = _worth(answer, Opportunity("prune", told, command, cost))
        return answer

    def _stream(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Which key/value groups need only the first and the recent tokens."""
        folder, how = self.out / "stream", StreamSettings()
        known = folder / "stream.json"
        if earlier is not None and "stream" in earlier.stages and known.exists():
            return self._streamed(answer, Streaming.load(known))
        length = self.loaded.length(how.max_length)
        if length <= how.first + how.recent:
            return answer  # every key is among the first and the recent ones
        given = as_text_set(self.texts, self.loaded.id)
        units = diagnosis.model.num_layers * diagnosis.model.num_kv_heads
        for one in _SEARCHES[1:]:
            search = replace(one, max_loss=self.settings.max_loss, seed=self.settings.seed)
            asked = replace(how, search=search)
            documents = deal_documents(
                self.loaded, given, None, search, max_length=length, minimum=how.first + how.recent
            )
            if search_work(documents, search, units).tokens < self.clock.tokens(0.9):
                progress = self.clock.timed(self.progress)
                found = stream(
                    self.loaded, given, out=folder, settings=asked, resume=True, progress=progress
                )
                return self._streamed(answer, found)
        return _skipped(answer, "a shorter cache (headwise stream, or a longer --budget)")

    def _streamed(self, answer: Checkup, found: Streaming) -> Checkup:
        answer = replace(answer, stages=(*answer.stages, "stream"))
        if not found.groups:
            return answer
        cost = found.nested.cost(found.nested.chosen, "held_out")
        share = found.saved_bytes / max(found.full_bytes, 1)
        told = f"{len(found.groups)} of {found.nested.units} key/value groups need only the first "
        told += f"and recent tokens: {share:.0%} of the cache at {found.settings.context:,} tokens"
        told += "" if cost is None else f"; loss {_told(cost)}"
        texts = self._texts_argument()
        command = f"headwise stream {answer.model.id}{texts} --out out/stream"
        return _worth(answer, Opportunity("stream", told, command, cost))

    def _texts_argument(self) -> str:
        return (
            "" if self.texts is None else f" --texts {self.texts.name.replace(', ', ' --texts ')}"
        )


def _skipped(answer: Checkup, what: str) -> Checkup:
    return replace(answer, not_looked_at=(*answer.not_looked_at, what))


def _worth(answer: Checkup, one: Opportunity) -> Checkup:
    return replace(answer, opportunities=(*answer.opportunities, one))


def _repair(model: ModelInfo) -> str:
    corpus = "" if model.id == "patient" else " --corpus YOUR_TEXTS"
    return f"headwise repair {model.id} --treatment auto{corpus} --out out/run"


def _told(change: Interval) -> str:
    return f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
