"""Look at a model as long as the budget lasts: diagnosis at once, then what promises most.

The budget is time on the clock, from the start of the check-up to its page. Stages come in order of
promise: triage of the heads that may sleep, then heads that can go, then groups that need few keys.
Before each stage its work is estimated and made to fit; when the time is over the next pass through
the model stops whatever runs, and the answer says so. Finished stages are used again if weights,
texts and settings are the same and the budget is not longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headwise.artefacts import content_hash, to_json
from headwise.checkups.settings import CheckupSettings
from headwise.checkups.values import CHECKUP, Checkup, Opportunity, checkup_of
from headwise.cost import seconds_per_token
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.errors import HeadwiseError, ModelError, SettingsError
from headwise.forward.separability import check
from headwise.heads import Head, format_heads
from headwise.integrity.locks import one_writer
from headwise.intervals import Interval
from headwise.models.architectures import layers_of
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.values import ModelInfo
from headwise.progress import Progress, Work, silent, stage
from headwise.pruning.prune import prune
from headwise.pruning.settings import PruneSettings, SearchSettings, StreamSettings
from headwise.pruning.stream import stream
from headwise.pruning.values import NestedSets
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
_PAGE_SECONDS, _PAGE_SHARE = 15.0, 0.25  # what drawing the page takes, and most of the budget
_CHECK_SHARE = 0.25  # of the budget: for showing that heads are separable
_TRIAGE_SHARE = 0.5  # of the time that is left, where heads that can go are looked for too
_MOST_TEXTS, _FEW_TEXTS = 120, 2  # of a diagnosis
_UNCHECKED = "whether heads are separable (headwise check MODEL)"
_FEWEST = 4  # heads that a triage is worth starting for
# how thoroughly heads that can go are looked for: the first that fits the time is taken
_SEARCHES = (
    SearchSettings(curve=0),
    SearchSettings(max_texts=48, exact=64, width=2, most=16, curve=0),
    SearchSettings(max_texts=32, exact=32, width=1, most=8, curve=0),
    SearchSettings(max_texts=24, exact=8, width=1, most=3, curve=0),
)


class _OutOfTime(Exception):
    """The time for a stage is over, or would not be enough."""


@contextmanager
def _stopped_at(model: PreTrainedModel, end: float) -> Iterator[None]:
    """From `end` on, the next layer that runs stops what is being measured."""

    def stop(*_: object) -> None:
        if time.monotonic() > end:
            raise _OutOfTime

    hooks = [layer.register_forward_pre_hook(stop) for layer in layers_of(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
    end = start + how.seconds - min(_PAGE_SECONDS, _PAGE_SHARE * how.seconds)
    loaded = loaded.reading(bos)
    given = None if texts is None else as_text_set(texts, loaded.id)
    with one_writer(out):
        with _stopped_at(loaded.model, end):
            try:
                speed = seconds_per_token(loaded.model)
                work = _Work(loaded, given, how, out, end, speed, progress)
                diagnosis, earlier, missed = work.diagnosed()
            except _OutOfTime:
                raise SettingsError(
                    f"a budget of {how.budget} is too short to look at every head of this model",
                    where=loaded.id,
                    fix=f"pass a longer --budget, e.g. {CheckupSettings.budget}",
                ) from None
            answer = work.run(diagnosis, earlier, missed)
        write_report(out, out)
    return answer


@dataclass(frozen=True)
class _Work:
    """One check-up on its way."""

    loaded: LoadedModel
    texts: TextSet | None
    settings: CheckupSettings
    out: Path
    end: float
    seconds_per_token: float
    progress: Progress

    def tokens(self, share: float) -> float:
        """How many tokens go through the model in a share of the time that is left."""
        return max(self.end - time.monotonic(), 0.0) * share / self.seconds_per_token

    def _fits(self, model: Any, work: Work) -> None:
        if work.tokens > self.tokens(0.9):
            raise _OutOfTime

    def _share(self, share: float) -> float:
        """When a share of what is left is over."""
        now = time.monotonic()
        return now + (self.end - now) * share

    def run(self, diagnosis: Diagnosis, earlier: Checkup | None, missed: Sequence[str]) -> Checkup:
        """What the diagnosis says, then stage by stage why, and what can be gained."""
        answer = checkup_of(diagnosis, self.settings, self._identity())
        answer = replace(answer, stages=("diagnose",), not_looked_at=tuple(missed))
        answer.save(self.out / CHECKUP)
        stages = (
            ("why heads are sick (triage)", self._triage),
            ("heads that can go (prune)", self._prune),
            ("a shorter cache (stream)", self._stream),
        )
        for name, look in stages:
            try:
                answer = look(answer, diagnosis, earlier)
            except _OutOfTime:
                answer = _skipped(answer, f"{name}: takes a longer --budget")
            except HeadwiseError as error:  # a family or texts that this stage cannot use
                why = str(error).splitlines()[0].partition(". ")[0]
                answer = _skipped(answer, f"{name}: {why}")
            answer.save(self.out / CHECKUP)
        return answer

    def _identity(self) -> str:
        texts = None if self.texts is None else self.texts.sha256
        asked = to_plain(replace(self.settings, budget="1s"))
        parts = [weight_fingerprint(self.loaded.model), texts, asked, self.loaded.bos]
        return content_hash([to_json(to_plain(parts))])

    def diagnosed(self) -> tuple[Diagnosis, Checkup | None, list[str]]:
        """The diagnosis, measured or as it lies in the folder, the earlier check-up of the same.

        Also what there was no time for: heads that may not be separable are diagnosed all the same.
        """
        path, missed = self.out / CHECKUP, list[str]()
        earlier = Checkup.load(path) if path.exists() else None
        if earlier is not None and earlier.identity != self._identity():
            earlier = None
            (self.out / TRIAGE).unlink(missing_ok=True)  # of another model or other texts
        if earlier is not None and (self.out / DIAGNOSIS).exists():
            missed = [one for one in earlier.not_looked_at if one == _UNCHECKED]
            return Diagnosis.load(self.out / DIAGNOSIS), earlier, missed
        stage("checking that heads are separable", self.progress)
        try:
            with _stopped_at(self.loaded.model, self._share(_CHECK_SHARE)):
                result = check(self.loaded.model, seed=self.settings.seed, progress=self.progress)
        except _OutOfTime:
            missed.append(_UNCHECKED)
        else:
            if not result.passed:
                raise ModelError(
                    f"the heads of this model are not separable: {result.reason()}",
                    where=self.loaded.id,
                    fix="headwise check MODEL says more",
                )
        measured = self._measured()
        measured.save(self.out / DIAGNOSIS)
        return measured, None, missed

    def _measured(self) -> Diagnosis:
        """A diagnosis on as many texts as a third of the time reads; if that fails on very few."""
        given = as_text_set(self.texts, self.loaded.id, most=_MOST_TEXTS)
        fitting = int(self.tokens(1 / 3) / self.settings.max_length)
        for most in (min(max(fitting, 8), _MOST_TEXTS), _FEW_TEXTS):
            some = given if most >= len(given.texts) else TextSet(given.name, given.texts[:most])
            end = self._share(1 if most == _FEW_TEXTS else 0.6)
            with suppress(_OutOfTime), _stopped_at(self.loaded.model, end):
                length = self.settings.max_length
                return diagnose(self.loaded, some, max_length=length, progress=self.progress)
        raise _OutOfTime

    def _triage(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Why heads are sick, those first that to first order promise most."""
        sick = diagnosis.head_sets()["sick"]
        if not sick:
            return answer
        known = self.out / TRIAGE
        if self._is_known("triage", earlier, known):
            return self._judged(answer, Triage.load(known), len(sick))
        how = TriageSettings(max_length=self.settings.max_length, seed=self.settings.seed)
        given = triage_texts(self.loaded.id) if self.texts is None else self.texts
        some = TextSet(given.name, given.texts[: how.max_texts])
        encoded = encode_for(self.loaded, some.texts, max_length=how.max_length)
        tokens = sum(map(len, encoded))
        # heads that are decided early need less: half of the documents is what they took
        most = int(self.tokens(_TRIAGE_SHARE) / (tokens * INTERVENTIONS / 4))
        if most < min(_FEWEST, len(sick)):
            raise _OutOfTime
        chosen = self._promising(diagnosis, sick, encoded, most) if most < len(sick) else sick
        heads, progress = format_heads(chosen), self.progress
        triaged = triage(self.loaded, diagnosis, some, heads=heads, settings=how, progress=progress)
        triaged.save(known)
        return self._judged(answer, triaged, len(sick))

    def _promising(
        self, diagnosis: Diagnosis, sick: list[Head], encoded: list[list[int]], most: int
    ) -> list[Head]:
        model, plan, some = self.loaded.model, query_plan(diagnosis, sick), encoded[:8]
        layers = sorted({head.layer for head in sick})
        directions = measure_directions(model, list(batches(some, 4)), layers)
        return most_promising(model, plan, some, directions, most, progress=self.progress)

    def _judged(self, answer: Checkup, triaged: Triage, sick: int) -> Checkup:
        answer = replace(answer, why=dict(triaged.counts), stages=(*answer.stages, "triage"))
        if len(triaged.heads) < sick:
            rest = sick - len(triaged.heads)
            answer = _skipped(answer, f"why {rest} more heads are sick: takes a longer --budget")
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

    def _is_known(self, stage: str, earlier: Checkup | None, path: Path) -> bool:
        """Whether an earlier check-up, of no shorter budget, finished a stage."""
        if earlier is None or stage not in earlier.stages or not path.exists():
            return False
        return self.settings.seconds <= earlier.settings.seconds

    def _searched(
        self,
        find: Callable[..., NestedSets],
        how: PruneSettings | StreamSettings,
        earlier: Checkup | None,
    ) -> NestedSets:
        """The sets that a verb finds, looked for as thoroughly as the time allows."""
        name = "prune" if isinstance(how, PruneSettings) else "stream"
        folder = self.out / name
        if self._is_known(name, earlier, folder / f"{name}.json"):
            return NestedSets.load(folder / f"{name}.json")
        limit, seed = self.settings.max_loss, self.settings.seed
        for one in _SEARCHES:
            search = replace(one, max_loss=limit, seed=seed)
            with suppress(_OutOfTime):
                return find(
                    self.loaded,
                    self.texts,
                    out=folder,
                    settings=replace(how, search=search),
                    resume=earlier is not None,
                    budget=self._fits,
                    progress=self.progress,
                )
        raise _OutOfTime

    def _prune(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Which heads can go."""
        how = PruneSettings(max_length=self.settings.max_length)
        found = self._searched(prune, how, earlier)
        answer = replace(answer, stages=(*answer.stages, "prune"))
        name = answer.model.id
        if found.gain_heads and (gain := found.cost(found.lowest, "held_out")):
            where = {"here": "on text like this", "costs elsewhere": "here, not elsewhere"}
            told = f"without {', '.join(found.gain_heads)} the loss changes by {_told(gain)}"
            told += f" {where.get(found.gain, 'here and on other text')}"
            command = f"headwise apply {name} {self.out}/prune/gain.safetensors --out better"
            answer = _worth(answer, Opportunity("retire", told, command, gain))
        if found.heads:
            cost = found.cost(found.chosen, "held_out")
            told = f"{len(found.heads)} of {found.units} heads can go below "
            told += f"{self.settings.max_loss:g} nats"
            told += "" if cost is None else f"; on held-out text {_told(cost)}"
            asleep = Triage.load(self.out / TRIAGE).of_class("asleep") if answer.why else []
            both = {str(head) for head in asleep} & set(found.heads)
            told += f"; {len(both)} of them sleep: repair or prune, not both" * bool(both)
            command = f"headwise apply {name} {self.out}/prune/patch.safetensors --out pruned"
            answer = _worth(answer, Opportunity("prune", told, command, cost))
        return answer

    def _stream(self, answer: Checkup, diagnosis: Diagnosis, earlier: Checkup | None) -> Checkup:
        """Which key/value groups need only the first and the recent tokens."""
        how = StreamSettings()
        if self.loaded.length(how.max_length) <= how.first + how.recent:
            return answer  # every key is among the first and the recent ones
        found = self._searched(stream, how, earlier)
        answer = replace(answer, stages=(*answer.stages, "stream"))
        if not found.groups:
            return answer
        cost = found.cost(found.chosen, "held_out")
        told = f"{len(found.groups)} of {found.units} key/value groups need only the first "
        told += f"and recent tokens: {found.saved_share:.0%} of the cache at {how.context:,} tokens"
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
