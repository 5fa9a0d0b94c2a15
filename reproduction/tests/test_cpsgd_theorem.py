"""cpSGD's published theorem: by hand, and its condition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedspa.algorithms.cpsgd.plan import BinomialEvent
from reproduction.cpsgd_theorem import Sensitivity, published_epsilon, published_sensitivity, published_shift_epsilon

EVENT = BinomialEvent(batch=10, records=600, steps=1, dimension=100, bits=2, trials=10_000)
DELTA = 1e-5
MNIST = replace(EVENT, dimension=21_840, bits=1, trials=7130)


def test_sensitivities_by_hand() -> None:
    # r = √100·3/10 = 3; ln(2/δ) = 12.2061; 30 + 27.0622 + 4/3·12.2061 = 73.3370; 3 + √(73.3370 + 27.0622); k + 1 = 5
    assert published_sensitivity(EVENT, DELTA) == pytest.approx((73.3370, 13.0199, 5), abs=1e-4)


def test_one_release_by_hand() -> None:
    # v = 2,500 ≥ max(23·ln(10·100/1e-5) = 423.7, 2)
    # 8.0746·√(2·ln(125,000)/2500) = 8.0746·√(2·11.73607/2500) = 0.78240
    # (8.0746·1.75·√(2·ln 10⁶) + 65.1996/3)/(2500·(1 − 10⁻⁶)) = (8.0746·1.75·5.25652 + 21.7332)/2500 = 0.03841
    # 1·⅔·(11.73607 + ln(2·10⁸)·ln 10⁶)/2500 = ⅔·(11.73607 + 19.11383·13.81551)/2500 = 0.07355
    found = published_shift_epsilon(EVENT, Sensitivity(65.1996, 8.0746, 1), DELTA)
    assert found == pytest.approx(0.78240 + 0.03841 + 0.07355, abs=1e-4)


def test_the_papers_setting_and_the_condition() -> None:
    assert published_epsilon(MNIST, 45, 1e-3) == pytest.approx(132.0, abs=0.1)
    # 23·ln(10·21840/δ_step)·4 trials at the least.
    assert published_epsilon(replace(MNIST, trials=1700), 45, 1e-3) == math.inf
    assert published_epsilon(replace(MNIST, trials=1900), 45, 1e-3) < math.inf
