"""The native engine on a 64-bit ARM: the NEON level has the bits of the plain one, and its streams are those of Python.

Elsewhere the library is cross-built and run by qemu's user mode. (Debian: gcc-aarch64-linux-gnu and qemu-user.)
"""

from __future__ import annotations

import itertools
import math
import platform
import shutil
import struct
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from native_nets import KEY, records, small_net, small_task
from native_probe import CSRC, probe
from numpy.typing import NDArray
from plain import plain
from torch import Tensor, nn

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.native.engine import describe
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream

ON_ARM = platform.machine() in ("aarch64", "arm64")
COMPILER = shutil.which("cc" if ON_ARM else "aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.library() is None, reason="the native engine was not built"),
    pytest.mark.skipif(COMPILER is None, reason="no C compiler for ARM: apt-get install gcc-aarch64-linux-gnu"),
    pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="no emulator of ARM: apt-get install qemu-user"),
]


@dataclass(frozen=True)
class Outcome:
    """What a case gave at one level. The bits of floats, so that equal means equal."""

    code: int
    zeroed: tuple[int, int]
    delta: bytes
    sums: bytes
    logits: bytes


class Machine:
    """The library on ARM: cases go in, and come out twice, at the plain level and at the best."""

    def __init__(self, folder: Path) -> None:
        program, driver = folder / "driver", Path(__file__).with_name("native_driver.c")
        flags = ["-std=gnu11", "-O3", "-Wno-psabi", "-pthread", f"-I{CSRC}", f"-I{driver.parent}"]
        sources = [str(path) for path in sorted(CSRC.glob("*.c"))]
        static = [] if ON_ARM else ["-static"]
        subprocess.run([str(COMPILER), *flags, *static, *sources, str(driver), "-lm", "-o", str(program)], check=True)
        self._command = [str(program)] if ON_ARM else [str(EMULATOR), str(program)]

    def __call__(self, cases: bytes) -> tuple[int, int, bytes]:
        """The best level's number, what its AES instructions can do, and the cases' outcomes one after the other."""
        done = subprocess.run(self._command, input=cases, capture_output=True, check=True)
        best, hardware = struct.unpack("<2q", done.stdout[:16])
        return best, hardware, done.stdout[16:]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("arm"))


def test_streams_are_those_of_python(machine: Machine) -> None:
    """By the AES instructions and by plain C: the words exactly, the Gaussians as the plain level has them here."""
    generator = np.random.default_rng(0)
    asked = [(bytes(32), 0, 2)]
    asked += [
        (generator.bytes(32), position, count)
        for position, count in itertools.product([0, 2, 2**40], [1, 2, 15, 16, 17, 33, 300, 8193])
    ]
    cases = b"".join(struct.pack("<q32s2q", 0, *each) for each in asked)
    best, hardware, out = machine(cases)
    assert library.get_args(library.Level)[best] == "neon"
    assert hardware == 1
    assert out[:16].hex() == "dc95c078a2408989ad48a21492842087"  # NIST's known answer
    for key, position, count in asked:
        words, gaussians = Stream(key, position).uint64(count).tobytes(), _gaussians(key, position, count).tobytes()
        assert out[: 32 * count] == 2 * (words + gaussians), (position, count)
        out = out[32 * count :]
    assert not out


def _gaussians(key: bytes, position: int, count: int) -> NDArray[np.float64]:
    values = np.empty(count)
    probe("plain").probe_gaussian(key, library.number("plain"), position, count, values.ctypes.data)
    return values


def filled(seed: int, *layers: nn.Module) -> nn.Sequential:
    generator, module = torch.Generator().manual_seed(seed), nn.Sequential(*layers)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p[0].numel() if p.dim() > 1 else 4))
    return module


def nets() -> dict[str, tuple[nn.Sequential, tuple[int, ...]]]:
    """Each way forward that the library has, and each kind of layer."""
    head = (nn.ReLU(), nn.Flatten())
    return {
        "five wide": (
            filled(1, nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), *head, nn.Linear(80, 10)),
            (1, 16, 16),
        ),
        "winograd": (
            filled(2, nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), *head, nn.Linear(288, 7)),
            (2, 10, 10),
        ),
        "strided": (
            filled(
                *(3, nn.Conv2d(3, 9, (3, 2), (2, 1), (1, 1)), nn.Tanh(), nn.MaxPool2d(3, 2, 1)),
                *(nn.Flatten(), nn.Linear(9 * 2 * 5, 12), nn.Tanh(), nn.Linear(12, 3)),
            ),
            (3, 7, 9),
        ),
        "linear": (filled(4, nn.Linear(45, 33), nn.ReLU(), nn.Linear(33, 6, bias=False)), (45,)),
    }


