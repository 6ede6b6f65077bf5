"""`headwise bench`: every benchmark is a ratio to a named peer in one run, with repeats.

`quick` runs each on sizes that a core can do in a minute or less: the ratios show that nothing has
gone astray, the figures in the documentation come from the long runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.artefacts import save_artefact, versions
from headwise.errors import SettingsError
from headwise.progress import Progress, silent, stage
from headwise.values import to_plain

Rows = Sequence[object]  # frozen rows, of a type for each benchmark


@dataclass(frozen=True)
class Asked:
    """What a benchmark is asked for."""

    out: Path
    model: str | None = None
    repeats: int = 3
    quick: bool = False
    progress: Progress = silent


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: what it measures, beside what, and how it is run."""

    what: str
    beside: str
    run: Callable[[Asked], Rows]
    quick: bool = True  # whether it is one of the quick ones


def _diagnose(asked: Asked) -> Rows:
    from headwise.bench.diagnose import bench_diagnose

    if asked.quick:
        return bench_diagnose(
            model=asked.model,
            lengths=(512,),
            repeats=1,
            out=asked.out,
            long_lengths=(),
            ways=("headwise", "sdpa", "eager"),
            progress=asked.progress,
        )
    return bench_diagnose(
        model=asked.model, repeats=asked.repeats, out=asked.out, progress=asked.progress
    )


def _repair(asked: Asked) -> Rows:
    from headwise.bench.repair import bench_repair

    if asked.quick:
        ways = ("headwise", "peer", "limit")
        return bench_repair(lengths=(512,), repeats=2, layers=4, ways=ways)
    return bench_repair(repeats=asked.repeats)


def _ablation(asked: Asked) -> Rows:
    from headwise.bench.ablation import bench_ablation

    if asked.quick:
        return bench_ablation(repeats=1, texts=4, length=128)
    return bench_ablation(repeats=asked.repeats)


def _triage(asked: Asked) -> Rows:
    from headwise.bench.triage import bench_triage

    if asked.quick:
        return bench_triage(model=asked.model, repeats=1, length=32)
    return bench_triage(model=asked.model, repeats=asked.repeats)


def _decisions(asked: Asked) -> Rows:
    from headwise.bench.decisions import bench_decisions

    if asked.quick:
        return bench_decisions(model=asked.model, texts=16, length=64, draws=100)
    return bench_decisions(model=asked.model, progress=asked.progress)


def _plasticity(asked: Asked) -> Rows:
    from headwise.bench.plasticity import bench_plasticity

    return bench_plasticity(rows=5_000) if asked.quick else bench_plasticity()


def _scale(asked: Asked) -> Rows:
    from headwise.bench.scale import SMALL, bench_scale

    folder = asked.out / "scale"
    if asked.quick:
        return bench_scale(folder=folder, shape=SMALL, texts=4, progress=asked.progress)
    return bench_scale(folder=folder, progress=asked.progress)


def _gpu(asked: Asked) -> Rows:
    from headwise.bench.sizing import gpu_rows

    return list(gpu_rows())


BENCHMARKS: dict[str, Benchmark] = {
    "diagnose": Benchmark("all heads of a model", "a plain forward pass, eager", _diagnose),
    "repair": Benchmark("training of slices", "the paper's way, and the limit", _repair),
    "ablation": Benchmark("exact cost of every head", "a forward pass a head", _ablation),
    "triage": Benchmark("why heads are sick", "a forward pass a question", _triage),
    "decisions": Benchmark("as little text as needed", "every head on every text", _decisions),
    "plasticity": Benchmark(
        "plasticity over all pairs", "the reference, pair by pair", _plasticity
    ),
    "scale": Benchmark("a model on disk, and growth", "reading its files", _scale),
    "gpu": Benchmark("layers of published models", "a plain forward pass", _gpu, quick=False),
}


def run_benchmarks(
    what: str,
    *,
    model: str | None,
    repeats: int,
    out: Path,
    quick: bool = False,
    progress: Progress = silent,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run one benchmark or all; each is saved as it comes, and its rows are given as saved."""
    if what != "all" and what not in BENCHMARKS:
        raise SettingsError(f"no benchmark is called {what!r}", fix=f"all, {', '.join(BENCHMARKS)}")
    every = [name for name, found in BENCHMARKS.items() if found.quick or not quick]
    asked = Asked(out, model, repeats, quick, progress)
    for name in every if what == "all" else [what]:
        stage(f"bench {name}: {BENCHMARKS[name].what}, beside {BENCHMARKS[name].beside}", progress)
        rows = to_plain(BENCHMARKS[name].run(asked))
        body = {"rows": rows, "quick": quick, "versions": versions()}
        save_artefact(out / f"bench_{name}.json", "bench", body)
        yield name, rows
