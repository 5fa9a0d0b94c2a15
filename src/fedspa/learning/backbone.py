"""A module split at a module boundary into a frozen body, which runs once per record, and a head, which is trained.

Forward hooks on synthetic records find the first layer that is trained or draws random numbers, and the frozen layers
before it. The body runs the module up to the cut and returns the tensors that cross it: the features. The head runs the
whole forward pass on a constant synthetic record, with constants in place of the frozen layers, and replaces the values
at the cut by the features. It holds the trained parameters in their order, so θ is the same vector. Code after the cut
that reads anything else from before it would see the constants: each split is compared with the whole module, and a
module without a valid cut is trained as it is.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fedspa.examples import Examples, Tree, joined, layout, leaves, mapped, moved, zero_examples
from fedspa.learning.agreement import close, same_bits, synthetic_examples
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import Modes, in_modes, modes, one_example_a_time, outputs, returned
from fedspa.learning.layers import is_altered, may_draw
from fedspa.learning.tasks import OutputTask, Task

_TOGETHER = 3  # examples in a batch that features are compared in
_FROZEN = 8  # frozen layers behind which a cut is tried
_LEAST_SHARE = 0.1  # of a forward pass, below which features are not worth their memory
_MOST_BYTES = 2**24  # of a record's features
# Features that are larger than the record by more than so many bytes must save so many multiplications for each byte:
# moving it takes as long, to a GPU longer.
_FEW_BYTES, _LEAST_PER_BYTE = 2**14, 100
_TOLERANCE = 1e-3  # of the largest number: a batch is summed in another order
_SEED = 2023
_close = partial(close, tolerance=_TOLERANCE)


@dataclass(frozen=True)
class Split:
    """`body` takes the tensors of records and returns what `head` takes in place of records. `example_spec` holds the
    features of the synthetic record `tried`."""

    body: nn.Module
    head: nn.Module
    modes: Modes
    tried: Tree
    example_spec: Tree
    description: str

    def features(self, x: Tree) -> Tree:
        """Return the features of copies of records, in the modes that the layers were in when the split was made."""
        return _features(self, x)


def _features(made: Split, x: Tree) -> Tree:
    with torch.no_grad(), in_modes(made.modes):
        found = made.body(*(leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves(x)))
    assert isinstance(found, tuple)
    return found[0] if len(found) == 1 else found


def split(module: nn.Module, example_spec: Examples, task: Task) -> Split | str:
    """Split a module behind its frozen body, for records of the layout of `example_spec`; or return the reason why not.

    The task is that of records. No value of a record is read: whether there is a split depends on the module and on the
    layout of a record alone.
    """
    if not isinstance(task, OutputTask):
        return f"the task ({task.name}) calls the module itself"
    if any(is_altered(layer) for layer in module.modules()):
        return "the module has hooks, or a forward method of its own"
    trial = copied(module).to("cpu")  # where the two halves have the bits of the whole
    given = [
        *synthetic_examples(example_spec, module, task),
        Examples(zero_examples(example_spec.x), zero_examples(example_spec.y)),
    ]
    with torch.random.fork_rng(devices=[]), one_example_a_time():
        examples = (example for example in reversed(given) if _accepts(trial, example.x))  # as they are needed
        first = next(examples, None)
        if first is None:
            return "it accepts none of the synthetic records"
        accepted, why = [first], ""
        try:
            for cut in _candidates(trial, first.x):
                try:
                    if cut.share < _LEAST_SHARE:
                        small = f"the frozen body is {cut.share:.0%} of a forward pass"
                        raise _NotSplit(f"{small}, not worth the memory for its features")
                    accepted += examples
                    return _checked(module, trial, cut, accepted, task)
                except _NotSplit as cause:
                    why = why or str(cause)
        except Exception as error:  # the user's forward may raise anything
            return f"it cannot be run in two parts ({type(error).__name__})"
    drawing = next((name for name, layer in trial.named_modules() if may_draw(layer)), None)
    hint = "" if drawing is None else f"; '{drawing}' draws random numbers, and would not in eval mode (module.eval())"
    return f"{why or 'nothing comes before what is trained or draws'}{hint}"


class _NotSplit(Exception):
    """The reason why a module is not cut here."""


class _Call(NamedTuple):
    """One call of a layer: when it started and ended, and copies of what it was given and returned."""

    path: str
    layer: nn.Module
    started: int
    ended: int
    given: Any
    returned: Any


@dataclass(frozen=True)
class _Cut:
    """A cut before the layer `path`, if that is trained, or behind it, if it is frozen.

    `payload` is what crosses the cut for the record `x`; of its leaves, `crossing` says which are features. In the head
    `constants` replace frozen layers. With `keeps_x`, features include the record and the head runs on that; with
    `clones`, it copies features before it changes them in place. The body takes `work` multiplications for a record.
    """

    path: str
    before: bool
    constants: dict[str, Any]
    x: Tree
    payload: Any
    work: int
    share: float
    keeps_x: bool = False
    clones: bool = False
    crossing: tuple[bool, ...] = ()


def _candidates(module: nn.Module, x: Tree) -> Iterator[_Cut]:
    """Yield the places to cut at, those that save most first."""
    calls = _recorded(module, x)
    counts = Counter(call.path for call in calls)
    trained = [call for call in sorted(calls, key=lambda call: call.started) if call.path and _is_trained(call.layer)]
    frozen = {call.path: call for call in calls if call.path and _is_frozen(call.layer)}
    total = max(1, sum(map(_work, calls)))
    for first in trained:
        early = [call for call in calls if call.path in frozen and call.ended < first.started]
        # The outermost, where a single call is all that the pass makes of them.
        done = [call for call in reversed(early) if counts[call.path] == 1 and not _below(call.path, frozen)]
        places = [(call.path, False, call.returned, call.ended) for call in done[:_FROZEN]]
        # Where the trained layer takes just what a frozen one returned, the place is the same.
        if not done or not _equal(_tensors(first.given), _tensors(done[0].returned)):
            places.insert(0, (first.path, True, first.given, first.started))
        for path, before, payload, time in places:
            constants = {call.path: call.returned for call in done if call.ended < time}
            work = sum(_work(call) for call in calls if call.ended <= time)
            cut = _Cut(path, before, constants, x, payload, work, work / total)
            if early:
                yield from (cut, replace(cut, keeps_x=True))
        # A parameter of a module with layers inside may be used behind them, that of any other is used now.
        if not any(call.started > first.started and call.ended < first.ended for call in calls):
            return


def _recorded(module: nn.Module, x: Tree) -> list[_Call]:
    """Record the calls of all layers in one forward pass, in the order in which they end."""
    calls: list[_Call] = []
    begun: list[tuple[int, Any]] = []
    clock = itertools.count()

    def hooks(path: str, layer: nn.Module) -> Iterator[RemovableHandle]:
        def begin(_: nn.Module, args: Any, named: Any) -> None:
            begun.append((next(clock), _cloned((args, named))))

        def end(_: nn.Module, args: Any, named: Any, found: Any) -> None:
            started, given = begun.pop()
            calls.append(_Call(path, layer, started, next(clock), given, _cloned(found)))

        yield layer.register_forward_pre_hook(begin, with_kwargs=True)
        yield layer.register_forward_hook(end, with_kwargs=True)

    handles = [handle for path, layer in module.named_modules() for handle in hooks(path, layer)]
    try:
        with torch.no_grad():
            returned(module, mapped(torch.clone, x))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _checked(module: nn.Module, trial: nn.Module, cut: _Cut, examples: list[Examples], task: Task) -> Split:
    """Build the split on a copy, compare it with the whole, and return that of the module itself."""
    several = Examples(*(joined([examples[n % len(examples)][i] for n in range(_TOGETHER)]) for i in range(2)))
    cut = replace(cut, crossing=tuple(_crossing(trial, cut, several.x)))
    made = _built(trial, cut)
    if (size := bytes_of(leaves(made.example_spec))) > _MOST_BYTES:
        raise _NotSplit(f"the frozen body makes {size:,} bytes of a record, and at most {_MOST_BYTES:,} are kept")
    larger = size - bytes_of(leaves(cut.x))
    if larger > _FEW_BYTES and cut.work < _LEAST_PER_BYTE * larger:
        raise _NotSplit(f"its features are {larger:,} bytes larger than a record, and computed faster than moved")
    try:
        _compare(trial, made, [*examples, several], task)
    except _InPlace:
        cut = replace(cut, clones=True)
        made = _built(trial, cut)
        _compare(trial, made, [*examples, several], task)
    _check_separate(made, [example.x for example in examples[:_TOGETHER]], several.x)
    return _built(module, cut)


class _InPlace(_NotSplit):
    """The head changes its features in place."""


def _compare(module: nn.Module, made: Split, examples: list[Examples], task: Task) -> None:
    """Raise unless outputs and gradients are those of the whole to the bit, at two θ and with the same randomness, for
    single examples and for a batch."""
    if [*map(id, _trained(made.head))] != [*map(id, _trained(module))]:
        raise _NotSplit("its head does not hold the trained parameters in their order")
    whole, rest = FlatModel(module, task), FlatModel(made.head, task)
    theta = whole.flatten()
    elsewhere = theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)
    compared = False
    for at, example in ((at, example) for at in (theta, elsewhere) for example in examples):
        try:
            expected = _results(whole, at, *example)
        except Exception:  # a synthetic example need not have a gradient
            continue
        before = _random_states()
        features = _features(made, example.x)
        if not all(map(torch.equal, before, _random_states())):
            raise _NotSplit("the frozen part draws random numbers")
        kept = mapped(lambda leaf: leaf.clone(), features)
        try:
            found = _results(rest, at, features, example.y)
        except Exception as error:
            raise _NotSplit(f"its head does not run by itself ({type(error).__name__})") from error
        if not all(map(same_bits, leaves(kept), leaves(features))):
            raise _InPlace("what is trained changes the features in place")
        if not all(map(same_bits, expected, found)):
            raise _NotSplit("its two parts do not give what the whole module gives")
        compared = True
    if not compared:
        raise _NotSplit("no synthetic record has a gradient")


def _results(model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> list[Tensor]:
    """Return outputs and gradient, each from the same seed."""
    torch.manual_seed(_SEED)
    found = model.outputs(theta, x).detach()
    torch.manual_seed(_SEED)
    return [found, model.gradient(theta, x, y)]


def _check_separate(made: Split, alone: list[Tree], several: Tree) -> None:
    """Raise unless a record has the same features each time, and, up to rounding, the same in a batch."""
    together = list(leaves(_features(made, several)))
    for place, x in enumerate(alone):
        for one, again, many in zip(leaves(_features(made, x)), leaves(_features(made, x)), together):
            if not same_bits(one, again):
                raise _NotSplit("the frozen part is not deterministic")
            if not _close(one, many[place : place + 1]):
                raise _NotSplit("the frozen part mixes records")


def _crossing(module: nn.Module, cut: _Cut, several: Tree) -> Iterator[bool]:
    """Yield, for each leaf of the payload, whether it has a row for each example; the others must be constant."""
    number = len(next(leaves(several)))
    with torch.no_grad():
        many = pytree.tree_leaves(_body(module, cut).payload(mapped(lambda leaf: leaf.clone(), several)))
    for one, other in zip(pytree.tree_leaves(cut.payload), many, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if type(one) is not type(other) or one != other:
                raise _NotSplit("a value at the cut depends on the number of records")
            yield False
        elif one.ndim and len(one) == 1 and other.shape == (number, *one.shape[1:]):
            yield True
        elif same_bits(one, other):
            yield False
        else:
            raise _NotSplit("a tensor at the cut has no row for each record")


def _built(module: nn.Module, cut: _Cut) -> Split:
    device = next(module.parameters()).device
    body, head = _body(module, cut), _head(module, cut).to(device)
    made = Split(body, head, modes(body), moved(cut.x, "cpu"), cut.x, "")
    example_spec = _features(made, moved(cut.x, device))
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    description = (
        f"the frozen body ({cut.share:.0%} of a forward pass; {frozen:,} parameters are frozen) runs once per record "
        f"and makes features {layout(example_spec)}"
    )
    return replace(made, example_spec=moved(example_spec, "cpu"), description=description)


def _body(module: nn.Module, cut: _Cut) -> _Body:
    layer = module.get_submodule(cut.path)
    return _Body(_with_layers(module, {cut.path: _Stop(None if cut.before else layer)}), cut)


def _head(module: nn.Module, cut: _Cut) -> nn.Module:
    slot = _Slot()
    layer = module.get_submodule(cut.path) if cut.before else None
    instead: dict[str, nn.Module] = {path: _Constant(slot, value) for path, value in cut.constants.items()}
    instead[cut.path] = _Resumed(slot, layer, cut)
    single = sum(cut.crossing) == 1 and not cut.keeps_x
    head = _with_layers(module, instead, _head_class(type(module), cut, single))
    head.__dict__["_fedspa_x"] = cut.x
    return head


def _with_layers(module: nn.Module, instead: dict[str, nn.Module], kind: type[nn.Module] | None = None) -> nn.Module:
    """Return the module with other layers at some paths. The modules around them are new; all others are shared.

    With a class given for the root, it is a head: of the modules around, frozen parameters and buffers become plain
    attributes, since engines that read a model by its layers take none with constants.
    """
    made = object.__new__(kind or type(module))
    made.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(module.__dict__[name])
    if kind is not None:
        constant = {name: each for name, each in made._parameters.items() if each is None or not each.requires_grad}
        fixed: dict[str, Tensor | None] = {**constant, **made._buffers}
        made.__dict__.update(fixed, _fedspa_constants=tuple(fixed), _buffers={})
        made.__dict__["_parameters"] = {name: each for name, each in made._parameters.items() if name not in fixed}
    for name, child in module._modules.items():
        below = {path[len(name) + 1 :]: layer for path, layer in instead.items() if path.startswith(f"{name}.")}
        if name in instead:
            made._modules[name] = instead[name]
        elif below and child is not None:
            made._modules[name] = _with_layers(child, below, kind and type(child))
    return made


class _Reached(BaseException):
    """The body has come to the cut. No `except Exception` of the module's catches it."""

    def __init__(self, payload: Any) -> None:
        super().__init__()
        self.payload = payload


