"""Did a redesign move a number? Run the same commands with two source trees and compare the files.

    python -m campaigns.artefacts write SRC OUT      # all commands with SRC on the path
    python -m campaigns.artefacts compare OLD NEW    # exit 1 where a file differs

`make same BASE=rev` does both for a commit and the working tree. Versions, clocks and the text of
help pages are not compared; everything else must be the same bytes, JSON after removing the keys in
`FREE`. What a redesign changes on purpose is read off the list of differing paths and written down.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open

FREE = {"versions", "tokens_per_second", "threads", "checksum", "identity", "sha256_of_rows"}
TEXTS = "few.jsonl"
STUDY = """
name: small
model: models/bloom
corpora: {train: [corpus.jsonl]}
texts: [few.jsonl]
plan: {heads: "L0H1,L1H0-1"}
max_length: 48
max_texts: 8
ablate: operated
changes: {steps: 4, block: 24, batch_size: 2, accumulation: 1, validate_every: 2, save_every: 2,
          validation_blocks: 3, map_every: 2, lr: 0.01, warmup: 1}
arms:
  - {name: surgery, mode: surgery}
  - {name: sham, mode: sham}
  - {name: lora, mode: lora}
seeds: [0, 1]
completions: 2
"""
RECIPE = """
steps: 6
lr: 0.01
warmup: 2
batch_size: 2
accumulation: 2
block: 24
validate_every: 3
validation_blocks: 3
save_every: 2
map_every: 2
"""
SHORT = "--texts few.jsonl --max-length 48"


def tiny(name: str) -> list[str]:
    """The story of one tiny model, as shell lines."""
    model, out = f"models/{name}", f"out/{name}"
    repair = f"repair {model} --plan {out}/plan.yaml --corpus corpus.jsonl --recipe recipe.yaml"
    lines = [
        f"check {model} --out {out}/check",
        f"diagnose {model} {SHORT} --out {out}/d",
        f"plan {out}/d --heads L0H1,L1H0-1 --out {out}/plan.yaml",
        f"triage {model} --diagnosis {out}/d --heads all {SHORT} --max-texts 8 --out {out}/triage",
        f"{repair} --out {out}/run",
        f"evaluate {model} {SHORT} --heads L1H0-1 --out {out}/before",
        f"evaluate {model} {SHORT} --heads L1H0-1 --patch {out}/run/patch.safetensors "
        f"--out {out}/after",
        f"evaluate {model} {SHORT} --heads L1H0-1 --fixed --out {out}/fixed",
        f"compare {out}/before {out}/after --plan {out}/plan.yaml --run {out}/run --csv "
        f"--out {out}/comparison",
        f"report {out}/run --before {out}/before --after {out}/after --out {out}/report",
        f"complete {model} --patch {out}/run/patch.safetensors --new-tokens 4 --out {out}/complete",
        f"apply {model} {out}/run/patch.safetensors --out {out}/merged",
        f"capture {model} {SHORT} --buckets uniform:8 --out {out}/qk",
        f"plasticity {out}/qk --workers 1 --out {out}/plasticity",
    ]
    modes = ("sham", "gradient-only", "ablate", "random-heads")
    lines += [f"{repair} --mode {mode} --out {out}/{mode}" for mode in modes]
    treatments = ("release", "centre", "evict", "temper", "donor")
    lines += [f"{repair} --treatment {name} --steps 2 --out {out}/{name}" for name in treatments]
    return lines


def patient() -> list[str]:
    """The patient's story: few heads and steps, and one automatic repair."""
    own = "--max-length 64 --texts own.jsonl"
    fast = "--steps 3 --batch-size 2 --block 64"
    run = "out/patient/run"
    return [
        f"diagnose patient {own} --out out/patient/d",
        "plan out/patient/d --heads 'sick & L4-5' --out out/patient/plan.yaml",
        f"triage patient --diagnosis out/patient/d --heads L4H6-7,L5H6 {own} --max-texts 8 "
        "--out out/patient/triage",
        f"repair patient --plan out/patient/plan.yaml {fast} --out {run}",
        f"repair patient --treatment auto --plan out/patient/plan.yaml {fast} "
        "--out out/patient/auto",
        f"evaluate patient {own} --heads L4H6-7 --max-texts 8 --out out/patient/before",
        f"evaluate patient {own} --heads L4H6-7 --max-texts 8 --patch {run}/patch.safetensors "
        "--out out/patient/after",
        f"compare out/patient/before out/patient/after --run {run} --out out/patient/comparison",
        f"report {run} --before out/patient/before --after out/patient/after "
        "--out out/patient/report",
        "survey out/bloom/d/diagnosis.json out/gpt2/d/diagnosis.json --out out/survey",
    ]


