"""Small patterns, whitened: maps of one record at a time, with constants that no record has a part in."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import pytest
import slow_patches
import torch

from fedspa.data import features, leaves, patches
from fedspa.data.features import transform
from fedspa.data.patches import BANKS

FEW = 150


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """Fewer for the constants, which then take a second or two."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "PICTURES", FEW)
        forget()
        yield
    forget()


def forget() -> None:
    patches.constants.cache_clear()
    patches._pictures.cache_clear()


@functools.cache
def photographs() -> torch.Tensor:
    """Five, and not among those that the constants are from, which come first."""
    drawn = leaves.pictures(FEW + 5)[FEW:]
    return (torch.from_numpy(drawn).to(torch.float32) / 255 - 0.5) * 4


@pytest.mark.parametrize("alone", [False, True])
def test_a_records_features_are_its_own(alone):
    """What costs no privacy: no record changes a bit of another's features, whatever the chunks and the places."""
    count = features.CHUNK + 9
    images = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    whole = transform("patches", images, alone=alone)
    assert len(whole) == count
    for gone in (0, 7, count - 1):
        others = torch.arange(count) != gone
        assert torch.equal(transform("patches", images[others], alone=alone), whole[others])
    images[7] = float("nan")
    others = torch.arange(count) != 7
    assert torch.equal(transform("patches", images, alone=alone)[others], whole[others])


def test_chunks_change_features_by_rounding_only():
    images = photographs()
    assert torch.allclose(transform("patches", images), transform("patches", images, alone=True), atol=1e-5)


def test_they_have_norm_three_and_the_stated_width():
    found = transform("patches", photographs())
    assert found.shape == (5, 128 * 9 + 128 * 4)
    assert torch.allclose(found.norm(dim=1), torch.full((5,), features.NORM), atol=1e-4)


def test_they_are_what_their_definition_says():
    images = photographs()[:2]
    slowly = [torch.from_numpy(slow_patches.patches(image.double().numpy())) for image in images]
    assert torch.allclose(transform("patches", images).double(), torch.stack(slowly), atol=2e-4)


def test_a_mirror_image_is_the_same():
    images = photographs()[:2]
    assert torch.allclose(transform("patches", images), transform("patches", images.flip(3)), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, -0.4242, 2.8])
def test_a_blank_image_has_finite_features(value):
    assert transform("patches", torch.full((2, 3, 32, 32), value)).isfinite().all()


@pytest.mark.parametrize("bank", BANKS, ids=lambda bank: bank.source.__name__)
def test_whitening_leaves_no_direction_more_than_its_share(bank):
    """Of the pictures that it comes from: λ / (λ + ridge) < 1 in each direction, and near 1 in the largest."""
    made = patches.constants(bank)
    pictures = patches._pictures().float()
    found = (patches._likeness(bank, made.patterns, made.offsets, pictures) - made.means).flatten(1)
    before, after = (torch.linalg.eigvalsh(each.T @ each / len(each)) for each in (found, found @ made.whitening.T))
    assert before[-1] / before[-20] > 10
    assert 0.9 < after[-1] < 1.01
    assert after[-1] / after[-20] < 3


@pytest.mark.parametrize("bank", BANKS, ids=lambda bank: bank.source.__name__)
def test_patterns_do_not_see_a_patchs_mean(bank):
    """It is not subtracted: they must be blind to it, but for the rounding of their values."""
    patterns = patches.constants(bank).patterns
    assert patterns.mean(dim=(1, 2, 3)).abs().max() < 1e-6
    assert patterns.flatten(1).norm(dim=1).min() > 0.5


def test_constants_are_the_same_again_on_other_threads():
    before = [patches.constants(bank) for bank in BANKS]
    forget()
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        again = [patches.constants(bank) for bank in BANKS]
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(before, again):
        for name in ("patterns", "offsets", "means", "whitening"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_the_pictures_are_always_the_same():
    """What agents upload means something only if all of them map by the same constants."""
    drawn = leaves.pictures(3)
    assert drawn.shape == (3, 3, 32, 32)
    digest = hashlib.sha256(drawn.tobytes()).hexdigest()
    assert digest == "3ce73f5f0f7bf3215083490affc793f61cfb390e3e71ad3c0e6a418cce60466f"


def test_the_pictures_have_the_scale_of_photographs():
    drawn = leaves.pictures(60) / 255
    assert abs(drawn.mean() - 0.5) < 0.05
    assert 0.15 < drawn.std() < 0.3
    apart = abs(drawn[..., 1:] - drawn[..., :-1]).mean()
    assert 0.03 < apart < 0.1
