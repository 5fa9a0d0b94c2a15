"""What the native engine and its library refuse, and how they say so."""

from __future__ import annotations

import platform
import shutil
import subprocess
from ctypes import c_int64
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_nets import small_net, small_task
from plain import plain, unprotected
from torch import nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library, supports
from fedspa.errors import ConfigError, DataError, PrivacyError
from fedspa.learning.flat import FlatModel

pytestmark = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Sigmoid(), nn.Linear(8, 2)), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(1, 4, 3, dilation=2), nn.Flatten(), nn.Linear(256, 2)), "dilation"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(36, 2)), "ceil_mode"),
        (nn.Sequential(nn.MaxPool2d(2, 1, padding=2), nn.Flatten(), nn.Linear(225, 2)), "half of its kernel"),
        (nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)), "not behind a Conv2d"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), *2 * [nn.MaxPool2d(2)], nn.Flatten(), nn.Linear(18, 2)), "not behind"),
        (nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 2)), "AvgPool2d"),
        (nn.Sequential(nn.MaxPool2d(2, 1, padding=-1), nn.Flatten(), nn.Linear(81, 2)), "negative"),
        (nn.Sequential(nn.Conv2d(1, 2, 3, padding=(0, -1)), nn.Flatten(), nn.Linear(160, 2)), "negative padding"),
        (nn.Sequential(nn.Flatten(), nn.Linear(100, 2)), "does not fit"),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), "score"),
        (nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(144, 2)), "buffers"),
    ],
)
def test_what_it_cannot_do_is_said(module: nn.Module, word: str) -> None:
    assert word in str(supports(module, (1, 12, 12)))


@pytest.mark.parametrize("kind", [library.CONV, library.MAXPOOL])
@pytest.mark.parametrize("change", [{}, {"pad_h": 2}, {"pad_w": -1}, {"stride_h": 0}, {"kernel_w": 0}])
def test_the_library_itself_refuses_windows_outside_the_image(kind: int, change: dict[str, int]) -> None:
    loaded = library.library()
    window = {"kernel_h": 2, "kernel_w": 2, "stride_h": 1, "stride_w": 1, "pad_h": 1, "pad_w": 1} | change
    plain = {name: int(name[:3] not in ("pad",)) for name in window}
    before = library.Layer(kind=library.CONV, outputs=1, weight_offset=0, bias_offset=-1, **plain)
    tried = library.Layer(kind=kind, outputs=1, weight_offset=1, bias_offset=-1, **window)
    last = library.Layer(kind=library.LINEAR, outputs=2, weight_offset=5, bias_offset=-1)
    net = loaded.fedspa_net_new((library.Layer * 3)(before, tried, last), 3, (c_int64 * 3)(1, 6, 6), 1000)
    fits = not change or (kind == library.CONV and "pad_h" in change)  # a convolution may look at padding only
    assert (net is not None) == fits
    loaded.fedspa_net_free(net)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instructions looked for are those of x86")
def test_products_and_sums_stay_apart_at_the_plain_level(tmp_path: Path) -> None:
    """As on a CPU whose compilers fuse them without being asked."""
    source, made = Path(library.__file__).with_name("csrc") / "level_plain.c", tmp_path / "plain.s"
    subprocess.run(["cc", "-std=gnu11", "-O2", "-Wno-psabi", "-mfma", "-S", "-o", made, source], check=True)
    text = made.read_text()
    assert "vmulps" in text
    assert "vfmadd" not in text


def test_shared_and_frozen_parameters_are_left_to_other_engines() -> None:
    layer = nn.Linear(6, 6)
    assert "twice" in str(supports(nn.Sequential(layer, nn.ReLU(), layer), (6,)))
    frozen = nn.Sequential(nn.Linear(6, 2))
    frozen[0].bias.requires_grad_(False)
    assert "frozen" in str(supports(frozen, (6,)))


def test_wrong_labels_masks_and_modes_are_refused() -> None:
    theta = FlatModel(small_net()).flatten()
    task = small_task()
    engine, free = NativeEngine(small_net(), 2), unprotected(task).steps
    make = lambda **c: LocalTask(**{name: getattr(task, name) for name in LocalTask.__slots__} | c)  # noqa: E731
    with pytest.raises(DataError, match="label"):
        engine.train(theta, [make(y=task.y + 3, steps=free)])  # in a private step it costs the record its gradient
    with pytest.raises(PrivacyError, match="must agree"):
        engine.train(theta, [make(coordinates=torch.arange(5))])
    with pytest.raises(PrivacyError, match="without replacement"):
        engine.train(theta, [make(steps=plain("fixed", 99, 1))])
    with pytest.raises(ConfigError, match="exact"):
        engine.train(theta, [make(exact=True)])
    with pytest.raises(ConfigError, match="coordinates outside"):
        engine.train(theta, [make(coordinates=torch.tensor([len(theta)]), steps=free)])
    for coordinates in ([3, 2], [1, 1]):
        with pytest.raises(ConfigError, match="do not increase"):
            engine.train(theta, [make(coordinates=torch.tensor(coordinates), steps=free)])
    with pytest.raises(DataError, match="one each"):
        engine.train(theta, [make(x=task.x[:-1])])


def test_one_agents_fault_stops_the_others_and_is_what_is_said() -> None:
    endless = small_task(steps=10**9)
    wrong = unprotected(replace(endless, y=endless.y + 3))
    for tasks in ([endless, wrong], [wrong, endless], [endless, endless, wrong]):
        with pytest.raises(DataError, match="label"):
            NativeEngine(small_net(), 3).train(FlatModel(small_net()).flatten(), tasks)
