"""What Triton makes of the sums' kernels for an H200 (sm_90), read as PTX.

Compilers may contract a product and a sum into one fused multiply-add, with another rounding. Where the bound hangs on
a clamped number, nothing but the clamped number may be added. Needs Triton, which only machines with a GPU have.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: nothing to compile the kernels with")
pytestmark = pytest.mark.gpu

from fedspa.engine.stacked import kernels  # noqa: E402
from fedspa.engine.stacked.layers import norm_kernels, weighted_kernels  # noqa: E402

compiler, targets = (pytest.importorskip(f"triton.{name}") for name in ("compiler", "backends.compiler"))
NAN = "0f7FC00000"
ARGUMENTS = {
    **dict.fromkeys(("delta", "x", "normal", "factors"), "*fp32"),
    **dict.fromkeys(("sums", "clips", "first", "second"), "*fp64"),
    **dict.fromkeys(("counts", "step"), "*i32"),
    **dict.fromkeys(("agents", "capacity", "dimension", "weight", "tile", "tiles"), "i32"),
    "masks": "*u8",
}
CONV = {"C": 2, "H": 8, "W": 8, "N": 16, "KH": 3, "KW": 3, "SH": 1, "SW": 1, "PH": 1, "PW": 1, "OH": 8, "OW": 8}
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (weighted_kernels.linear_sums, {"C": 100, "N": 10, "BIAS": 1, "BO": 8, "BJ": 32}),
    "linear, no bias": (weighted_kernels.linear_sums, {"C": 16, "N": 3, "BIAS": 0, "BO": 8, "BJ": 32}),
    "conv": (weighted_kernels.conv_sums, {**CONV, "BIAS": 1, "PRECISION": "ieee", "BO": 16, "BJ": 32, "BQ": 16}),
    "conv, tf32": (weighted_kernels.conv_sums, {**CONV, "BIAS": 1, "PRECISION": "tf32", "BO": 16, "BJ": 32, "BQ": 16}),
    "norm": (
        norm_kernels.norm_sums,
        {"OUTER": 1, "PARAMETERS": 16, "INNER": 1, "WEIGHT": True, "KINDS": 2, "BO": 16, "BQ": 16},
    ),
    "embedding": (norm_kernels.embedding_sums, {"WORDS": 50, "WIDTH": 16, "TOKENS": 1, "BO": 32, "BJ": 16}),
}

Instructions = list[tuple[str, str, list[str]]]


def compile_ptx(name: str, mode: Any) -> Instructions:
    """(operation, destination, sources) of every instruction with a destination and sources."""
    kernel, shape = KERNELS[name]
    constants = {**shape, "MASKED": False, "MODE": mode.value, "SPLIT": 4}
    signature = {each: ARGUMENTS.get(each, "constexpr") for each in kernel.arg_names}
    assert {each for each, kind in signature.items() if kind == "constexpr"} == set(constants)
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=targets.GPUTarget("cuda", 90, 32), options={"num_warps": 2}).asm["ptx"]
    found = re.findall(r"^\s*(?:@%?\S+\s+)?([a-z][\w.:]*)\s+(%\w+), ([^;\[{]+);", ptx, re.MULTILINE)
    return [(operation, to, [each.strip() for each in sources.split(",")]) for operation, to, sources in found]


@pytest.mark.parametrize("mode", [kernels.CLAMP, kernels.COUNT], ids=["clamp", "count"])
@pytest.mark.parametrize("name", list(KERNELS))
def test_only_clamped_numbers_are_added_to_a_sum(name: str, mode: Any) -> None:
    code = compile_ptx(name, mode)
    made = {to: (operation, sources) for operation, to, sources in code}
    wide = [(operation, sources) for operation, _, sources in code if re.match(r"(add|sub|fma|mul)\b.*f64", operation)]
    assert wide
    for operation, sources in wide:
        assert operation in ("add.f64", "add.rn.f64")
        addends = [made[each] for each in sources if made.get(each, ("",))[0] == "cvt.f64.f32"]
        assert len(addends) == 1  # the other is the sum so far
        operation, (clamped, other, _) = made[addends[0][1][0]]
        assert (operation, other) == ("selp.f32", NAN)
        assert made[clamped][0] == "min.f32"
        assert any(made.get(each, ("",))[0] == "max.f32" for each in made[clamped][1])


@pytest.mark.parametrize("name", ["linear", "linear, no bias"])
@pytest.mark.parametrize("mode", [kernels.CLAMP, kernels.COUNT, kernels.SCALED], ids=["clamp", "count", "l2"])
def test_a_gradient_is_a_rounded_product_before_it_is_used(name: str, mode: Any) -> None:
    """An outer product's only sums are in float64, behind a conversion: nothing to contract with the product, neither
    for Triton nor for what assembles its PTX."""
    code = compile_ptx(name, mode)
    products = {to for operation, to, _ in code if operation.startswith("mul") and operation.endswith("f32")}
    assert products
    products |= {to for operation, to, sources in code if operation.startswith("neg") and products & set(sources)}
    sums = [sources for operation, _, sources in code if re.match(r"(add|sub|fma)\b.*f32", operation)]
    assert not any(products & set(sources) for sources in sums)