class _Stop(nn.Module):
    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **named: Any) -> None:
        raise _Reached((args, named) if self.layer is None else self.layer(*args, **named))


class _Body(nn.Module):
    """Runs the module up to the cut and returns the features."""

    def __init__(self, module: nn.Module, cut: _Cut) -> None:
        super().__init__()
        self.module, self._cut = module, cut
        self.training = module.training

    def payload(self, x: Tree) -> Any:
        try:
            returned(self.module, x)
        except _Reached as reached:
            return reached.payload
        raise RuntimeError("the forward pass does not come to the cut")

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        rest = iter(given)
        found = pytree.tree_leaves(self.payload(mapped(lambda _: next(rest), self._cut.x)))
        if len(found) != len(self._cut.crossing):
            raise RuntimeError("other values than those of the synthetic record come to the cut")
        features = [leaf for leaf, crosses in zip(found, self._cut.crossing) if crosses]
        return (*features, *(given if self._cut.keeps_x else ()))


class _Slot(threading.local):
    """Holds the features while a head runs, for each thread its own, and of how many records constants must be."""

    features: tuple[Any, ...] = ()
    rows = 1

    def __reduce__(self) -> tuple[type[_Slot], tuple[()]]:
        return _Slot, ()


class _Constant(nn.Module):
    """Returns what a frozen layer returned for the synthetic record."""

    _fedspa_constants = ("value",)

    def __init__(self, slot: _Slot, value: Any) -> None:
        super().__init__()
        self._slot = slot
        self.__dict__["value"] = value  # no buffer

    def forward(self, *args: Any, **named: Any) -> Any:
        def copy(leaf: Tensor) -> Tensor:
            alone = self._slot.rows == 1 or not leaf.ndim or len(leaf) != 1
            return (leaf if alone else leaf.expand(self._slot.rows, *leaf.shape[1:])).clone()

        return pytree.tree_map_only(Tensor, copy, self.value)


