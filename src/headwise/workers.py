"""Work spread over processes or a Dask cluster; only the process that asked for it writes tables.

`spread` is one pool: quick items, and a lost process ends the work. `apart` is for long items that
save themselves as they go: each has a process of its own, and one that is lost is started again
while the others go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

import joblib
from joblib.externals.loky import ProcessPoolExecutor

from headwise.errors import HeadwiseError, SettingsError, reported_as
from headwise.keywords import Backend

Item = TypeVar("Item")
OneItem = TypeVar("OneItem", bound=Hashable)
Result = TypeVar("Result")
Running = Mapping["Future[Any]", "tuple[ProcessPoolExecutor, Any]"]

_PARENT_SECONDS = 0.5  # between a worker's looks at its parent
_MOST_LOSSES = 3  # of one item: then it is the item that kills, as Dask's scheduler counts too


def spread(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int,
    backend: Backend = "joblib",
    scheduler: str | None = None,
) -> Iterator[Result]:
    """`function` of every item, in the order they finish; BrokenProcessPool if a process is lost.

    One worker is also a process of its own: BLAS splits sums differently over several threads, and
    only a fresh process can be held to one. A Dask scheduler gives a lost worker's items to others.
    """
    dask = backend == "dask"
    # With one worker, one item is under way at a time although loky keeps two processes.
    place = _dask(scheduler) if dask else _processes(max(workers, 2))
    with place:
        parallel = joblib.Parallel(
            return_as="generator_unordered", pre_dispatch="all" if dask else workers, batch_size=1
        )
        yield from parallel(joblib.delayed(function)(item) for item in items)


def _processes(count: int) -> Any:
    return joblib.parallel_config(
        backend="loky",
        n_jobs=count,
        inner_max_num_threads=1,
        initializer=_end_with,
        initargs=(os.getpid(),),
    )


def require_scheduler(backend: Backend, scheduler: str | None) -> None:
    """Refuse a cluster that has no address, before any work is done."""
    if backend == "dask" and scheduler is None:
        raise SettingsError(
            "the dask backend needs a scheduler", fix="give --scheduler tcp://HOST:PORT"
        )


def _dask(scheduler: str | None) -> Any:
    require_scheduler("dask", scheduler)
    what = f"cannot use the Dask scheduler {scheduler}"
    fix = "pip install 'headwise[cluster]', and check the address"
    with reported_as(SettingsError, what, ImportError, ValueError, OSError, fix=fix):
        return joblib.parallel_config(backend="dask", scheduler_host=scheduler)


def _end_with(parent: int) -> None:
    """Let a worker end when the process that started it has been killed.

    It is given its parent's number: one whose parent died while it started has another.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def apart(
    function: Callable[[OneItem], Result],
    items: Sequence[OneItem],
    *,
    workers: int,
    lost: Callable[[OneItem], None],
) -> Iterator[Result]:
    """`function` of every item, each worker a pool of one; `lost` gets an item that starts anew.

    In a common pool one killed process takes the others with it. Ctrl-C and SIGTERM reach the
    workers through this process: each ends at its next safe point, a second one does not wait.
    """
    waiting, losses = deque(items), dict.fromkeys(items, 0)
    pools: list[ProcessPoolExecutor] = []
    running: dict[Future[Result], tuple[ProcessPoolExecutor, OneItem]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                busy = [pool for pool, _ in running.values()]
                pool = next((one for one in pools if one not in busy), None)
                if pool is None:
                    pool = ProcessPoolExecutor(1, initializer=_begin, initargs=(os.getpid(),))
                    pools.append(pool)
                item = waiting.popleft()
                running[pool.submit(function, item)] = (pool, item)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                pool, item = running.pop(future)
                # a SIGTERM to one worker alone stops it as Ctrl-C does
                if not isinstance(future.exception(), (BrokenProcessPool, KeyboardInterrupt)):
                    yield future.result()
                    continue
                pools.remove(pool)
                pool.shutdown(kill_workers=True)
                losses[item] += 1
                if losses[item] >= _MOST_LOSSES:
                    raise HeadwiseError(
                        f"the worker process was lost {losses[item]} times, most likely for want "
                        "of memory",
                        where=item,
                        fix="start again with fewer --workers; what was saved is kept",
                    )
                lost(item)
                waiting.appendleft(item)
    finally:
        _stop(running, pools)


def _begin(parent: int) -> None:
    """Of a worker: out of the terminal's process group, so that Ctrl-C comes once, from above."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _end_with(parent)


def _stop(running: Running, pools: Sequence[ProcessPoolExecutor]) -> None:
    """End all workers: those at work are asked first and may save what they have."""
    try:
        for pool, _ in running.values():
            for process in list(pool._processes or ()):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
        wait(running)
    finally:
        for pool in pools:
            pool.shutdown(kill_workers=True)
