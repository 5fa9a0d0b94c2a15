"""Which operations a traced program may have: those that treat every example alike and never fail for one.

An operation that raises for what it finds in a tensor would end a whole batch for one example, so that its neighbours'
part in a release would depend on it. Those that look up by an index may do so only by one that was held inside
(`ops.within`), or that no example has a part in.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fedspa.engine.traced import ops
from fedspa.engine.traced.capture import Untraceable

_SHAPES = """
alias as_strided cat clone constant_pad_nd contiguous copy detach diagonal expand expand_as flip lift_fresh
lift_fresh_copy movedim narrow permute pixel_shuffle repeat reshape roll select select_backward select_scatter slice
slice_backward slice_scatter split split_with_sizes squeeze stack t transpose tril triu unbind unfold unfold_backward
unsafe_split unsqueeze view view_as _reshape_alias _unsafe_view _to_copy diagonal_backward diagonal_scatter
"""
_NUMBERS = """
abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max
clamp_min cos cosh cumsum div elu elu_backward eq erf erfc erfinv exp expm1 fill floor floor_divide fmod frac ge gelu
gelu_backward glu glu_backward gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh
hardtanh_backward huber_loss huber_loss_backward isfinite isinf isnan le leaky_relu leaky_relu_backward lerp log log10
log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mish mish_backward mse_loss mse_loss_backward mul ne neg nan_to_num pow reciprocal relu
remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh smooth_l1_loss
smooth_l1_loss_backward softplus softplus_backward sqrt square sub tan tanh tanh_backward threshold_backward trunc where
xlogy zero _prelu_kernel _prelu_kernel_backward binary_cross_entropy_with_logits dist
"""
_SUMS = """
addmm addmv adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward all amax amin any argmax argmin
avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm bmm convolution convolution_backward dot
embedding_dense_backward linalg_vector_norm log_softmax logsumexp matmul max max_pool2d_with_indices
max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward mean median min mm mv
native_batch_norm native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward norm prod
softmax std sum topk upsample_bilinear2d upsample_bilinear2d_backward upsample_nearest2d upsample_nearest2d_backward var
var_mean vdot _log_softmax _log_softmax_backward_data _native_batch_norm_legit _native_batch_norm_legit_no_training
_safe_softmax _softmax _softmax_backward_data cudnn_batch_norm
"""
_MADE = """
arange empty empty_like full full_like linspace new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
scalar_tensor zeros zeros_like eye
"""
# Name, and which of its arguments is the index.
_LOOKED_UP = {
    "embedding": 1,
    "gather": 2,
    "index": 1,
    "index_put": 1,
    "index_select": 2,
    "scatter": 2,
    "scatter_add": 2,
}

ALLOWED = frozenset({*_SHAPES.split(), *_NUMBERS.split(), *_SUMS.split(), *_MADE.split(), *_LOOKED_UP})
_DRAWN = "bernoulli multinomial native_dropout normal rand rand_like randint randn randn_like randperm"
RANDOM = frozenset(_DRAWN.split())
_INDEXED = {**_LOOKED_UP, "embedding_dense_backward": 1}
# Of whole numbers they raise where one is divided by zero.
_DIVIDING = frozenset({"div", "div_", "floor_divide", "fmod", "remainder"})


def require_allowed(graph: fx.Graph) -> None:
    """Raise where the graph does what a batch of private examples may not."""
    own = set(ops.plain)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem and node.target not in own:
            name = plain_name(node)
            if name not in ALLOWED and name not in RANDOM:
                raise Untraceable(f"it uses {node.target}, which may fail for one example, or has no rule here")
            if name in _INDEXED and not _held_inside(node.args[_INDEXED[name]]):
                raise Untraceable(f"it looks values up by an unchecked index ({node.target})")
            if name in _DIVIDING and isinstance(node.args[1], fx.Node) and not node.meta["dtype"].is_floating_point:
                raise Untraceable(f"it divides whole numbers ({node.target}), which fails where one is zero")
        elif node.op in ("call_method", "call_module"):
            raise Untraceable(f"it calls {node.target}")


def _held_inside(index: Any) -> bool:
    """Whether an index, or each of several, depends on examples only through `within`, and is not what was looked up by
    such an index: a table's numbers need not lie inside another's."""
    if isinstance(index, list | tuple):
        return all(map(_held_inside, index))
    if not isinstance(index, fx.Node) or not depends_on_arguments(index):
        return True
    return not depends_on_arguments(index, but_for=ops.within_node) and not _looked_up(index)


def _looked_up(index: fx.Node) -> bool:
    """Whether a node between `within` and the index looks something up by what an example brings."""
    waiting, seen = [index], {index}
    while waiting:
        one = waiting.pop()
        if one.target is ops.within_node:
            continue
        if plain_name(one) in _LOOKED_UP and depends_on_arguments(one):
            return True
        new = [each for each in one.all_input_nodes if each not in seen]
        seen.update(new)
        waiting += new
    return False


def depends_on_arguments(node: fx.Node, but_for: Any = None) -> bool:
    """Whether it is made of an argument of the graph; what is made by `but_for` does not count."""
    waiting, seen = [node], {node}
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder":
            return True
        if but_for is None or one.target is not but_for:
            new = [each for each in one.all_input_nodes if each not in seen]
            seen.update(new)
            waiting += new
    return False


def plain_name(node: fx.Node) -> str:
    """Of an operator, without its overload, in place or not: `aten.add.Tensor` and `aten.add_.Tensor` are `add`."""
    target = str(node.target)
    return target.split(".")[1].removesuffix("_") if target.startswith("aten.") else target


def require_gpu_rules(graph: fx.Graph) -> None:
    """Raise where a GPU would make the examples' gradients of a convolution's weights as groups of one convolution: its
    kernels may lay groups side by side with zeros between them, and a number that is not finite would spoil others."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.convolution_backward.default and node.args[-1][1]:
            raise Untraceable("on a GPU it has a rule for Conv2d only, and the model has another convolution")