class _Resumed(nn.Module):
    """Takes the features in place of what crossed the cut: returns them for a frozen layer, and calls a trained one
    with them."""

    _fedspa_constants = ("values",)

    def __init__(self, slot: _Slot, layer: nn.Module | None, cut: _Cut) -> None:
        super().__init__()
        self.trained, self._slot = layer, slot
        self._crossing, self._clones = cut.crossing, cut.clones
        values, spec = pytree.tree_flatten(cut.payload)
        self._payload: Callable[[list[Any]], Any] = lambda leaves: pytree.tree_unflatten(
            leaves, spec
        )  # torch warns of copies of a spec
        self.values = [None if crosses else value for crosses, value in zip(cut.crossing, values)]

    def forward(self, *args: Any, **named: Any) -> Any:
        rest = iter(self._slot.features)
        values = [next(rest) if crosses else value for crosses, value in zip(self._crossing, self.values)]
        if self._clones:
            values = [value.clone() if isinstance(value, Tensor) else value for value in values]
        payload = self._payload(values)
        return payload if self.trained is None else self.trained(*payload[0], **payload[1])


def _head_class(kind: type[nn.Module], cut: _Cut, single: bool) -> type[nn.Module]:
    """Make the class of the head of a module of this kind. torch.fx needs one argument by name."""

    def run(self: Any, *features: Any) -> Any:
        slot = self.get_submodule(cut.path)._slot
        slot.features, slot.rows = features, len(features[0]) if cut.keeps_x else 1
        rest = iter(features[sum(cut.crossing) :])
        x = mapped(lambda leaf: next(rest, leaf), self._fedspa_x)
        args, named = ((), x) if isinstance(x, dict) else ((x,) if isinstance(x, Tensor) else x, {})
        try:
            return _logits(kind.forward(self, *args, **named))
        finally:
            slot.features = ()

    def apply(self: Any, function: Any, *args: Any, **named: Any) -> Any:
        """Move constants with the module, too."""
        kind._apply(self, function, *args, **named)  # type: ignore[no-untyped-call]
        for layer in self.modules():
            for name in getattr(layer, "_fedspa_constants", ()):
                layer.__dict__[name] = pytree.tree_map_only(Tensor, function, layer.__dict__[name])
        self.__dict__["_fedspa_x"] = mapped(function, self._fedspa_x)
        return self

    forward = (lambda self, features: run(self, features)) if single else run
    return type("Head", (kind,), {"forward": forward, "_apply": apply})


