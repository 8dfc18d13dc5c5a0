"""Positions at another resolution: resized tables, and coordinates multiplied by a factor."""

import dataclasses
from typing import Literal, get_args

import pytest
import torch
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.model import ModelConfig
from lra.errors import UsageError
from lra.models.embedding import Embedding, Places
from lra.models.positions import (
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    axis_sizes,
    position_angles,
    resize_table,
    rotate,
    token_coordinates,
)

How = Literal["gridwise", "bilinear", "bicubic"]
INTERPOLATED: tuple[How, ...] = ("bilinear", "bicubic")


def ramp(height: int, width: int) -> torch.Tensor:
    """Row and column of each pixel's centre as shares of the image, `[H·W, 2]`."""
    rows, columns = ((torch.arange(n) + 0.5) / n for n in (height, width))
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1).flatten(0, 1)


def inside(table_ND: torch.Tensor, size: tuple[int, int], edge: int) -> torch.Tensor:
    return table_ND.unflatten(0, size)[edge : size[0] - edge, edge : size[1] - edge]


@pytest.mark.parametrize("how", INTERPOLATED)
@pytest.mark.parametrize(("old", "new"), [((32, 32), (64, 64)), ((32, 32), (48, 80)), ((64, 64), (32, 32))])
def test_a_ramp_stays_a_ramp_inside(how, old, new):
    """Away from the edges, where the kernel (two places to each side) misses what would be past them."""
    resized = resize_table(ramp(*old), old, new, how)
    edge = 2 * max(new[0] // old[0], new[1] // old[1], 1) + 1
    torch.testing.assert_close(inside(resized, new, edge), inside(ramp(*new), new, edge), atol=1e-5, rtol=0)


@pytest.mark.parametrize("how", get_args(How))
def test_a_constant_stays_constant_to_the_edge(how):
    table = torch.full((16, 3), 2.5)
    for new in ((8, 8), (2, 2), (4, 4)):
        torch.testing.assert_close(resize_table(table, (4, 4), new, how), torch.full((new[0] * new[1], 3), 2.5))


def test_gridwise_repeats_rows_and_columns():
    table = torch.randn(6, 5)
    resized = resize_table(table, (2, 3), (4, 9), "gridwise").unflatten(0, (4, 9))
    for row in range(4):
        for column in range(9):
            assert torch.equal(resized[row, column], table[row // 2 * 3 + column // 3])


def test_gridwise_and_back_is_the_same_table():
    table = torch.randn(32 * 32, 4)
    assert torch.equal(
        resize_table(resize_table(table, (32, 32), (64, 64), "gridwise"), (64, 64), (32, 32), "gridwise"), table
    )


@pytest.mark.parametrize("how", INTERPOLATED)
def test_interpolated_and_back_is_close_where_the_table_is_smooth(how):
    table = (2 * torch.pi * ramp(32, 32)).sin()
    back = resize_table(resize_table(table, (32, 32), (64, 64), how), (64, 64), (32, 32), how)
    error = (back - table).unflatten(0, (32, 32))
    assert error[2:-2, 2:-2].abs().max() < 0.01 and error.abs().max() < 0.1


def test_shrinking_is_antialiased():
    stripes = torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    for how in get_args(How):
        assert resize_table(stripes, (1, 64), (1, 16), how)[2:-2].abs().max() < 0.1


def test_a_sequence_is_a_grid_of_one_row():
    table = torch.arange(8.0)[:, None]
    torch.testing.assert_close(resize_table(table, (1, 8), (1, 16))[1:-1, 0].diff(), torch.full((13,), 0.5))


def test_gridwise_needs_integer_ratios():
    with pytest.raises(UsageError, match=r"gridwise needs integer ratios, not 32 to 48: use bilinear or bicubic"):
        resize_table(torch.zeros(32 * 32, 1), (32, 32), (48, 48), "gridwise")


def test_resizing_is_in_fp32():
    assert resize_table(torch.randn(4, 2, dtype=torch.float64), (2, 2), (4, 4)).dtype == torch.float32


@pytest.mark.parametrize("axes", [1, 2])
def test_a_factor_moves_a_coordinate_to_where_it_was(axes):
    """A pixel at twice the coordinate, at half the scale, has the position of before."""
    place = torch.arange(12).reshape(-1, axes)
    for computed in (SinusoidalPositions(16, axes), RotaryPositions(16, axes)):
        before = computed(place)
        assert torch.equal(computed.scale, torch.ones(axes))
        computed.scale.fill_(0.5)
        torch.testing.assert_close(computed(2 * place), before, atol=0, rtol=0)


def test_axes_have_factors_of_their_own():
    rotary = RotaryPositions(16, 2)
    rotary.scale.copy_(torch.tensor([0.5, 1.0]))
    cosines, plain = rotary(torch.tensor([[4, 4]]))[0], RotaryPositions(16, 2)
    assert torch.equal(cosines, plain(torch.tensor([[2, 4]]))[0])


def test_frequencies_are_those_of_the_papers():
    found = position_angles(torch.tensor([[3, 50]]), 16)  # of 8 pairs 4 for each axis
    expected = [place * 10000 ** (-pair / 4) for place in (3, 50) for pair in range(4)]
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_a_pair_turns_from_its_first_feature_to_its_second():
    """Feature p turns towards feature p + D/2, as released weights and the fused kernels have it."""
    cos, sin = RotaryPositions(4, 1)(torch.tensor([[1]]))
    (one, hundredth) = (torch.tensor(angle) for angle in (1.0, 0.01))
    turned = rotate(torch.eye(4)[:, None], cos.expand(4, 2), sin.expand(4, 2))[:, 0]
    expected = torch.tensor([
        [one.cos(), 0, one.sin(), 0],
        [0, hundredth.cos(), 0, hundredth.sin()],
        [-one.sin(), 0, one.cos(), 0],
        [0, -hundredth.sin(), 0, hundredth.cos()],
    ])  # fmt: skip
    torch.testing.assert_close(turned, expected)


def test_sinusoidal_positions_are_sines_then_cosines():
    found = SinusoidalPositions(4, 1)(torch.tensor([[3]]))
    angle = torch.tensor([3.0, 0.03])
    torch.testing.assert_close(found, torch.cat((angle.sin(), angle.cos()))[None])


def test_a_prefixed_token_shares_the_first_pixels_place():
    one = torch.ones(1, dtype=torch.int32)
    batch = Batch(torch.zeros(6), 0 * one, 6 * one, 6, one, one)
    rows_and_columns = [[0, 0], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    assert token_coordinates(batch, 2, 2, prefixed=True).tolist() == rows_and_columns
    assert token_coordinates(batch, 1, None, prefixed=True).tolist() == [[n] for n in range(6)]


def test_weights_without_a_factor_are_of_factor_one():
    for computed in (SinusoidalPositions(16, 2), RotaryPositions(16, 2)):
        computed.scale.fill_(0.5)
        computed.load_state_dict({})
        assert torch.equal(computed.scale, torch.ones(2))


def test_learned_positions_have_no_factor():
    assert set(LearnedPositions((4, 4), 8, 0.02).state_dict()) == {"tables.0", "tables.1"}


def test_learned_positions_begin_with_their_deviation_and_are_added():
    learned = LearnedPositions((300, 200), 16, 0.5)
    rows, columns = (table.detach() for table in learned.tables)
    assert [float(table.std()) for table in (rows, columns)] == pytest.approx([0.5, 0.5], rel=0.05)
    torch.testing.assert_close(learned(torch.tensor([[7, 9]])).detach(), (rows[7] + columns[9])[None])


def test_places_are_looked_up_where_rows_lie_in_their_order_alone():
    batch = ragged(False)
    place_TA = token_coordinates(batch, 1, None, False)
    one, two = LearnedPositions((9,), 4, 1.0), LearnedPositions((9, 9), 4, 1.0)
    places = one.places(place_TA, batch)
    assert (
        places is not None and places.table_ND is one.tables[0] and places.place_T.tolist() == place_TA[:, 0].tolist()
    )
    given = dataclasses.replace(batch, positions=place_TA[:, 0].flip(0))
    assert one.places(place_TA, given) is None and two.places(place_TA.expand(-1, 2), batch) is None


def test_a_table_has_a_row_for_each_place_of_its_axis():
    assert axis_sizes(1, 128, (8, 16)) == axis_sizes(1, 128, None) == (128,) and axis_sizes(2, 128, (8, 16)) == (8, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_is_turned_keeps_its_dtype_and_is_turned_in_fp32(dtype):
    x, angle = torch.randn(5, 2, 8).to(dtype), torch.randn(5, 4)
    turned = rotate(x, angle.cos(), angle.sin())
    assert turned.dtype == dtype and torch.equal(turned, rotate(x.float(), angle.cos(), angle.sin()).to(dtype))


LENGTHS = (5, 0, 9, 1, 4, 0)


def ragged(padded: bool) -> Batch:
    length = torch.tensor(LENGTHS, dtype=torch.int32)
    rows = 9 * len(LENGTHS) if padded else sum(LENGTHS)
    start = 9 * torch.arange(len(LENGTHS)) if padded else (length.cumsum(0) - length).clamp(max=rows - 1)
    tokens, index = (torch.zeros(n, dtype=torch.int32) for n in (rows, len(LENGTHS)))
    return Batch(tokens, start.int(), length, 9, index, index)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_of_places_are_summed_over_the_sequences(padded):
    batch = ragged(padded)
    place_T = token_coordinates(batch, 1, None, False)[:, 0]
    table, weights = torch.randn(11, 3, dtype=torch.float64), torch.randn(len(place_T), 3, dtype=torch.float64)
    weights *= (place_T < batch.per_row(batch.length))[:, None]  # no gradient past a length
    theirs = table.clone().requires_grad_()
    places = Places(table, place_T, batch.start, batch.length, batch.padded_length)
    (F.embedding(place_T, theirs) * weights).sum().backward()
    past_T = place_T >= batch.per_row(batch.length)
    assert past_T.any() == padded
    found = places.sums(weights.masked_fill(past_T[:, None], torch.nan))
    torch.testing.assert_close(found, theirs.grad)


def test_gradients_of_no_place_are_zeros():
    table, nothing = torch.randn(11, 3), torch.zeros(1, dtype=torch.int32)
    sums = Places(table, torch.zeros(0, dtype=torch.int64), nothing, nothing, 0).sums(torch.zeros(0, 3))
    assert sums.shape == table.shape and not sums.any()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(600,), (20, 30)])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_on_a_gpu_are_the_same_every_time(sizes, compiled):
    length = torch.randint(1, 600, (64,), dtype=torch.int32, device="cuda")
    start = (length.cumsum(0) - length).int()
    batch = Batch(length.new_zeros(int(length.sum())), start, length, 600, length, length)
    place_TA = token_coordinates(batch, len(sizes), sizes[-1], False)
    module = LearnedPositions(sizes, 32, 1.0).cuda()
    weights = torch.randn(len(place_TA), 32, device="cuda")
    embedding = Embedding(2, 32, device="cuda")

    def look(tokens, place_TA):
        places = module.places(place_TA, batch)
        return embedding(tokens, module(place_TA) if places is None else None, places=places)

    call = torch.compile(look) if compiled else look
    first, again = (
        torch.autograd.grad((call(batch.tokens, place_TA) * weights).sum(), [*module.tables]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    axes = zip(place_TA.unbind(1), module.tables, strict=True)
    wanted = [torch.zeros_like(table).index_add(0, place, weights) for place, table in axes]
    torch.testing.assert_close(list(first), wanted, rtol=1e-4, atol=1e-4)


def test_the_base_sets_how_slowly_the_slowest_pair_turns():
    fast, slow = (position_angles(torch.tensor([[100]]), 16, base)[0] for base in (100.0, 1e6))
    torch.testing.assert_close(fast, 100 * 100.0 ** (-torch.arange(8.0) / 8))
    assert fast[0] == slow[0] == 100 and (slow[1:] < fast[1:]).all()
    rotated = RotaryPositions(16, 1, 1e6)(torch.tensor([[100]]))[0]
    torch.testing.assert_close(rotated[0], slow.cos())


def turned_by_hand(
    x_THD: torch.Tensor, place_TA: torch.Tensor, base: float, share: float, bands: Literal["all", "heads"]
) -> torch.Tensor:
    """Each pair of each head as a complex number, times that of its angle, in float64."""
    (_, heads, dim), axes = x_THD.shape, place_TA.shape[1]
    pairs = dim // 2 // axes
    turned = round(share * pairs)
    exact = x_THD.double()
    out = exact.clone()
    for head in range(heads):
        for axis in range(axes):
            for pair in range(turned):
                rank, count = (head * turned + pair, heads * turned) if bands == "heads" else (pair, turned)
                angle = place_TA[:, axis].double() * float(base) ** (-rank / count)
                a, b = axis * pairs + pair, axis * pairs + pair + dim // 2
                number = torch.complex(exact[:, head, a], exact[:, head, b]) * torch.polar(
                    torch.ones_like(angle), angle
                )
                out[:, head, a], out[:, head, b] = number.real, number.imag
    return out


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("bands", ["all", "heads"])
def test_pairs_turn_by_their_frequencies_alone(axes, share, bands):
    """The frequencies of those that turn span the whole range, in each head or over all heads, on each axis."""
    config = ModelConfig(
        d_model=48, heads=3, positions="rotary", axes=axes, rotary_base=500.0, rotary_share=share, rotary_bands=bands
    )
    rotary = RotaryPositions(16, axes, 500.0, config.turned_pairs, 3 if bands == "heads" else 1)
    place_TA, x_THD = torch.randint(40, (7, axes)), torch.randn(7, 3, 16, requires_grad=True)
    cos, sin = rotary(place_TA)
    assert cos.shape == sin.shape == ((7, 3, 8) if bands == "heads" else (7, 8))
    found, wanted = rotate(x_THD, cos, sin), turned_by_hand(x_THD, place_TA, 500.0, share, bands)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(wanted, x_THD.double(), atol=0.1), "something turns"
    sums = torch.randn_like(found)
    gradients = [torch.autograd.grad((each * sums).sum(), x_THD)[0] for each in (found, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_share_leaves_the_other_pairs_as_they_are():
    rotary, place = RotaryPositions(16, 1, turned=2), torch.arange(1, 9)[:, None]
    cos, sin = rotary(place)
    assert torch.equal(cos[:, 2:], torch.ones(8, 6)) and not sin[:, 2:].any() and sin[:, :2].all()
    x = torch.randn(8, 2, 16)
    kept = [*range(2, 8), *range(10, 16)]
    assert torch.equal(rotate(x, cos, sin)[..., kept], x[..., kept])


def test_the_first_head_turns_fastest_and_the_last_slowest():
    cos, sin = RotaryPositions(8, 1, bands=4)(torch.tensor([[1]]))
    angle_P = torch.atan2(sin, cos).flatten()
    torch.testing.assert_close(angle_P, 10000.0 ** (-torch.arange(16.0) / 16))
