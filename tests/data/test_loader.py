from __future__ import annotations

import gc
import threading
import time
from contextlib import closing

import jax
import numpy as np
import pytest

from ctx_jax.data.loader import AHEAD, THREADS, Loader
from ctx_jax.data.readers import Blocks, Lanes

DOCUMENTS = [[5, 7, 3], [4], [9, 2, 2, 6, 5], [1, 1], [8, 3, 4]] * 4


@pytest.fixture
def sharding():
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def loading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_gives_the_readers_batches_in_order(make_store, sharding):
    store, reader = make_store(DOCUMENTS), Blocks(8)
    with closing(iter(Loader(store, reader, 4, seed=3, sharding=sharding, start=5))) as batches:
        for n in range(5, 12):
            batch = next(batches)
            expected = reader.batch(store, n, range(4), batch_size=4, seed=3)
            assert batch.keys() == expected.keys()
            for name, value in batch.items():
                assert isinstance(value, jax.Array)
                assert value.dtype == expected[name].dtype
                np.testing.assert_array_equal(value, expected[name])
    assert not loading_threads()


def test_an_ordered_pass_ends(make_store, sharding):
    store, reader = make_store(DOCUMENTS), Lanes(8)
    loader = Loader(store, reader, 4, seed=None, sharding=sharding)
    assert len(list(loader)) == reader.passes(store, 4) == len(list(loader)) > 3
    assert list(Loader(store, reader, 4, seed=None, sharding=sharding, start=100)) == []
    assert not loading_threads()


def test_consumer_under_a_transfer_guard(make_store, sharding):
    """Nothing is copied to a device in the consumer's thread, and copies in the loader's are meant."""
    jax.config.update("jax_transfer_guard", "disallow")  # the flag is for all threads
    try:
        with closing(iter(Loader(make_store(DOCUMENTS), Blocks(8), 4, seed=0, sharding=sharding))) as batches:
            total = jax.jit(lambda batch: batch["tokens"].sum())(next(batches))
    finally:
        jax.config.update("jax_transfer_guard", "allow")
    assert total > 0


def test_transform_runs_in_the_thread(make_store, sharding):
    names = []

    def transform(batch):
        names.append(threading.current_thread().name)
        return batch | {"targets": jax.numpy.asarray(batch["tokens"]) + 1, "weights": np.ones((4, 8), np.float32)}

    with closing(iter(Loader(make_store(DOCUMENTS), Blocks(8), 4, 0, sharding, transform=transform))) as batches:
        batch = next(batches)
    assert names[0].startswith("loader")
    np.testing.assert_array_equal(batch["targets"], np.asarray(batch["tokens"]) + 1)
    assert batch["weights"].dtype == np.float32


def test_an_error_is_raised_where_its_batch_is_asked_for(make_store, sharding):
    store, reader = make_store(DOCUMENTS), Blocks(8)
    third = reader.batch(store, 2, range(4), batch_size=4, seed=0)["example"].tolist()

    def transform(batch):
        if batch["example"].tolist() == third:
            raise ValueError("no third batch")
        return batch

    batches = iter(Loader(store, reader, 4, 0, sharding, transform=transform))
    next(batches)
    next(batches)
    with pytest.raises(ValueError, match="no third batch"):
        next(batches)
    assert not loading_threads()


def test_order_holds_whichever_thread_is_faster(make_store, sharding):
    store, reader = make_store(DOCUMENTS), Blocks(8)
    expected = [reader.batch(store, n, [0], batch_size=4, seed=0)["example"].item() for n in range(12)]
    finished, others = [], threading.Event()

    def transform(batch):
        first = batch["example"][0].item()
        if first == expected[0]:
            assert others.wait(60)
        finished.append((first, threading.current_thread().name))
        if first == expected[1]:
            others.set()
        return batch

    with closing(iter(Loader(store, reader, 4, 0, sharding, transform=transform))) as batches:
        came = [next(batches)["example"][0].item() for _ in range(12)]
    assert came == expected
    assert finished[0][0] == expected[1]
    assert 2 <= len({name for _, name in finished}) <= THREADS


def test_reads_ahead_but_not_without_bound(make_store, sharding):
    calls = []
    loader = Loader(make_store(DOCUMENTS), Blocks(8), 4, 0, sharding, transform=lambda b: calls.append(1) or b)
    with closing(iter(loader)) as batches:
        next(batches)
        deadline = time.monotonic() + 60
        while len(calls) < AHEAD + 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(calls) == AHEAD + 1


def test_a_dropped_iterator_ends_its_thread(make_store, sharding):
    batches = iter(Loader(make_store(DOCUMENTS), Blocks(8), 4, 0, sharding))
    next(batches)
    assert loading_threads()
    del batches
    gc.collect()
    assert not loading_threads()
