"""Plasticity of every head of the patient, before and after a repair.

    python patients/plastic.py RUN/patch.safetensors --out plasticity.jsonl

Both states are captured on the same held-out texts. A row has the head, whether it is sick in
stock, whether the patch treats it, and its plasticity (the seed's definition) in stock and now.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from headwise import Patch, capture, diagnose, load_model, make_plan, measure_plasticity
from headwise.heads import Head
from headwise.models.patient import patient_texts


def main() -> None:
    """Read the command line and write a row for every head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patch", type=Path)
    parser.add_argument("--texts", type=int, default=32, help="held-out documents")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    loaded, texts = load_model("patient"), patient_texts("heldout")[: asked.texts]
    sick = set(make_plan(diagnose(loaded, texts, max_length=256), heads="sick").target_heads)
    treated = {Head.parse(name.split(".")[0]) for name in Patch.load(asked.patch).slices}
    states = []
    for patches in ([], [asked.patch]):
        with tempfile.TemporaryDirectory() as folder:
            capture(loaded, texts, out=Path(folder) / "qk", patches=patches)
            measured = measure_plasticity(
                Path(folder) / "qk", out=Path(folder) / "out", max_workers=1
            )
        states.append({Head(one.layer, one.q_head): one.ap_overall for one in measured.heads})
    rows = [
        {
            "head": str(head),
            "sick": head in sick,
            "treated": head in treated,
            "before": states[0][head],
            "after": states[1][head],
        }
        for head in sorted(states[0])
    ]
    asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
