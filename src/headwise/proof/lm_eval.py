"""lm-evaluation-harness tasks on a loaded (and perhaps patched) model; an optional extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.intervals import Interval, paired_interval

if TYPE_CHECKING:  # `compare` pairs scores without torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Items = dict[str, dict[str, tuple[float, ...]]]  # task -> metric -> a score for every item


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int = 4,
    limit: int | None = None,
) -> tuple[dict[str, dict[str, float]], Items]:
    """Scores of harness tasks (names of its own, or paths of task YAML files), and of each item."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise HeadwiseError(
            "--tasks needs lm-evaluation-harness", fix="pip install 'headwise[lm-eval]'"
        ) from None
    folders = sorted({str(Path(task).parent) for task in tasks if task.endswith(".yaml")})
    names = [Path(task).stem if task.endswith(".yaml") else task for task in tasks]
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    named = any(not task.endswith(".yaml") for task in tasks)  # its own index takes long to read
    manager = TaskManager(include_path=folders or None, include_defaults=named)
    try:
        found = simple_evaluate(
            wrapped,
            tasks=names,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=True,
        )
    except (KeyError, ValueError, ConnectionError, OSError) as error:
        raise HeadwiseError(
            f"the harness could not run {', '.join(names)} ({str(error)[:200]})",
            fix="check the task names; offline, only tasks with local data can run",
        ) from None
    scores = {name: _numbers(result) for name, result in found["results"].items()}
    items = {name: _item_scores(samples) for name, samples in found["samples"].items()}
    return scores, items


def _numbers(result: Mapping[str, object]) -> dict[str, float]:
    return {key: float(value) for key, value in result.items() if isinstance(value, (int, float))}


def _item_scores(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Each metric's score of every item, in the order of the data; only plain numbers."""
    rows: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda one: int(one["doc_id"])):
        for metric in sample["metrics"]:
            if isinstance(sample[metric], (int, float)):
                rows.setdefault(f"{metric},{sample['filter']}", []).append(float(sample[metric]))
    return {name: tuple(values) for name, values in rows.items()}


def paired_tasks(
    before: Mapping[str, Mapping[str, Sequence[float]]],
    after: Mapping[str, Mapping[str, Sequence[float]]],
    seed: int,
) -> dict[str, dict[str, Interval]]:
    """Mean score after minus before, item by item: the same questions were asked both times.

    The harness's own comparison takes the two runs for independent, which hides small changes.
    """
    changes: dict[str, dict[str, Interval]] = {}
    for task in sorted(before.keys() & after.keys()):
        for metric in sorted(before[task].keys() & after[task].keys()):
            old, new = (np.array(side[task][metric]) for side in (before, after))
            if len(old) == len(new):
                change = paired_interval(new - old, np.ones(len(old)), seed=seed)
                changes.setdefault(task, {})[metric] = change
    return changes
