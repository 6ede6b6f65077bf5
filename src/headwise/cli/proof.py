"""Verbs that prove and measure: evaluate, complete, compare, capture, plasticity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.app import app
from headwise.cli.options import (
    AllowPickle,
    BatchSize,
    Bos,
    DeviceMap,
    Dtype,
    Lines,
    MaxLength,
    Model,
    Out,
    Patches,
    Quiet,
    RemoteCode,
    Seed,
    Texts,
    apply_to,
    choice,
    chosen_texts,
    load,
    wrote,
)


@app.command()
def evaluate(
    model: Model,
    patch: Patches = None,
    texts: Texts = None,
    lines: Lines = False,
    heads: Annotated[
        str | None,
        typer.Option(help="Heads to ablate one by one: a selection, `all` or `none`."),
    ] = None,
    max_length: MaxLength = 512,
    max_texts: Annotated[int, typer.Option(help="Texts used to judge heads.", min=2)] = 64,
    batch_size: BatchSize = 4,
    tasks: Annotated[
        list[str] | None, typer.Option(help="lm-evaluation-harness tasks to run as well.")
    ] = None,
    out: Out = Path("out/evaluation"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    force: Annotated[bool, typer.Option("--force", help="Apply patches to another base.")] = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Perplexities with intervals, what every head is worth, dormant neurons."""
    from headwise.cli.show import console, evaluation_tables
    from headwise.proof.evaluate import chosen_heads, evaluate as run, paper_prompts

    sets = [chosen_texts(texts, lines, model), paper_prompts()]
    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    base = loaded.describe()
    applied = apply_to(loaded, patch, force)
    singles, joint = chosen_heads(loaded.model, heads, applied)
    found = run(
        loaded.model,
        loaded.tokenizer,
        sets,
        name=loaded.id,
        patches=applied,
        base=base,
        ablated=singles,
        joint=joint,
        max_length=max_length,
        max_texts=max_texts,
        batch_size=batch_size,
        quiet=quiet,
    )
    if tasks:
        from headwise.proof.lm_eval import run_tasks

        scores = run_tasks(loaded.model, loaded.tokenizer, tasks, batch_size=batch_size)
        found = replace(found, tasks=scores)
    for item in evaluation_tables(found):
        console(quiet).print(item)
    wrote([found.save(out / "evaluation.json")], quiet)


@app.command()
def complete(
    model: Model,
    patch: Patches = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts, one a line or .jsonl.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to add.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.", min=0.01, max=1)] = 0.92,
    batch_size: BatchSize = 10,
    out: Out = Path("out/completions"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    seed: Seed = 42,
    quiet: Quiet = False,
) -> None:
    """Complete prompts with the stock model and with each patch, side by side."""
    from headwise.artefacts import save_artefact, versions
    from headwise.cli.show import console, table
    from headwise.models.patch import Patch
    from headwise.proof.completions import (
        Sampling,
        bundled_prompts,
        complete as run,
        completions_body,
        prompts_hash,
        read_prompts,
    )
    from headwise.values import to_plain

    chosen = bundled_prompts() if prompts is None else read_prompts(prompts)
    sampling = Sampling(new_tokens, temperature, top_p, seed)
    loaded = load(model, dtype, device_map, False, False)
    base = loaded.describe()
    conditions = {
        "stock": run(
            loaded.model, loaded.tokenizer, chosen, sampling, batch_size=batch_size, quiet=quiet
        )
    }
    for path in patch or []:
        one = Patch.load(path)
        one.apply(loaded.model)
        conditions[path.parent.name or path.stem] = run(
            loaded.model, loaded.tokenizer, chosen, sampling, batch_size=batch_size, quiet=quiet
        )
        one.undo(loaded.model)
    body = completions_body(
        conditions,
        sampling,
        {"model": to_plain(base), "prompts_sha256": prompts_hash(chosen), "versions": versions()},
    )
    rows = [
        [n, *(s["all"][k] for k in ("words", "distinct_2", "repetition", "markup_share"))]
        for n, s in body["summary"].items()
    ]
    columns = ("condition", "words", "distinct-2", "repetition", "markup")
    console(quiet).print(table("completions", columns, rows))
    wrote([save_artefact(out / "completions.json", "completions", body)], quiet)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="diagnosis.json, evaluation.json or a folder")],
    after: Annotated[Path, typer.Argument(help="The same after the operation.")],
    plan: Annotated[Path | None, typer.Option(help="plan.yaml: gives the zones.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run directory: gives checkpoints.")] = None,
    out: Out = Path("out/comparison"),
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """What changed between two conditions: classes, drift by zone, columns, paired losses."""
    from headwise.artefacts import read_json
    from headwise.cli.show import comparison_tables, console
    from headwise.proof.compare import compare as run_comparison, read_snapshot
    from headwise.proof.trajectories import run_maps
    from headwise.surgery.plan import SurgeryPlan

    found = run_comparison(
        read_snapshot(before),
        read_snapshot(after),
        plan=None if plan is None else SurgeryPlan.load(plan),
        checkpoints=[] if run is None else run_maps(run),
        whole_layers=run is not None and read_json(run / "run.json").get("mode") == "lora",
    )
    for item in comparison_tables(found):
        console(quiet).print(item)
    wrote([found.save(out / "comparison.json")], quiet)


