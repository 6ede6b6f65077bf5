"""Make heads of a healthy model ill in a known way: patients that `auto` was not made for.

    python patients/sicken.py MODEL --disease second --heads L1H0,L2H4 --texts TEXTS.jsonl --out ill

The healthy model's loss is known, so the harm is, and the share of it that a treatment undoes. A
disease is one row of `DISEASES`. Heads fall asleep by training their queries (or keys) and nothing
else towards one position, so everything a head could do is still there; `pulled` trains nothing and
pushes every query towards the first key (rank one); `emptied` heads sleep, and their values and
outputs decay to a hundredth; `erased` ones become noise of that size; `collapsed` trains all
weights of the model against the entropy of the heads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
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
ASLEEP, HALF = 0.95, 0.7  # geometric mean of the mass on the sink at which training stops
PENALTY, COLLAPSE_STEPS, COLLAPSE_RATE = 1.0, 150, 3e-4  # of entropy in nats, all weights free

Disease = Callable[[LoadedModel, list[Head], list[str]], None]


def fall_asleep(*, role: str = "q", sink: int = 0, mass: float = ASLEEP) -> Disease:
    """Train one role's slices, and nothing else, until the heads look at position `sink`."""

    def sicken(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
        model = loaded.model
        model.set_attn_implementation("eager")
        model.requires_grad_(False)
        masks = slice_masks(loaded, heads, role)
        optimizer = torch.optim.Adam([p.requires_grad_(True) for p, _ in masks], lr=RATE)
        for step, ids in zip(range(STEPS), rows(loaded, texts), strict=False):
            attended = model(ids, output_attentions=True, use_cache=False).attentions
            masses = torch.stack([attended[h.layer][:, h.index, sink + 2 :, sink] for h in heads])
            loss = -masses.clamp_min(1e-9).log().mean()
            reached = float(torch.exp(-loss.detach()))
            print(f"step {step}: mass {reached:.3f} at position {sink}")  # noqa: T201
            if reached > mass:
                break
            optimizer.zero_grad()
            loss.backward()
            for parameter, mask in masks:
                parameter.grad *= mask
            optimizer.step()

    return sicken


def pull(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Add the same vector to a head's queries until it looks at the first token, layer by layer."""
    model, tokens = loaded.model, encode_for(loaded, texts[:BLOCKS], max_length=LENGTH)
    blocks = list(batches(tokens, 4))
    for head in sorted(heads):
        found = measure_directions(model, blocks, [head.layer])[head.layer]
        gap = found.key_gap[head.index]
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


def flatten(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """No query: every key that is seen gets the same weight (but for positions in the scores)."""
    for part in parts(loaded, heads, "q"):
        part.zero_()


def rotate(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Turn the values by a random rotation: the heads look where they did and write garbage."""
    generator = torch.Generator().manual_seed(0)
    for head in heads:
        size = geometry_of(loaded.model).head_dim
        turn = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
        for span in head_spans(loaded.model, head, "v").values():
            part = span.of(loaded.model).data
            rows_first = part if span.axis == 0 else part.T
            rows_first.copy_(turn @ rows_first)


def make_noise(scale: float) -> Disease:
    """Values and outputs become noise of `scale` times their size."""

    def sicken(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
        for part in parts(loaded, heads, "vo"):
            part.copy_(torch.randn(part.shape) * part.std() * scale)

    return sicken


def decay(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Values and outputs to a hundredth: release finds nothing to wake, regrow does."""
    for part in parts(loaded, heads, "vo"):
        part.mul_(0.01)


def collapse(loaded: LoadedModel, heads: list[Head], texts: list[str]) -> None:
    """Train the whole model on its text with a penalty on the entropy of the heads."""
    model = loaded.model
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.requires_grad_(True).parameters(), lr=COLLAPSE_RATE)
    for step, ids in zip(range(COLLAPSE_STEPS), rows(loaded, texts), strict=False):
        made = model(ids, labels=ids, output_attentions=True, use_cache=False)
        looks = torch.stack([made.attentions[h.layer][:, h.index, 2:] for h in heads])
        entropy = -(looks * looks.clamp_min(1e-9).log()).sum(-1).mean()  # entr has no slope at 0
        optimizer.zero_grad()
        (made.loss + PENALTY * entropy).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}: loss {made.loss.item():.3f}, entropy {entropy.item():.3f}")  # noqa: T201


DISEASES: dict[str, tuple[Disease, ...]] = {
    "asleep": (fall_asleep(),),
    "half": (fall_asleep(mass=HALF),),
    "keys": (fall_asleep(role="k"),),
    "second": (fall_asleep(sink=1),),
    "pulled": (pull,),
    "flat": (flatten,),
    "rotated": (rotate,),
    "noise": (make_noise(1.0),),
    "emptied": (fall_asleep(), decay),
    "erased": (fall_asleep(), make_noise(0.01)),
    "collapsed": (collapse,),
}


def main() -> None:
    """Read the command line and write a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--disease", choices=DISEASES, default="asleep")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    loaded = load_model(asked.model)
    size = geometry_of(loaded.model)
    heads = select_heads(asked.heads, num_layers=size.num_layers, num_heads=size.num_heads)
    sicken(loaded, heads, list(read_texts([asked.texts]).texts), asked.disease)
    loaded.model.save_pretrained(asked.out)
    loaded.tokenizer.save_pretrained(asked.out)


def sicken(loaded: LoadedModel, heads: list[Head], texts: list[str], disease: str) -> None:
    """Give the heads the disease, in place."""
    torch.manual_seed(0)
    for step in DISEASES[disease]:
        step(loaded, heads, texts)


def parts(loaded: LoadedModel, heads: list[Head], roles: str) -> Iterator[Tensor]:
    """The heads' slices of some roles, weights and biases, as they lie in the model."""
    for head in heads:
        for role in roles:
            for span in head_spans(loaded.model, head, role).values():
                yield span.of(loaded.model).data


def slice_masks(loaded: LoadedModel, heads: list[Head], role: str) -> list[tuple[Tensor, Tensor]]:
    """The weights of the heads' layers in one role, and where the heads are in them."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for head in heads:
        for span in head_spans(loaded.model, head, role).values():
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


if __name__ == "__main__":
    main()
