"""Features of records: a function of each record alone, made once, whatever raises, however many there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from frozen_nets import TwoInputs, body, chain
from torch import Tensor, nn

from fedspa.data.dataset import grouped
from fedspa.errors import DataError
from fedspa.examples import Examples, Tree, zero_examples
from fedspa.learning import features
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.forward import modes
from fedspa.learning.tasks import Classification

LABEL = torch.zeros(1, dtype=torch.int64)


def made(module: nn.Module, x: Tree) -> Split:
    found = split(module, Examples(zero_examples(x), LABEL), Classification(3))
    assert isinstance(found, Split), found
    return found


def images(count: int = 12) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def counted(found: Split, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many examples each pass of the body has."""
    calls: Counter[int] = Counter()
    forward = type(found.body).forward

    def counting(self: nn.Module, *x: Tensor) -> object:
        calls[len(x[0])] += 1
        return forward(self, *x)

    monkeypatch.setattr(type(found.body), "forward", counting)
    return calls


def test_each_record_goes_through_the_body_once_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(chain(), images())
    calls = counted(found, monkeypatch)
    kept = Features(found, images(), strict=False)
    calls.clear()  # of a made-up record
    kept.of(torch.tensor([3, 1, 3]))
    assert calls == {1: 2}
    kept.of(torch.tensor([1, 5]))
    kept.of()
    kept.of()
    assert calls == {1: 12}


def test_features_are_the_same_bits_in_any_company_and_on_any_number_of_threads() -> None:
    x = images(40)
    found = made(chain(), x)
    whole = Features(found, x, strict=False).of()
    assert torch.equal(Features(found, x, strict=False, threads=3).of(), whole)
    # Of a view with other strides, in another order, one at a time.
    turned = x.flip(0).transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(Features(found, turned, strict=False).of().flip(0), whole)
    for row in (0, 17, 39):
        assert torch.equal(Features(found, x[row : row + 1], strict=False).of()[0], whole[row])


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_record_that_the_body_fails_on_has_no_features_and_changes_no_other(kind: type[BaseException]) -> None:
    x = images()
    x[4] = 1000.0
    whole = body()

    class Raising(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            if bool((x > 100).any()):
                raise kind("too large for me")
            return (whole(x),)

    found = made(chain(), x)
    raising = replace(found, body=Raising(), modes=modes(whole))
    kept = Features(raising, x, strict=False).of()
    assert kept[4].isnan().all()
    others = [row for row in range(12) if row != 4]
    assert torch.equal(kept[others], Features(raising, x[others], strict=False).of())
    with pytest.raises(DataError, match=r"the model fails on these records \(\w+: too large for me"):
        Features(raising, x, strict=True).of()


def test_a_word_that_the_body_does_not_know() -> None:
    x: Tree = {"input_ids": torch.arange(12).view(4, 3), "attention_mask": torch.ones(4, 3, dtype=torch.int64)}
    found = made(TwoInputs(), x)
    x["input_ids"][2, 1] = torch.iinfo(torch.int64).min
    kept = Features(found, x, strict=False).of()
    assert kept.isnan().all(dim=1).tolist() == [False, False, True, False]


def test_features_of_persons() -> None:
    x, y = images(9), torch.arange(9) % 3
    found = made(chain(), x)
    persons = grouped(x, y, np.array([0, 0, 0, 1, 2, 2, 2, 2, 2]), 3, np.arange(9, dtype=np.uint64))
    kept = Features(found, persons.x, strict=False, persons=True).of()
    alone = Features(found, x, strict=False).of()
    assert kept["count"].tolist() == [3, 1, 3]
    expected = torch.stack([alone[[0, 1, 2]], alone[[3, 3, 3]], alone[[4, 5, 6]]])
    assert torch.equal(kept["records"], expected)


def test_many_features_lie_in_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    x = images()
    found = made(chain(), x)
    in_memory = Features(found, x, strict=False).of()
    monkeypatch.setattr(features, "MEMORY", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    on_disk = Features(found, x, strict=False)
    assert torch.equal(on_disk.of(), in_memory)
    assert not any(tmp_path.iterdir())
    assert features.space_lacking(found, 12) is None
    said = features.space_lacking(found, 2**50)
    assert said is not None
    assert "TMPDIR" in said


def test_batches_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the last one is filled up, and what fails in a batch is taken record by record."""
    x: Tree = {"input_ids": torch.arange(21).view(7, 3) % 20, "attention_mask": torch.ones(7, 3, dtype=torch.int64)}
    found = made(TwoInputs(), x)
    alone = Features(found, x, strict=False).of()
    calls = counted(found, monkeypatch)
    kept = Features(found, x, strict=False, per_example=False)
    kept._batch = 4
    calls.clear()
    torch.testing.assert_close(kept.of(), alone)
    assert calls == {4: 2}
    x["input_ids"][2, 1] = 99
    spoilt = Features(found, x, strict=False, per_example=False)
    spoilt._batch = 4
    calls.clear()
    assert spoilt.of().isnan().any(dim=1).tolist() == [row == 2 for row in range(7)]
    assert calls == {4: 2, 1: 4}


def test_a_body_that_fails_for_every_record_is_an_error() -> None:
    """Otherwise each would count as zero, and nobody would know."""
    found = made(chain(), images())
    found.body.double()
    with pytest.raises(RuntimeError):
        Features(found, images(), strict=False)