@app.command()
def capture(
    model: Model,
    texts: Texts = None,
    lines: Lines = False,
    layers: Annotated[str | None, typer.Option(help="e.g. 0-5,29")] = None,
    heads: Annotated[str | None, typer.Option(help="Query heads: a selection or indices.")] = None,
    buckets: Annotated[str, typer.Option(help="uniform:SIZE or log2:FLOOR")] = "uniform:64",
    base_rate: Annotated[
        float | None, typer.Option(help="Rows kept a text and bucket; default: all.")
    ] = None,
    pre_rope: Annotated[bool, typer.Option("--pre-rope", help="Before RoPE is applied.")] = False,
    layout: Annotated[str, typer.Option(help="new, or old (with a model folder)")] = "new",
    patch: Patches = None,
    max_length: MaxLength = 512,
    batch_size: BatchSize = 4,
    bos: Bos = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a capture.")] = False,
    out: Out = Path("out/qk"),
    device_map: DeviceMap = None,
    dtype: Dtype = None,
    allow_pickle: AllowPickle = False,
    trust_remote_code: RemoteCode = False,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Record query and key vectors as Parquet, in the sniffed-qk layout."""
    from headwise.cli.show import console
    from headwise.heads import select_in_layers
    from headwise.plasticity.capture import CaptureSettings, capture_qk

    loaded = load(model, dtype, device_map, allow_pickle, trust_remote_code)
    apply_to(loaded, patch)
    settings = CaptureSettings(
        buckets, base_rate, max_length, pre_rope, choice(layout, "new", "old"), seed, bos
    )
    shape = loaded.describe()
    captured = capture_qk(
        loaded.model,
        loaded.tokenizer,
        chosen_texts(texts, lines, model),
        out=out,
        name=model,
        heads=select_in_layers(layers, heads, *shape.shape),
        settings=settings,
        batch_size=batch_size,
        resume=resume,
        quiet=quiet,
    )
    rows = sum(captured.rows.values())
    console(quiet).print(
        f"{rows:,} query and key vectors, {len(captured.rows)} files, in {captured.folder}"
    )
    if captured.note:
        console(quiet).print(f"note: {captured.note}")


@app.command()
def plasticity(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Captured vectors; all is discovered.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with the settings.")] = None,
    definition: Annotated[
        str | None, typer.Option(help="seed, full, empirical or linear-diagonal")
    ] = None,
    pairs: Annotated[str | None, typer.Option(help="Key pairs a cell: all, or a number.")] = None,
    heads: Annotated[str | None, typer.Option(help="A selection such as L0-3H2.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default one a core.")] = None,
    backend: Annotated[str | None, typer.Option(help="joblib or dask")] = None,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler.")] = None,
    legacy_columns: Annotated[
        bool, typer.Option("--legacy-columns", help="The public code's column names.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep finished heads.")] = False,
    figures: Annotated[bool, typer.Option(help="Draw the figures too.")] = True,
    out: Out = Path("out/plasticity"),
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    quiet: Quiet = False,
) -> None:
    """Measure how easily each head's preference between two keys changes as queries move on."""
    from headwise.cli.show import console, plasticity_table
    from headwise.plasticity.figures import plasticity_figures
    from headwise.plasticity.run import compute_plasticity
    from headwise.progress import plasticity_progress

    if (folder is None) == (config is None):
        raise typer.BadParameter("pass either a folder of captured vectors or --config")
    given = {
        "definition": choice(definition, "seed", "full", "empirical", "linear-diagonal"),
        "pairs": pairs if pairs in (None, "all") else int(pairs),
        "heads": heads,
        "max_workers": workers,
        "backend": choice(backend, "joblib", "dask"),
        "scheduler": scheduler,
        "legacy_columns": legacy_columns or None,
        "seed": seed,
    }
    with plasticity_progress(quiet) as progress:
        found = compute_plasticity(
            folder or config,  # type: ignore[arg-type]
            out=out,
            resume=resume,
            progress=progress,
            **{key: value for key, value in given.items() if value is not None},
        )
    if figures and found.heads:
        plasticity_figures(found, out)
    console(quiet).print(plasticity_table(found))
    console(quiet).print(f"wrote tables, plasticity.json and figures in {out}", style="dim")
    for failure in found.failures:
        typer.echo(
            f"headwise: L{failure.layer}H{failure.q_head} failed: {failure.reason}", err=True
        )
    if found.failures:
        raise typer.Exit(1)
