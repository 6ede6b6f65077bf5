"""`headwise bench`: every benchmark is a ratio to a named peer in one run, with repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headwise.artefacts import save_artefact, versions
from headwise.errors import SettingsError
from headwise.progress import Progress, silent
from headwise.values import to_plain

Rows = Sequence[object]  # frozen rows, of a type for each benchmark


def _diagnose(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.diagnose import bench_diagnose

    return bench_diagnose(model=model, repeats=repeats, out=out, progress=progress)


def _repair(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.repair import bench_repair

    return bench_repair(repeats=repeats)


def _ablation(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.ablation import bench_ablation

    return bench_ablation(repeats=repeats)


def _triage(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.triage import bench_triage

    return bench_triage(model=model, repeats=repeats)


def _plasticity(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.plasticity import bench_plasticity

    return bench_plasticity()


def _scale(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.scale import bench_scale

    return bench_scale(folder=out / "scale", progress=progress)


def _gpu(model: str | None, repeats: int, out: Path, progress: Progress) -> Rows:
    from headwise.bench.sizing import gpu_rows

    return list(gpu_rows())


BENCHMARKS: dict[str, Callable[[str | None, int, Path, Progress], Rows]] = {
    "diagnose": _diagnose,
    "repair": _repair,
    "ablation": _ablation,
    "triage": _triage,
    "plasticity": _plasticity,
    "scale": _scale,
    "gpu": _gpu,
}


def run_benchmarks(
    what: str, *, model: str | None, repeats: int, out: Path, progress: Progress = silent
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run one benchmark or all; each is saved as it comes, and its rows are given as saved."""
    if what != "all" and what not in BENCHMARKS:
        raise SettingsError(f"no benchmark is called {what!r}", fix=f"all, {', '.join(BENCHMARKS)}")
    for name in BENCHMARKS if what == "all" else [what]:
        rows = to_plain(BENCHMARKS[name](model, repeats, out, progress))
        save_artefact(out / f"bench_{name}.json", "bench", {"rows": rows, "versions": versions()})
        yield name, rows
