"""Put heads of a healthy model to sleep, or empty them: patients that `auto` was not made for.

    python patients/sleep.py MODEL --texts TEXTS.jsonl --heads L1H0,L2H4 --out asleep
    python patients/sleep.py MODEL --texts TEXTS.jsonl --heads L1H0,L2H4 --out empty --empty
    python patients/sleep.py MODEL --texts TEXTS.jsonl --heads L1H0,L2H4 --out erased --erase
    python patients/sleep.py MODEL --texts TEXTS.jsonl --heads L1H0,L2H4 --out pulled --pull

Only the queries of the chosen heads are trained, towards the first key, so everything that a head
could do is still there and the loss of the healthy model is known. With --pull nothing is trained:
every query gets the same push towards the first key, a rank-one addition. With --empty their
values and outputs decay to a hundredth afterwards: release finds nothing to wake, regrow does. With
--erase they become noise of that size: nothing is left.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from headwise import LoadedModel, diagnose, load_model, read_texts
from headwise.heads import Head, select_heads
from headwise.models.architectures import geometry_of
from headwise.models.slices import head_spans
from headwise.surgery.sink_directions import measure_directions
from headwise.texts.batches import batches, encode_for

LENGTH, ROWS, STEPS, RATE = 96, 6, 80, 1e-3
BLOCKS, PULLS, PULLED = 16, 12, 0.9  # texts, pushes at most, and the mass that is enough
ASLEEP = 0.05  # mean -ln of the first-token mass at which one may stop: a mass of 0.95


def main() -> None:
    """Read the command line and write a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pull", action="store_true")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--erase", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    loaded = load_model(asked.model)
    size = geometry_of(loaded.model)
    heads = select_heads(asked.heads, num_layers=size.num_layers, num_heads=size.num_heads)
    (pull if asked.pull else fall_asleep)(loaded, heads, list(read_texts([asked.texts]).texts))
    if asked.empty or asked.erase:
        decay(loaded, heads, noise=asked.erase)
    loaded.model.save_pretrained(asked.out)
    loaded.tokenizer.save_pretrained(asked.out)


def fall_asleep(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Train the heads' queries, and nothing else, to look at the first token."""
    model = loaded.model
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    masks = query_masks(loaded, heads)
    optimizer = torch.optim.Adam([p.requires_grad_(True) for p, _ in masks], lr=RATE)
    for step, ids in zip(range(STEPS), rows(loaded, texts), strict=False):
        attended = model(ids, output_attentions=True, use_cache=False).attentions
        masses = torch.stack([attended[h.layer][:, h.index, 2:, 0] for h in heads])
        loss = -masses.clamp_min(1e-9).log().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter, mask in masks:
            parameter.grad *= mask
        optimizer.step()
        print(f"step {step}: -ln mass {float(loss):.3f}")  # noqa: T201
        if float(loss) < ASLEEP:
            break


def pull(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Add the same vector to a head's queries until it looks at the first token, layer by layer."""
    model, tokens = loaded.model, encode_for(loaded, texts[:BLOCKS], max_length=LENGTH)
    blocks = list(batches(tokens, 4))
    for head in sorted(heads):
        found = measure_directions(model, blocks, [head.layer])[head.layer]
        gap = found.key_gap[head.index // geometry_of(model).group]
        inward = found.mean_input / found.mean_input.square().sum()
        spans = head_spans(model, head, "q")
        for amount in (0.5 * 1.5**at for at in range(PULLS)):
            for name, span in spans.items():
                push = amount * gap / gap.norm()
                if name.endswith("q_bias"):
                    span.of(model).data.add_(push)
                elif len(spans) == 1:  # no bias: rank one, along what is constant in the input
                    whole = torch.outer(push, inward)
                    span.of(model).data.add_(whole if span.axis == 0 else whole.T)
            mass = diagnose(loaded, texts[:BLOCKS], max_length=LENGTH).maps["first_token_mass"]
            if mass[head.layer][head.index] > PULLED:
                break
        print(f"{head}: first-token mass {mass[head.layer][head.index]:.3f}")  # noqa: T201


def query_masks(loaded: LoadedModel, heads: list[Head]) -> list[tuple[Tensor, Tensor]]:
    """The query weights of the heads' layers, and where the heads are in them."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for head in heads:
        for span in head_spans(loaded.model, head, "q").values():
            parameter = loaded.model.get_parameter(span.parameter)
            mask = found.setdefault(span.parameter, (parameter, torch.zeros_like(parameter)))[1]
            mask.narrow(span.axis, span.start, span.stop - span.start).fill_(1)
    return list(found.values())


def rows(loaded: LoadedModel, texts: list[str]) -> Iterator[Tensor]:
    """Batches of equal rows, over and over."""
    encoded = [ids for ids in encode_for(loaded, texts, max_length=LENGTH) if len(ids) == LENGTH]
    while True:
        for at in range(0, len(encoded) - ROWS + 1, ROWS):
            yield torch.tensor(encoded[at : at + ROWS])


def decay(loaded: LoadedModel, heads: list[Head], *, noise: bool = False) -> None:
    """Values and outputs to a hundredth, or to noise of that size."""
    with torch.no_grad():
        for head in heads:
            for span in (
                *head_spans(loaded.model, head, "v").values(),
                *head_spans(loaded.model, head, "o").values(),
            ):
                small = span.of(loaded.model).mul_(0.01)
                if noise:
                    small.copy_(torch.randn(small.shape) * small.std())


if __name__ == "__main__":
    main()
