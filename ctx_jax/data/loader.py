"""Batches as global arrays, read ahead in the background."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ctx_jax.contract import Batch, Reader, TokenStore
from ctx_jax.data.preparation import cores

THREADS = min(max(2, cores()), 4)
"""Threads that read batches; batch n is the same, and comes after batch n - 1, whichever reads it. Reading mostly holds
the interpreter's lock and takes one core, `transform` takes as many as there are threads."""

AHEAD = THREADS + 1
"""Batches that are read, or being read, before they are asked for."""


@dataclass(frozen=True)
class Loader:
    """An iterable of global batches, from batch `start` on; each `iter()` starts anew.

    A host reads only the rows that its own devices hold, each once, whatever the mesh replicates; the result is the
    same on any number of hosts and devices. Reading, `transform` and the copy to the devices happen in threads; an
    error there is raised where the batch is asked for. Closing the iterator (or dropping it) ends them.

        with closing(iter(Loader(store, reader, 64, seed=0, sharding=sharding))) as batches:
            batch = next(batches)
    """

    store: TokenStore
    reader: Reader
    batch_size: int
    """Rows of the global batch."""
    seed: int | None
    """Orders endless training epochs; None = one pass in order."""
    sharding: jax.sharding.Sharding
    """How the rows are split: one that partitions the first axis alone, for arrays of any rank."""
    start: int = 0
    """The first batch: the number of finished steps, to resume."""
    transform: Callable[[Batch], Batch] | None = None
    """Applied to a host's rows in a thread, row by row independent: an objective's `prepare` where it runs in the
    loader."""

    def __post_init__(self) -> None:
        devices = self.sharding.num_devices
        parts = devices // self.sharding.shard_shape((devices,))[0]
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into the {parts} parts of the mesh's data axes: "
                f"choose a multiple of {parts}"
            )

    def __iter__(self) -> Generator[Batch]:
        if self.seed is None:
            numbers = iter(range(self.start, self.reader.passes(self.store, self.batch_size)))
        else:
            numbers = itertools.count(self.start)
        pool = ThreadPoolExecutor(THREADS, "loader")
        try:
            pending = deque(pool.submit(self._load, n) for n in itertools.islice(numbers, AHEAD))
            while pending:
                batch = pending.popleft().result()
                pending.extend(pool.submit(self._load, n) for n in itertools.islice(numbers, 1))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)

    def _load(self, n: int) -> Batch:
        every = np.arange(self.batch_size)
        mine = self.sharding.addressable_devices_indices_map(every.shape).values()
        rows = np.unique(np.concatenate([every[index] for index in mine]))
        batch = self.reader.batch(self.store, n, rows.tolist(), batch_size=self.batch_size, seed=self.seed)

        def globally(local: np.ndarray) -> jax.Array:
            def shard(index: Any) -> np.ndarray:
                start, stop, _ = index[0].indices(self.batch_size)
                first = np.searchsorted(rows, start)
                return local[first : first + stop - start]

            return jax.make_array_from_callback((self.batch_size, *local.shape[1:]), self.sharding, shard)

        # The one place where transfers are meant; a guard holds for the thread that sets it.
        with jax.transfer_guard("allow"):
            if self.transform is not None:
                batch = self.transform(batch)
            return {name: globally(np.asarray(value)) for name, value in batch.items()}
