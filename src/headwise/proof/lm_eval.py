"""lm-evaluation-harness tasks on a loaded (and perhaps patched) model; an optional extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from headwise.errors import HeadwiseError


def run_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    batch_size: int = 4,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Results of harness tasks: names of its own, or paths of task YAML files."""
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
            log_samples=False,
        )
    except (KeyError, ValueError, ConnectionError, OSError) as error:
        raise HeadwiseError(
            f"the harness could not run {', '.join(names)} ({str(error)[:200]})",
            fix="check the task names; offline, only tasks with local data can run",
        ) from None
    return {name: _numbers(result) for name, result in found["results"].items()}


def _numbers(result: Mapping[str, object]) -> dict[str, float]:
    return {key: float(value) for key, value in result.items() if isinstance(value, (int, float))}
