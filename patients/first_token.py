"""What first-token mass depends on: length, a BOS, the kind of text.

    python patients/first_token.py MODEL --texts wiki.jsonl,sotu.jsonl --out first_token.jsonl

The same documents are cut at each length. A row has, over all heads, the mean first-token mass, how
many heads are above 0.5, and the mean over the last bucket of queries (from half of the length on):
the mean over all queries counts the first ones, which have few other tokens to look at.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from headwise import diagnose, load_model, read_texts
from headwise.texts.batches import encode_for


def main() -> None:
    """Read the command line and append a row for every length, kind of text and first token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True, help="files, one a kind of text")
    parser.add_argument("--lengths", default="64,256,1024")
    parser.add_argument("--count", type=int, default=4, help="documents of each kind")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    lengths = [int(length) for length in asked.lengths.split(",")]
    for file in asked.texts.split(","):
        texts = list(read_texts([file]).texts)
        for length in lengths:
            long = [
                text
                for text in texts[: 40 * asked.count]
                if len(encode_for(loaded, [text], max_length=length)[0]) == length
            ][: asked.count]
            for bos in (True, False) if len(long) == asked.count else ():
                found = diagnose(loaded, long, max_length=length, bos=bos, batch_size=1)
                mass = np.array(found.maps["first_token_mass"])
                assert found.profile is not None
                late = np.array(found.profile.first_token_mass)[..., -1]
                row = {"model": Path(asked.model).stem, "kind": Path(file).stem}
                row |= {"length": length, "bos": bos, "heads": int(mass.size)}
                row |= {"mean": float(mass.mean()), "above": int((mass > 0.5).sum())}
                row |= {"late": float(late.mean())}
                with asked.out.open("a") as rows:
                    rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
