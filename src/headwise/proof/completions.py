"""Completions side by side: the same prompts, the same random numbers, several conditions.

Each prompt has its own generator, seeded by a stable hash of seed and prompt (Python's `hash` is
salted per process and would not reproduce).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from headwise.artefacts import content_hash
from headwise.errors import SettingsError
from headwise.models.architectures import architecture_of, device_of
from headwise.models.loaded_model import LoadedModel, takes_model
from headwise.models.patch import Patch, applied
from headwise.progress import Progress, silent, track
from headwise.proof.completed_texts import (
    Completion,
    CompletionProvenance,
    Completions,
    Prompt,
    bundled_prompts,
    measure_text,
    prompts_hash,
)
from headwise.proof.settings import Sampling
from headwise.provenance import STOCK
from headwise.texts.batches import require_embedded, token_ids


@takes_model
def complete(
    loaded: LoadedModel,
    prompts: Sequence[Prompt] | None = None,
    sampling: Sampling | None = None,
    *,
    patches: Mapping[str, Sequence[Patch | Path]] | Sequence[Path] = (),
    batch_size: int = 10,
    bos: bool | None = None,
    progress: Progress = silent,
) -> Completions:
    """Complete prompts (default: the bundled ones) with the stock model and with patches.

    `patches` names conditions and what each applies, in order; paths alone are a condition each,
    called by its run directory. The model is left as it was.
    """
    conditioned = patches if isinstance(patches, Mapping) else _by_run(patches)
    named = {name: _read(files) for name, files in {"stock": (), **conditioned}.items()}
    trained = [(patch.info.bos, "the patch") for read in named.values() for patch in read]
    loaded = loaded.reading(bos, *trained, progress=progress)
    chosen = bundled_prompts() if prompts is None else list(prompts)
    how = sampling or Sampling()
    provenance = CompletionProvenance(
        prompts_hash(chosen),
        model=loaded.describe(),
        bos=loaded.bos,
        patches={name: read[-1].fingerprint() if read else STOCK for name, read in named.items()},
    )
    conditions: dict[str, list[Completion]] = {}
    for name, read in named.items():
        with applied(loaded.model, read):
            conditions[name] = complete_prompts(
                loaded, chosen, how, batch_size=batch_size, progress=progress
            )
    return Completions(conditions, how, provenance)


def _by_run(paths: Sequence[Path]) -> dict[str, list[Path]]:
    names = [path.parent.name or path.stem for path in paths]
    if len({"stock", *names}) < len(names) + 1:
        raise SettingsError(
            f"conditions need different names, these are {', '.join(names)}",
            fix="give the run directories names of their own",
        )
    return {name: [path] for name, path in zip(names, paths, strict=True)}


def _read(patches: Sequence[Patch | Path]) -> list[Patch]:
    return [Patch.load(one) if isinstance(one, Path) else one for one in patches]


def complete_prompts(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int = 10,
    progress: Progress = silent,
) -> list[Completion]:
    """One completion per prompt, by the model as it is."""
    rows: list[Completion] = []
    starts = list(range(0, len(prompts), batch_size))
    for start in track(starts, "completing", progress):
        part = prompts[start : start + batch_size]
        texts = _sample(loaded, part, sampling)
        for prompt, text in zip(part, texts, strict=True):
            measures = measure_text(text, prompt)
            rows.append(Completion(prompt.text, prompt.category, text, measures))
    return rows


def prompt_seed(prompt: str, seed: int) -> int:
    """A stable seed: the same on every machine and in every process."""
    return int(content_hash([str(seed), prompt])[:15], 16)


@torch.inference_mode()
def _sample(loaded: LoadedModel, prompts: Sequence[Prompt], sampling: Sampling) -> list[str]:
    model, tokenizer, device = loaded.model, loaded.tokenizer, device_of(loaded.model)
    encoded = [token_ids(tokenizer, p.text, loaded.bos) for p in prompts]
    require_embedded(loaded, encoded)
    eos = tokenizer.eos_token_id
    encoded = [e[:-1] if len(e) > 1 and e[-1] == eos else e for e in encoded]
    ids, mask = _left_padded(encoded, device)
    generators = [
        torch.Generator().manual_seed(prompt_seed(p.text, sampling.seed)) for p in prompts
    ]
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache, cached, produced = None, True, [[] for _ in prompts]  # type: ignore[var-annotated]
    for _ in range(sampling.new_tokens):
        options = _position_options(model, positions)
        output = model(
            input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=cached, **options
        )
        cache = getattr(output, "past_key_values", None)
        cached = cache is not None  # recurrent_gemma gives none: each step reads the whole text
        chosen = _draw(output.logits[:, -1].float().cpu(), sampling, generators)
        for row, token in enumerate(chosen.tolist()):
            if not (produced[row] and produced[row][-1] == eos):
                produced[row].append(token)
        if all(tokens and tokens[-1] == eos for tokens in produced):
            break
        last, following = chosen.to(device)[:, None], positions[:, -1:] + 1
        ids = last if cached else torch.cat([ids, last], 1)
        positions = following if cached else torch.cat([positions, following], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return [str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in produced]


def _position_options(model: PreTrainedModel, positions: Tensor) -> dict[str, Tensor]:
    """Some families derive positions from the mask and take no position ids."""
    return {"position_ids": positions} if architecture_of(model).takes_position_ids else {}


def _left_padded(encoded: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, encoded))
    ids = torch.zeros(len(encoded), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(encoded):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    return ids.to(device), mask.to(device)


def _draw(
    logits: Float[Tensor, "row token"], sampling: Sampling, generators: list[torch.Generator]
) -> Int[Tensor, "row"]:
    """One token a row by nucleus sampling; temperature 0 is greedy."""
    if sampling.temperature <= 0:
        return logits.argmax(-1)
    p, order = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0.0)
    picks = [torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)]
    return order.gather(1, torch.stack(picks)).squeeze(1)
