"""The loader over eight devices: what one device would get, each row read once."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ctx_jax.contract import TokenStore, Vocabulary
from ctx_jax.data.loader import Loader
from ctx_jax.data.readers import Blocks


def store() -> TokenStore:
    tokens = np.arange(7, 507, dtype=np.uint16)
    tokens[0], tokens[-1] = 2, 3
    return cast(
        TokenStore,
        SimpleNamespace(
            vocabulary=Vocabulary(size=507, pad=0, unknown=1, begin=2, end=3, classification=4, separator=5, mask=6),
            tokens=tokens,
            flags=np.ones(500, np.uint8),
            offsets=np.array([0, 500]),
            document_bytes=np.array([500]),
        ),
    )


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_rows_are_split_over_data_and_fsdp_and_read_once(shape):
    mesh = jax.make_mesh(shape, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    read = []

    class Recorder(Blocks):
        def batch(self, store, n, rows, **options):
            read.append(list(rows))
            return super().batch(store, n, rows, **options)

    reader = Recorder(16)
    with closing(iter(Loader(store(), reader, 8, seed=0, sharding=sharding))) as batches:
        for n in range(3):
            batch = next(batches)
            expected = Blocks(16).batch(store(), n, range(8), batch_size=8, seed=0)
            for name, value in batch.items():
                np.testing.assert_array_equal(value, expected[name])
                assert value.sharding.is_equivalent_to(sharding, value.ndim)
                assert value.addressable_shards[0].data.shape[0] == 8 // (shape[0] * shape[1])
    assert read[0] == list(range(8))


def test_batch_that_does_not_divide():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    with pytest.raises(
        ValueError, match="batch_size 6 does not divide into the 4 parts of the mesh's data axes: choose"
    ):
        Loader(store(), Blocks(16), 6, seed=0, sharding=sharding)
