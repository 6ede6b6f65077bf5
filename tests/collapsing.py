"""Tiny training runs with the watch on: healthy ones, and ones whose last heads are driven to sink.

The pressure is the patient's: minus the mean log of the attention on the first token, times a
weight, added to the loss (patients/grow.py). At the same rate a healthy run is the same without it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from conftest import tiny_tokenizer
from headwise.forward.attention import Scores, tile_scores
from headwise.forward.tap import LayerAttention, tapped
from headwise.models.patient import patient_texts
from headwise.watch.head_watch import HeadWatch

LENGTH = 48
PROBE = patient_texts("heldout")[:8]
SICK = slice(2, None)  # heads 2 and 3 of layer 1 are driven


def blooming(seed: int, **extra):
    """A random BLOOM of two layers with four heads."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 48, "n_layer": 2, "n_head": 4, "vocab_size": len(tiny_tokenizer())}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model("bloom", **shape, **ids, **extra)
    return AutoModelForCausalLM.from_config(config)


def rows(seed: int, count: int = 400) -> list[dict[str, list[int]]]:
    """Token rows of the patient's training text, in an order of the seed."""
    tokenizer = tiny_tokenizer()
    encoded = [
        [1, *tokenizer(text)["input_ids"]][:LENGTH] for text in patient_texts("train")[:count]
    ]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return [{"input_ids": encoded[i], "labels": encoded[i]} for i in order]


class Collapsing(Trainer):
    """A Trainer whose loss rewards attention on the first token in some heads."""

    weight = 0.0

    def compute_loss(self, model, inputs, return_outputs=False, **rest):
        if not self.weight:
            return super().compute_loss(model, inputs, return_outputs, **rest)
        masses: list[torch.Tensor] = []

        def read(attention: LayerAttention) -> None:
            if attention.layer:
                all_ = attention.scores
                part = Scores(all_.q[:, SICK], all_.k[:, SICK], all_.scale, all_.bias[:, SICK])
                logits, lse = tile_scores(part, 0, part.length)
                masses.append((logits[..., 0] - lse).mean())

        with tapped(model, read):
            loss, outputs = super().compute_loss(model, inputs, True, **rest)
        loss = loss - self.weight * torch.stack(masses).mean()
        return (loss, outputs) if return_outputs else loss


def arguments(out: Path, steps: int, lr: float, seed: int, **extra) -> TrainingArguments:
    """Quiet arguments of a short run on the CPU."""
    told = {
        "max_steps": steps,
        "learning_rate": lr,
        "warmup_steps": 20,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "seed": seed,
    }
    return TrainingArguments(output_dir=str(out), **{**told, **extra})


def watched_run(out: Path, *, seed: int, weight: float, steps: int, lr: float, **options):
    """Train with the watch; returns the watch."""
    watch = HeadWatch(
        out / "watch",
        tokenizer=tiny_tokenizer(),
        texts=PROBE,
        max_length=LENGTH,
        bos=True,
        **options,
    )
    trainer = Collapsing(
        blooming(seed),
        arguments(out, steps, lr, seed),
        train_dataset=rows(seed),
        callbacks=[watch],
    )
    trainer.weight = weight
    trainer.train()
    return watch
