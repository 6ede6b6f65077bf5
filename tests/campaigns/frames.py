"""How far it is from a verb to its number, and how much code one has to load on the way.

    python -m campaigns.frames FOLDER      # FOLDER: what `campaigns.artefacts write` left

For each verb: headwise modules and source lines imported, and headwise frames on the stack when
the number is made (the fused attention kernel, the optimizer's step, the normal distribution
function, the page's template).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MADE = {
    "diagnose": ("torch.ops.aten", "_scaled_dot_product_flash_attention_for_cpu"),
    "repair": ("torch.optim.AdamW", "step"),
    "plasticity": ("scipy.special", "ndtr"),
    "report": ("jinja2.Template", "render"),
}
COMMANDS = {
    "diagnose": "diagnose models/bloom --texts few.jsonl --max-length 48 --out frames/d",
    "repair": "repair models/bloom --plan out/bloom/plan.yaml --corpus corpus.jsonl "
    "--recipe recipe.yaml --out frames/run",
    "plasticity": "plasticity out/bloom/qk --workers 1 --out frames/plasticity",
    "report": "report out/bloom/run --before out/bloom/before --after out/bloom/after "
    "--out frames/report",
}
PROBE = """
import importlib, inspect, sys, pathlib
place, name = sys.argv[1].rsplit(":", 1)
deepest = 0
def watched(function):
    def counted(*args, **kwargs):
        global deepest
        if not deepest:
            stack = [frame for frame in inspect.stack(0) if "/headwise/" in frame.filename]
            deepest = len(stack)
            if "--show" in sys.argv: print("\\n".join(f"{f.filename}:{f.function}" for f in stack))
        return function(*args, **kwargs)
    return counted
def place_watch():
    parts = place.split(".")
    owner = importlib.import_module(parts[0])
    for part in parts[1:]:
        owner = getattr(owner, part, None) or importlib.import_module(place)
    setattr(owner, name, watched(getattr(owner, name)))
place_watch()
from headwise.cli import main
sys.argv = ["headwise", *sys.argv[2].split(), "--quiet"]
try:
    main()
except SystemExit:
    pass
loaded = [m for n, m in list(sys.modules.items()) if n.split(".")[0] == "headwise"]
files = [m.__file__ for m in loaded if m.__file__]
lines = sum(pathlib.Path(file).read_text().count("\\n") for file in files)
print(len(files), lines, deepest)
"""


def main() -> None:
    folder = Path(sys.argv[1])
    for verb, command in COMMANDS.items():
        done = subprocess.run(
            [sys.executable, "-c", PROBE, ":".join(MADE[verb]), command],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        modules, lines, frames = (done.stdout.split() or ["?", "?", done.stderr[-300:]])[-3:]
        sys.stdout.write(f"{verb}: {modules} modules, {lines} lines, {frames} frames\n")
        subprocess.run(["rm", "-rf", str(folder / "frames")], check=False)


if __name__ == "__main__":
    main()