def _logits(found: Any) -> Any:
    """Return the part of what a module returns that a loss is made of, as `forward.outputs` finds it, of proxies
    too."""
    if isinstance(found, dict) or hasattr(type(found), "logits"):
        return found["logits"] if isinstance(found, dict) else found.logits
    return _logits(found[0]) if isinstance(found, tuple | list) and found else found


def _is_trained(layer: nn.Module) -> bool:
    return may_draw(layer) or any(each.requires_grad for each in layer.parameters(recurse=False))


def _is_frozen(layer: nn.Module) -> bool:
    return not any(_is_trained(each) for each in layer.modules())


def _below(path: str, paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{other}.") for other in paths)


def _work(call: _Call) -> int:
    """Count the multiplications of a layer with its own weights: each number of a weight is multiplied once for every
    pixel, token or example of the output."""
    made = next(iter(_tensors(call.returned)), None)
    if made is None or not made.ndim or isinstance(call.layer, nn.Embedding | nn.EmbeddingBag):
        return 0
    weights = [weight for weight in call.layer.parameters(recurse=False) if weight.ndim > 1]
    widths = [made.shape[-1] if weight.ndim == 2 else weight.shape[0] for weight in weights]
    return sum(weight.numel() * max(1, made.numel() // max(1, width)) for weight, width in zip(weights, widths))


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _cloned(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), tree)


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def _accepts(module: nn.Module, x: Tree) -> bool:
    try:
        with torch.no_grad():
            return isinstance(outputs(module, mapped(lambda leaf: leaf.clone(), x)), Tensor)
    except Exception:  # the user's forward may raise anything
        return False


def _trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters() if parameter.requires_grad)


def bytes_of(features: Iterable[Tensor]) -> int:
    """Return the bytes of one record's features."""
    return sum(math.prod(leaf.shape[1:]) * leaf.element_size() for leaf in features)