def study() -> list[str]:
    """A study of three arms and two seeds, with its report."""
    return ["study study.yaml --out out/study"]


def make_desk(folder: Path) -> None:
    """Models, texts, recipe and study that all commands read."""
    from conftest import tiny_language_model, tiny_tokenizer
    from headwise.models.patient import patient_texts
    from planned import small_texts

    for name in ("bloom", "gpt2", "llama"):
        place = folder / "models" / name
        tiny_language_model(name).save_pretrained(place)
        tiny_tokenizer().save_pretrained(place)
    for name, texts in (
        (TEXTS, small_texts(12).texts),
        ("corpus.jsonl", small_texts(60).texts),
        ("own.jsonl", patient_texts("heldout")[:10]),
    ):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / name).write_text(lines)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "study.yaml").write_text(STUDY)


def run_all(source: Path, folder: Path) -> None:
    """Run every command with one source tree; a command that fails is kept as what it printed."""
    folder.mkdir(parents=True)
    make_desk(folder)
    environment = {
        **os.environ,
        "PYTHONPATH": str(source.resolve()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }

    def story(lines: list[str]) -> None:
        for number, line in enumerate(lines):
            done = subprocess.run(
                f"{sys.executable} -m headwise {line}",
                shell=True,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            sys.stderr.write(f"{done.returncode} headwise {line}\n")
            if done.returncode:
                log = folder / "failed" / f"{line.split()[0]}-{abs(hash(line)) % 10**6}-{number}"
                log.parent.mkdir(exist_ok=True)
                log.write_text(f"{line}\n{done.stdout}\n{done.stderr}")

    stories = [tiny("bloom"), tiny("gpt2"), tiny("llama"), study()]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(story, stories))
    story(patient())


def cleaned(value: object) -> object:
    """A JSON value without the keys that may differ."""
    if isinstance(value, dict):
        return {key: cleaned(part) for key, part in value.items() if key not in FREE}
    return [cleaned(part) for part in value] if isinstance(value, list) else value


def paths(value: object, at: str = "") -> dict[str, object]:
    """Every leaf of a JSON value by its path."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in paths(part, f"{at}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, part in enumerate(value) for k, v in paths(part, f"{at}[{i}]").items()}
    return {at: value}


def content(path: Path) -> object:
    """What is compared of one file."""
    if path.suffix == ".json":
        return cleaned(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return [cleaned(json.loads(line)) for line in path.read_text().splitlines()]
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118
    return path.read_bytes()


def difference(old: Path, new: Path) -> str:
    """'' if two files are the same in what is compared, else where they differ first."""
    before, after = content(old), content(new)
    if before == after:
        return ""
    if isinstance(before, (dict, list)) and old.suffix != ".safetensors":
        left, right = paths(before), paths(after)
        keys = sorted(k for k in {*left, *right} if left.get(k) != right.get(k))
        shown = [f"{key}: {left.get(key)!s:.40} -> {right.get(key)!s:.40}" for key in keys[:6]]
        return f"{len(keys)} values: " + "; ".join(shown)
    if isinstance(before, dict) and isinstance(after, dict):
        return f"tensors {sorted(k for k in {*before, *after} if before.get(k) != after.get(k))}"
    if old.suffix in (".png", ".pdf", ".parquet"):
        return "other bytes"
    lines = difflib.unified_diff(
        old.read_text(errors="replace").splitlines(),
        new.read_text(errors="replace").splitlines(),
        lineterm="",
        n=0,
    )
    return " | ".join(line[:120] for line in list(lines)[2:8])


def compare(old: Path, new: Path) -> int:
    """Print every file that differs, is missing or is new; return how many."""
    left = {path.relative_to(old) for path in old.rglob("*") if path.is_file()}
    right = {path.relative_to(new) for path in new.rglob("*") if path.is_file()}
    wrong = [f"missing {path}" for path in sorted(left - right)]
    wrong += [f"new     {path}" for path in sorted(right - left)]
    for path in sorted(left & right):
        where = difference(old / path, new / path)
        wrong += [f"differs {path}: {where}"] if where else []
    for line in wrong:
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"{len(left & right)} files in both, {len(wrong)} lines above\n")
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(prog="campaigns.artefacts")
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    asked = parser.parse_args()
    if asked.what == "write":
        run_all(asked.first, asked.second)
    else:
        sys.exit(1 if compare(asked.first, asked.second) else 0)


if __name__ == "__main__":
    main()
