"""A batch as one vector, which one transfer sends."""

import itertools

import numpy as np
import pytest
import torch

from lra.data.collated import CollatedBatch
from lra.data.split import Split


def collated(count: int = 3, prefix: int | None = None, dtype: type = np.uint8, **options) -> CollatedBatch:
    lengths = np.arange(1, count + 1)
    offsets = np.concatenate([[0], lengths.cumsum()])
    split = Split.from_offsets(np.arange(offsets[-1], dtype=dtype), offsets, np.arange(count))
    return split.collate(np.arange(count), max_length=9, prefix=prefix, **options)


@pytest.mark.parametrize("count", [1, 3, 5, 17])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_every_part_begins_at_a_multiple_of_16_bytes(count, dtype):
    """Triton would compile a kernel anew for a pointer that does not."""
    batch = collated(count, dtype=dtype)
    places = batch._places
    assert all(place.start % 16 == 0 for place in places) and places[0].start == 0
    assert all(one.stop <= other.start < one.stop + 16 for one, other in itertools.pairwise(places))
    assert batch.nbytes == places[-1].stop == len(batch.pack())


def test_a_batch_is_unpacked_from_another_buffer_of_its_shape():
    one, other = collated(), collated()
    assert one.shape == other.shape == (6, 3, 3) and collated(4).shape != one.shape
    assert collated(multiple=8).shape == (8, 5, 9) and collated(layout="padded").shape == (27, 3, 9)
    buffer = torch.empty(one.nbytes, dtype=torch.uint8).copy_(other.pack())
    got, expected = one.unpack(buffer), one.to("cpu")
    for name in ("tokens", "start", "length", "label", "index"):
        assert torch.equal(getattr(got, name), getattr(expected, name))
    assert got.max_length == 3 and got.start.dtype == got.length.dtype == got.index.dtype == torch.int32


def test_what_fills_up_has_no_prefix():
    batch = collated(prefix=99, multiple=16)
    tokens = batch.to("cpu").tokens.tolist()
    assert batch.prefixed == 3 and tokens == [99, 0, 99, 1, 2, 99, 3, 4, 5, *[0] * 7]
