"""The model card of a repaired model, from its artefacts alone: no number that was not measured."""

from __future__ import annotations

from pathlib import Path

from headwise.artefacts import versions
from headwise.provenance import text_name
from headwise.report.finding import Verdict
from headwise.report.source import Source, read_source
from headwise.report.verdict import judge, main_run


def model_card(run: Path | str) -> str:
    """What was done, controls, intervals and how to undo it, as Markdown for a hub."""
    source = read_source(Path(run))
    main = main_run(source)
    change = None if main is None else source.against_stock(main.arm)
    # "repaired" is a claim about held-out text, not about having run the verb
    done = "repaired" if change is not None and change.high < 0 else "changed"
    parts = [_front(source), f"# {source.model_name}, {done} with headwise"]
    parts += [*_verdict(judge(source)), *_done(source), *_controls(source), *_undo(source)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(source: Source) -> str:
    lines = ["library_name: transformers", "tags:", "- headwise", "- attention-heads"]
    if source.model_id.count("/") == 1 and not Path(source.model_id).exists():
        lines.insert(0, f"base_model: {source.model_id}")
    return "\n".join(["---", *lines, "---"])


def _verdict(found: Verdict) -> list[str]:
    alarms = [f"> **{alarm}**" for alarm in found.alarms]
    findings = [f"- **{finding.title}:** {finding.text}" for finding in found.findings]
    return ["\n".join(alarms), f"**{found.headline}** {found.basis}", "\n".join(findings)]


def _done(source: Source) -> list[str]:
    main = main_run(source)
    if main is None or main.run is None:
        return []
    run = main.run
    base = source.model_name if Path(run.model).exists() else run.model  # not where it lay here
    rows = [
        f"- base: `{base}`, weights `{run.fingerprint[:16]}`",
        f"- heads: `{run.plan.targets}` (selection `{run.plan.selection}`)",
        f"- mode: {run.mode}, seed {run.seed}, {main.steps_taken} optimizer steps",
        f"- corpus: {text_name(run.corpus.name)}",
    ]
    if main.weights:
        rows.append(f"- weights changed: {main.weights:,}")
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    return ["## What was done", "\n".join([*rows, f"- versions: {told}"])]


def _controls(source: Source) -> list[str]:
    rows = [
        f"| {arm} | {change.value:+.4f} | {change.low:+.4f} to {change.high:+.4f} |"
        for arm in source.arms()
        if (change := source.against_stock(arm)) is not None
    ]
    title = "## Held-out loss against stock, and its controls"
    if not rows:
        return [title, "It was not evaluated on held-out text. No claim is made."]
    if len(rows) == 1:
        rows.append("\nNo control was run beside it.")
    head = "| arm | nats per token | 95% interval, paired by document |\n|---|---|---|"
    return [title, "\n".join([head, *rows])]


def _undo(source: Source) -> list[str]:
    return [
        "## How to undo it",
        "The changed slices with what they replaced are in `patch.safetensors` of the run:",
        "```sh\nheadwise apply THIS_MODEL patch.safetensors --undo --out original/\n```",
        "Outside those slices every weight is the base's, bit for bit.",
    ]
