"""The ragged batch: padding and unpadding are inverse, positions count within the sequence."""

import dataclasses

import torch

from lra.batch import Batch


def batch(lengths: list[int], padded: bool) -> Batch:
    length = torch.tensor(lengths, dtype=torch.int32)
    longest = max(lengths)
    start = torch.arange(len(lengths), dtype=torch.int32) * longest if padded else (length.cumsum(0) - length).int()
    total = len(lengths) * longest if padded else sum(lengths)
    index = torch.arange(len(lengths), dtype=torch.int32)
    return Batch(
        torch.randint(0, 9, (total,)), start, length, longest, torch.zeros(len(lengths), dtype=torch.long), index
    )


def test_positions_count_within_each_sequence():
    assert batch([3, 0, 2], padded=False).token_positions().tolist() == [0, 1, 2, 0, 1]
    assert batch([3, 0, 2], padded=True).token_positions().tolist() == [0, 1, 2] * 3


def test_pad_puts_rows_in_their_sequence_and_zeros_past_it():
    packed = batch([3, 0, 2], padded=False)
    rows = torch.arange(1, 6)[:, None]
    assert packed.pad(rows)[:, :, 0].tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 0]]
    assert torch.equal(packed.unpad(packed.pad(rows)), rows)


def test_pad_of_a_padded_batch_is_a_view():
    padded = batch([3, 0, 2], padded=True)
    rows = torch.randn(9, 4)
    assert padded.pad(rows).data_ptr() == rows.data_ptr()
    assert torch.equal(padded.unpad(padded.pad(rows)), rows)


def test_to_padded_keeps_the_sequences():
    packed = batch([3, 0, 2], padded=False)
    padded = packed.to_padded()
    assert padded.padded and not packed.padded
    for b, length in enumerate(packed.length.tolist()):
        first, second = packed.start[b], padded.start[b]
        assert torch.equal(packed.tokens[first : first + length], padded.tokens[second : second + length])


def test_to_padded_keeps_given_positions():
    packed = dataclasses.replace(batch([3, 0, 2], padded=False), positions=torch.tensor([4, 6, 9, 1, 7]))
    positions = packed.to_padded().positions
    assert positions is not None and positions.tolist() == [4, 6, 9, 0, 0, 0, 1, 7, 0]


def test_mask_marks_real_tokens():
    assert batch([3, 0, 2], padded=True).mask().tolist() == [[True] * 3, [False] * 3, [True, True, False]]


def test_each_sequences_value_is_for_each_of_its_rows():
    values = torch.tensor([7, 8, 9])
    assert batch([3, 0, 2], padded=False).per_row(values).tolist() == [7, 7, 7, 9, 9]
    assert batch([3, 0, 2], padded=True).per_row(values).tolist() == [7, 7, 7, 8, 8, 8, 9, 9, 9]


def test_the_padded_layout_says_how_many_rows_a_sequence_owns():
    packed, padded = batch([3, 0, 2], padded=False), batch([3, 0, 2], padded=True)
    assert (packed.padded, packed.padded_length, padded.padded, padded.padded_length) == (False, 0, True, 3)
    assert batch([2, 2], padded=False).padded_length == 2, "both layouts at once"
    start = packed.to_padded().start
    assert start.dtype == torch.int32 and start.tolist() == [0, 3, 6]
    assert padded.to_padded() is padded


def test_a_batch_is_given_its_seed_and_is_else_the_same():
    one = batch([3, 0, 2], padded=False)
    seeded = one.with_seed(torch.tensor(5))
    assert one.seed is None and seeded.seed is not None and int(seeded.seed) == 5
    assert seeded.tokens is one.tokens and seeded.label is one.label


def test_padding_compiles_to_one_graph():
    rows = torch.randn(5, 4)
    again = torch.compile(lambda packed: packed.unpad(packed.pad(rows)), backend="eager", fullgraph=True)
    assert torch.equal(again(batch([3, 0, 2], padded=False)), rows)


def test_where_rows_lie_is_computed_once():
    packed = batch([3, 0, 2], padded=False)
    assert packed._slots is packed._slots


def test_what_was_read_under_inference_mode_can_be_trained_on():
    ragged = batch([5, 3], padded=False)
    x = torch.randn(8, 2, requires_grad=True)
    with torch.inference_mode():
        ragged.pad(x.detach())
    ragged.pad(x).sum().backward()
    assert x.grad is not None
