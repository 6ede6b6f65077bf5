"""What each verb costs: CPU seconds of a whole call, in plain forward passes of the text it reads.

A verb reads its texts several times, and does more than its inner loop: the guard, the bootstrap,
files. The peer is the model's own forward pass over the same texts, one after the other, in the
same process; for a repair, over the tokens that it trains on. Where a verb says before it starts
what it will cost, that stands beside what it took.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Options, Row, cpu_seconds, one_thread, peak_mb, reset_peak
from headwise.progress import Work, track

MODEL = "patient"
_LENGTH, _TEXTS, _STEPS = 256, 32, 6
_QUICK = (64, 24, 1)  # fewer than 24 documents cannot prove that a head can go
_BATCH, _BLOCK = 4, 256
_SEARCH: Any = {"exact": 8, "width": 1, "most": 4, "curve": 0}


@dataclass
class Spent:
    """What a call said that it would take, and how long it took to say so."""

    minutes: float | None = None
    gigabytes: float | None = None
    probing: float = 0.0
    said_at: float = 0.0  # what came before (reading and cutting a corpus) is not estimated

    def __call__(self, model: Any, work: Work) -> None:
        """The `budget` of a verb."""
        from headwise.cost import estimate_cost

        started = time.process_time()
        cost = estimate_cost(model, work)
        self.minutes, self.gigabytes = cost.minutes, cost.gigabytes
        self.said_at = time.process_time()
        self.probing += self.said_at - started


Call = Callable[[Spent], object]


@dataclass(frozen=True)
class Desk:
    """A model with its texts, and a folder for what verbs write."""

    loaded: Any
    texts: Any
    length: int
    steps: int
    out: Path
    made: dict[str, Any] = field(default_factory=dict)  # values that a later verb reads

    def calls(self) -> Iterator[tuple[str, Call, int]]:
        """Verbs in the order of the story: name, call, tokens it reads."""
        from headwise import capture, check, diagnose, evaluate, prune, repair, stream, triage
        from headwise.plasticity.settings import CaptureSettings
        from headwise.pruning.settings import PruneSettings, SearchSettings, StreamSettings
        from headwise.surgery.plan import make_plan
        from headwise.triaging.settings import TriageSettings

        loaded, texts, length = self.loaded, self.texts, self.length
        out, made = self.out, self.made
        read = sum(map(len, encoded(loaded, texts, length)))
        short: Any = {"max_length": length}
        trained = self.steps * _BATCH * _BLOCK
        changes = {"steps": self.steps, "batch_size": _BATCH, "block": _BLOCK}
        corpus = corpus_of(loaded)

        def diagnosed(_: Spent) -> None:
            made["diagnosis"] = diagnose(loaded, texts, **short)

        def sick() -> Any:
            return make_plan(made["diagnosis"], heads="sick")

        def repaired(spent: Spent, name: str, **asked: Any) -> None:
            repair(loaded, corpus=corpus, out=out / name, changes=changes, budget=spent, **asked)

        search = SearchSettings(**_SEARCH)
        yield "check", lambda _: check(loaded.model), read
        yield "diagnose", diagnosed, read
        judged = TriageSettings(**short)
        yield (
            "triage",
            lambda s: triage(loaded, made["diagnosis"], texts, settings=judged, budget=s),
            read,
        )
        plain = partial(evaluate, loaded, [texts], **short)
        yield "evaluate --heads none", lambda s: plain(heads="none", budget=s), read
        yield "evaluate", lambda s: plain(heads="all", budget=s), read
        yield "repair", lambda s: repaired(s, "run", plan=sick(), treatment="release"), trained
        yield "repair auto", lambda s: repaired(s, "auto", treatment="auto"), trained
        how = CaptureSettings(**short)
        yield (
            "capture",
            lambda s: capture(loaded, texts, out=out / "qk", settings=how, budget=s),
            read,
        )
        pruned = PruneSettings(search=search, **short)
        yield (
            "prune",
            lambda s: prune(loaded, texts, out=out / "prune", settings=pruned, budget=s),
            read,
        )
        few = StreamSettings(search=search, first=4, recent=length // 4, **short)
        yield (
            "stream",
            lambda s: stream(loaded, texts, out=out / "stream", settings=few, budget=s),
            read,
        )


def encoded(loaded: Any, texts: Any, length: int) -> list[list[int]]:
    """The tokens that a verb reads."""
    from headwise.texts.batches import encode_for

    return list(encode_for(loaded, texts.texts, max_length=length))


def corpus_of(loaded: Any) -> Any:
    """The patient's own corpus; of other models the prose it comes with."""
    from headwise.models.patient import PATIENTS
    from headwise.texts.text_sets import default_corpus

    return default_corpus(loaded.id if loaded.id in PATIENTS else MODEL)


def forward_seconds(loaded: Any, documents: Sequence[Sequence[int]]) -> float:
    """CPU seconds a token of plain forward passes, text by text."""
    import torch

    def read() -> None:
        with torch.inference_mode():
            for ids in documents:
                loaded.model(input_ids=torch.tensor([list(ids)]), use_cache=False)

    read()  # warms up
    return cpu_seconds(read) / sum(map(len, documents))


def run(options: Options) -> list[Row]:
    """A row a verb, on the patient or on --model."""
    from headwise import load_model
    from headwise.texts.text_sets import TextSet, default_texts

    length, count, steps = _QUICK if options.quick else (_LENGTH, _TEXTS, _STEPS)
    loaded = load_model(options.model or MODEL)
    default = default_texts("patient")
    texts = TextSet(default.name, default.texts[:count])
    rows: list[Row] = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        one = forward_seconds(loaded, encoded(loaded, texts, length))
        desk = Desk(loaded, texts, length, steps, Path(folder))
        calls = list(desk.calls())
        for name, call, tokens in track(calls, "verbs", options.progress):
            spent = Spent()
            reset_peak()
            seconds = cpu_seconds(partial(call, spent)) - spent.probing
            after = time.process_time() - spent.said_at
            said = None if spent.minutes is None else 60 * spent.minutes
            rows.append(
                {
                    "verb": name,
                    "model": loaded.id,
                    "tokens": tokens,
                    "seconds": seconds,
                    "forward_passes": seconds / (tokens * one),
                    "estimated_seconds": said,
                    "estimated_/_used_since": None if said is None else said / after,
                    "peak_GB": peak_mb() / 1024 * 1.073741824,
                    "estimated_GB": spent.gigabytes,
                }
            )
    return rows
