"""`python -m benchmarks NAME|all [--quick]`, from the root of the repository.

`--quick` runs each on sizes that a core can do in a minute or less: the ratios show that nothing
has gone astray; the figures in the documentation come from the long runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.harness import Options, console, print_rows, table
from headwise.artefacts import save_artefact, versions
from headwise.progress import stage
from headwise.values import to_plain

# name -> (what is measured, beside what); the module of that name has `run(options) -> rows`
BENCHMARKS = {
    "verbs": ("what each verb costs", "a plain forward pass of its text"),
    "diagnose": ("all heads of a model", "a plain forward pass, eager"),
    "repair": ("training of slices", "the paper's way, and the limit"),
    "ablation": ("exact cost of every head", "a forward pass a head"),
    "triage": ("why heads are sick", "a forward pass a question"),
    "decisions": ("as little text as needed", "every head on every text"),
    "plasticity": ("plasticity over all pairs", "the reference, pair by pair"),
    "scale": ("a model on disk, and growth", "reading its files"),
    "gpu": ("layers of published models", "a plain forward pass"),
}
NOT_QUICK = ("gpu",)


def run_benchmark(name: str, options: Options) -> None:
    """Run one benchmark, save its rows as `bench_NAME.json` and print them."""
    what, beside = BENCHMARKS[name]
    stage(f"bench {name}: {what}, beside {beside}", options.progress)
    rows = to_plain(import_module(f"benchmarks.{name}").run(options))
    body = {"rows": rows, "quick": options.quick, "versions": versions()}
    save_artefact(options.out / f"bench_{name}.json", "bench", body)
    print_rows(name, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """List the benchmarks, or run one, all, or all that have a quick size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="small sizes: all but gpu, in minutes")
    parser.add_argument("--model", help="model of verbs, diagnose, triage and decisions")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    chosen = parser.parse_args(arguments)
    if chosen.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if chosen.name is None and not chosen.quick:
        listed = [[name, *words] for name, words in BENCHMARKS.items()]
        console().print(table("benchmarks", ("name", "of", "beside"), listed))
        console().print("python -m benchmarks NAME runs one, `all` all of them (hours)")
        return
    quick = [name for name in BENCHMARKS if name not in NOT_QUICK]
    names = [chosen.name] if chosen.name in BENCHMARKS else quick if chosen.quick else BENCHMARKS
    from headwise.cli.progress_bar import progress_bars

    with progress_bars() as progress:
        options = Options(chosen.out, chosen.model, chosen.repeats, chosen.quick, progress)
        for name in names:
            run_benchmark(name, options)
    console().print(f"wrote bench_*.json in {chosen.out}", style="dim")


if __name__ == "__main__":
    main()