def tasks() -> dict[str, tuple[nn.Sequential, Tensor, LocalTask]]:
    """Clippings, samplers and masks on the small net; the other nets with each clipping."""
    small = small_net()
    theta = FlatModel(small).flatten()
    found: dict[str, tuple[nn.Sequential, Tensor, LocalTask]] = {}
    for clip, sampling, masked in itertools.product(["coordinate", "l2"], ["poisson", "fixed"], [False, True]):
        mask = torch.arange(0, len(theta), 7) if masked else None
        task = small_task(clip=clip, sampling=sampling, mask=mask, steps=4, clip_value=0.1)
        found[f"{clip} {sampling} {masked}"] = small, theta, task
    for (name, (module, shape)), clip in itertools.product(nets().items(), ["coordinate", "l2", None]):
        theta, (x, y) = FlatModel(module).flatten(), records(module, shape, 20, 3)
        d = len(theta)
        plan = GaussianPlan(d, d, clip, 0.05, "poisson", 9, len(y), 3, 1, 0.5, "add-remove", 1e-3) if clip else None  # type: ignore[arg-type]
        found[f"{name} {clip}"] = module, theta, LocalTask(x, y, None, 1.5, 0.02, plan or plain("poisson", 9, 3), KEY)  # type: ignore[arg-type]
    base = small_task(clip="coordinate", steps=2)
    wild = base.x.clone()  # type: ignore[union-attr]
    wild[3, 0, 4, 4], wild[7, 0, 2, 2], wild[11, 0, 6, 6] = math.nan, -math.inf, 1e20
    found["wild"] = small, FlatModel(small).flatten(), replace(base, x=wild)
    many = base.x.repeat(8, 1, 1, 1), base.y.repeat(8)  # type: ignore[union-attr]
    d = base.plan.active  # type: ignore[union-attr]
    plan = GaussianPlan(d, d, "l2", 0.5, "poisson", 300, 320, 2, 1, 0.5, "add-remove", 1e-3)
    found["more than an int32 holds"] = small, FlatModel(small).flatten(), LocalTask(*many, None, 1.0, 0.05, plan, KEY)
    return found


def written(module: nn.Sequential, theta: Tensor, task: LocalTask) -> tuple[bytes, tuple[int, int, int]]:
    """A case as the driver reads it, and how many coordinates, records and classes it has."""
    prepared = NativeEngine(module, 1, "plain")._prepare(task)
    x, y, numbers, _, coordinates = prepared.kept
    assert y is not None
    shape = tuple(x.shape[1:])
    layers, active = describe(module, shape), prepared.agent.task.active
    sides = shape if len(shape) == 3 else (math.prod(shape), 1, 1)
    parts = [numbers, coordinates]
    sizes = [len(layers), *sides, len(theta), x.numel(), len(y), *(0 if p is None else len(p) for p in parts)]
    arrays = b"".join(p.numpy().tobytes() for p in (theta, x, y, *parts) if p is not None)
    case = struct.pack("<10q", 1, *sizes) + b"".join(map(bytes, layers)) + arrays + bytes(prepared.agent.task)
    return case, (active, len(y), module(x[:1]).shape[1])


def read(out: bytes, active: int, held: int, classes: int) -> tuple[Outcome, bytes]:
    code, zeroed, zeroed_of_sum = struct.unpack("<3q", out[:24])
    ends = list(itertools.accumulate([24, 4 * active, 8 * active, 4 * held * classes]))
    delta, sums, logits = (out[a:b] for a, b in itertools.pairwise(ends))
    return Outcome(code, (zeroed, zeroed_of_sum), delta, sums, logits), out[ends[-1] :]


def test_neon_has_the_bits_of_the_plain_level(machine: Machine) -> None:
    asked = tasks()
    cases = {name: written(*each) for name, each in asked.items()}
    _, _, out = machine(b"".join(case for case, _ in cases.values()))
    for name, (_, sizes) in cases.items():
        on_plain, out = read(out, *sizes)
        on_neon, out = read(out, *sizes)
        assert on_plain.code == 0, name
        assert on_neon == on_plain, name
        _compare_with_plain_here(name, *asked[name], on_plain)
    assert not out


def _compare_with_plain_here(name: str, module: nn.Sequential, theta: Tensor, task: LocalTask, found: Outcome) -> None:
    """The same records and the same noise, but for the last bits of exp, which is the C library's."""
    (here,) = NativeEngine(module, 1, "plain").train(theta, [task])
    assert found.zeroed[0] == here.zeroed, name
    delta = torch.frombuffer(bytearray(found.delta), dtype=torch.float32)
    assert float((delta - here.delta).abs().max()) < 2e-6, name
    assert float(here.delta.abs().max()) > 2e-4, name
