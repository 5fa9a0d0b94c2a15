"""Features of images: maps of one record at a time, with the invariances that they are there for."""

from __future__ import annotations

import pytest
import slow_features
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.data import features
from fedspa.data.adapters import from_arrays
from fedspa.data.dataset import Dataset, view
from fedspa.data.features import NAMES, transform
from fedspa.errors import DataError

GREY = [name for name in NAMES if not name.startswith("patches")]


def digit(slant: float = 0.0, size: float = 1.0, right: float = 0.0, down: float = 0.0) -> torch.Tensor:
    """Something like a 7, drawn smoothly so that shifts by part of a pixel make sense; background −0.4."""
    y, x = torch.meshgrid(torch.arange(28.0) - 13.5 - down, torch.arange(28.0) - 13.5 - right, indexing="ij")
    y, x = y / size, (x - slant * y) / size
    bar = torch.exp(-((y + 7) ** 2) / 3 - (x / 7) ** 8)
    leg = torch.exp(-((x - 6 + (y + 7) / 2) ** 2) / 3 - ((y - 0.5) / 8) ** 8)
    return (torch.maximum(bar, leg) - 0.4)[None, None]


@pytest.mark.parametrize("moved", [digit(slant=0.3), digit(slant=-0.2, size=1.15, down=1.5)])
def test_alignment_undoes_shift_slant_and_size(moved):
    plain = features.aligned(digit())
    before = (moved - digit()).norm()
    assert before > 3
    assert (features.aligned(moved) - plain).norm() < 0.25 * before


def test_alignment_reaches_the_standard():
    image = features.aligned(digit(slant=0.4, size=0.8, right=-2))[0, 0] + 0.4
    at = torch.arange(28.0) - 13.5
    mass = image.sum()
    x, y = (image.sum(0) * at).sum() / mass, (image.sum(1) * at).sum() / mass
    spread_x = ((image.sum(0) * (at - x) ** 2).sum() / mass).sqrt()
    spread_y = ((image.sum(1) * (at - y) ** 2).sum() / mass).sqrt()
    covariance = (image * (at - y)[:, None] * (at - x)[None]).sum() / mass
    assert max(abs(x), abs(y)) < 0.1
    assert spread_x / 28 == pytest.approx(features.SPREAD_X, rel=0.05)
    assert spread_y / 28 == pytest.approx(features.SPREAD_Y, rel=0.05)
    assert abs(covariance) < 0.5


@pytest.mark.parametrize(
    ("name", "shape"), [*((name, (1, 28, 28)) for name in GREY), ("orientations", (3, 32, 32)), (GREY[2], (1, 9, 9))]
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_records_features_are_its_own(name, shape, alone):
    """What costs no privacy: no record changes a bit of another's features, whatever the chunks and the places."""
    count = 5 if alone else features.CHUNK + 9
    images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))
    whole = transform(name, images, per_example=alone)
    assert len(whole) == count
    for gone in (2, count - 1):
        others = torch.arange(count) != gone
        assert torch.equal(transform(name, images[others], per_example=alone), whole[others])
    images[2] = float("nan")
    others = torch.arange(count) != 2
    assert torch.equal(transform(name, images, per_example=alone)[others], whole[others])


@pytest.mark.parametrize(("name", "shape"), [("aligned-orientations", (1, 28, 28)), ("orientations", (3, 32, 32))])
def test_chunks_change_features_by_rounding_only(name, shape):
    images = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(transform(name, images), transform(name, images, per_example=True), atol=1e-5)


@pytest.mark.parametrize(("shape", "width"), [((1, 28, 28), 392), ((3, 32, 32), 128 + 512 + 256 + 256 + 48)])
def test_orientations_have_norm_three_and_the_stated_width(shape, width):
    found = transform("orientations", torch.randn(5, *shape, generator=torch.Generator().manual_seed(2)))
    assert found.shape == (5, width)
    assert torch.allclose(found.norm(dim=1), torch.full((5,), features.NORM), atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 17, 21)])
def test_orientations_are_what_their_definition_says(shape):
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(4))
    slowly = [torch.from_numpy(slow_features.orientations(image.double().numpy())) for image in images]
    assert torch.allclose(transform("orientations", images).double(), torch.stack(slowly), atol=2e-5)


@settings(max_examples=25)
@given(st.floats(-100, 100), st.floats(0.1, 50))
def test_orientations_do_not_see_brightness_and_contrast(offset, factor):
    """Of one channel, up to rounding: added light vanishes in the gradient, a factor in the norm."""
    image = digit()
    seen, again = transform("orientations", image), transform("orientations", factor * image + offset)
    assert (seen - again).norm() < 0.02 * features.NORM + 1e-3 * abs(offset) / factor


def test_a_mirror_image_in_colour_is_the_same():
    image = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(transform("orientations", image), transform("orientations", image.flip(3)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("aligned", (3, 32, 32), "one channel"),
        ("orientations", (2, 32, 32), "1 or 3 channels"),
        ("orientations", (1, 7, 28), "at least 8 by 8"),
        ("patches", (3, 28, 28), "colour images of 32 by 32"),
    ],
)
def test_other_records_are_refused(name, shape, why):
    with pytest.raises(DataError, match=why):
        transform(name, torch.zeros(2, *shape))


# Held-out training records: away from the agents, in place of the test records.


def numbered(records: int) -> Dataset:
    """Every record says which one it is; test records are negative."""
    x = torch.arange(records, dtype=torch.float32).view(-1, 1)
    return from_arrays(x, torch.arange(records) % 2, -x - 1, torch.arange(records) % 2, name="numbered")


@given(st.integers(2, 60), st.floats(0.01, 0.99))
def test_training_records_go_to_one_side_each_and_test_records_to_none(records, share):
    count = round(share * records)
    if not 0 < count < records:
        with pytest.raises(DataError, match="holdout"):
            view(numbered(records), None, share)
        return
    seen = view(numbered(records), None, share)
    kept, out = seen.train_x.flatten().tolist(), seen.test_x.flatten().tolist()
    assert len(out) == count
    assert sorted(kept + out) == list(range(records))
    assert all(int(x) % 2 == y for x, y in zip(kept + out, seen.train_y.tolist() + seen.test_y.tolist()))


def test_the_held_out_records_are_always_the_same_and_not_the_first():
    first, again = (view(numbered(1000), None, 0.1).test_x.flatten().tolist() for _ in range(2))
    assert first == again
    assert 300 < sum(first) / len(first) < 700  # spread over the file; 5 standard deviations wide


def test_features_are_those_of_the_records():
    x = torch.rand(20, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    data = from_arrays(x, torch.arange(20) % 2, x[:4], torch.arange(4) % 2, name="images")
    seen = view(data, "orientations", 0.25)
    assert (len(seen.train_x), len(seen.test_x)) == (15, 5)
    alone = view(data, "orientations", 0.25, per_example=True)
    assert torch.allclose(alone.train_x, seen.train_x, atol=1e-6)
    every = {tuple(row.tolist()) for row in transform("orientations", x, per_example=True)}
    assert {tuple(row.tolist()) for row in torch.cat((alone.train_x, alone.test_x))} == every  # to the last bit
