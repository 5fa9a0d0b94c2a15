"""Validation of a module on synthetic examples, before it sees a record.

A module passes if it breaks no layer rule (`layers.py`) and repeats: the gradient of an example has the same bits
whichever examples came before it, on two copies, at two θ, after passes that ended in an error, and nothing that the
module holds has changed. State would put one example into the gradient of the next, whatever the clip. Then the
gradients must agree with plain autograd (`agreement.py`). What fails for every example must fail here, by name: once
records are private, an example whose gradient fails counts as zero.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError, MixingWarning, listed, one_line, warn
from fedspa.examples import Examples, Tree, count, in_float64, joined, layout, mapped
from fedspa.learning.agreement import (
    SEED,
    Disagreement,
    close,
    require_agreement,
    same_bits,
    synthetic_examples,
)
from fedspa.learning.fix import replace_layers
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import (
    Switches,
    evaluating,
    generators_kept,
    in_float32,
    is_large,
    one_example_a_time,
    returned,
    torch_threads,
)
from fedspa.learning.layers import Problem, Unsound, layer_problems, may_draw, plain_values, require_module
from fedspa.learning.tasks import CustomLoss, OutputTask, PerPerson, Task

_FAILURES = 6  # layers at which a pass is made to fail
_TOGETHER, _PLACE = 4, 1  # examples of a batch, and the one in the middle that is compared
_KEEP_NOTHING = "compute it from the example alone, in each forward pass again"
_DRAW_FROM_TORCH = "draw from torch's default generator, as torch.rand does, which has a seed for each example"
_NO_SPEC_AUGMENT = "`module.config.apply_spec_augment = False` switches off SpecAugment, which draws them"
_NOT_REACHED = (
    "uses its parameters {} otherwise than by their registration (through a dict, list, closure or another object), "
    "where engines cannot pass them other values: their gradients would differ from plain autograd's"
)
_REACH = "read them in `forward` as attributes of the layer that registers them, and keep no second reference to them"
_FINITE = "it must be finite: look at the task's loss, and at divisions and logarithms in its forward pass"
_RESTORE = "restore what a forward pass sets in a `finally:`, or set it at the start of each pass"


@dataclass(frozen=True, slots=True)
class Trial:
    """The problems found. `draws` says that an example's gradient draws from torch's default generator, as Dropout
    does: that is allowed where each example has a seed of its own."""

    problems: list[Problem]
    draws: bool


def check(module: nn.Module, example: object = None) -> list[Problem]:
    """List what keeps a module from being trained privately.

    Nothing is trained and nothing is released.

    Args:
        module: The module, which is left as it was.
        example: A batch as the module takes it: a tensor for `module(x)`, a tuple for `module(*x)`, a dict for
            `module(**x)`. Use synthetic numbers or public records. The module is then also run, on a copy, with the
            example and with synthetic ones of its shapes: that finds state that is kept from one example to the next,
            and state that is left by a pass that raises an error (which engines that do not call the module allow).
            Without an example, only kinds and modes of layers are checked.

    Returns:
        A `Problem` for each; none where the module can be trained as it is.

    Raises:
        ConfigError: `module` is no module, or `example` is no batch of tensors.

    Examples:
        >>> import fedspa, torch
        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        >>> [(problem.layer, problem.kind) for problem in fedspa.check(module, torch.rand(2, 4))]
        [('1', 'BatchNorm1d')]
    """
    require_module(module)
    problems = list(layer_problems(module))
    if example is None:
        return problems
    # With the known problems fixed, others can be found as well.
    try:
        fixed, _ = replace_layers(module)
    except Exception as error:  # torch cannot copy all that a module may hold
        why = f"cannot be copied, and only copies are tried ({one_line(error)})"
        fix = "keep what cannot be copied, such as open files and locks, outside of it"
        return problems or [Problem("", type(module).__name__, why, fix)]
    # A module without known problems is tried itself: a copy's closures lead to the parameters of the original.
    rest = fixed if problems else module
    layers = dict(rest.named_modules())
    for problem in layer_problems(rest):
        layers[problem.layer or ""].training = False
    if any(layer_problems(rest)):
        return problems
    x = _tree(example)
    example_spec = Examples(x, torch.zeros(count(x)))
    task = CustomLoss(_any_loss)
    found = trial(rest, example_spec, task).problems
    if not any(problem.unsound for problem in found):
        found = found + failures(rest, example_spec, task)
    return problems + found


def try_gradients(module: nn.Module, example_spec: Examples, task: Task | None = None) -> bool:
    """Raise `Unsound` for a module that has no gradients, keeps state or draws from elsewhere than torch's default
    generator; warn if it mixes the examples of a batch. Return whether it draws from that generator.

    Synthetic examples have the layout of `example_spec`, which must not be private.
    """
    FlatModel(module, task)  # refuses what is known by name, before anything is copied
    found = trial(module, example_spec, task)
    for problem in found.problems:
        if problem.unsound:
            raise Unsound(problem)
        warn(str(problem), MixingWarning)
    return found.draws


def try_failures(module: nn.Module, example_spec: Examples, task: Task | None = None) -> None:
    """Raise `Unsound` for a module that keeps state where it raises an error. For engines that call the module."""
    for problem in failures(module, example_spec, task):
        raise Unsound(problem)


def try_scores(module: nn.Module, example_spec: Examples, task: Task | None = None) -> None:
    """Raise a ConfigError for a module that keeps state, or draws from elsewhere, in eval mode, in which agents score.
    The examples are records."""
    repeat = _ScoreRepeat(module, task)
    with generators_kept(), _forward_passes(module):
        examples = synthetic_examples(example_spec, module, task, every=True)
        for problem in repeat.problems(examples) or repeat.failures(examples):
            raise ConfigError(f"in eval mode, in which agents score, {problem}")


def failures(module: nn.Module, example_spec: Examples, task: Task | None = None) -> list[Problem]:
    """Find state that is left by passes that raise an error half-way, as for an unknown token. A trial of gradients
    must have found nothing."""
    repeat = _ForwardRepeat(module, task) if is_large(module) else _Repeat(module, task)
    with generators_kept(), _forward_passes(module):
        return repeat.failures(synthetic_examples(example_spec, module, task, every=True))


def trial(module: nn.Module, example_spec: Examples, task: Task | None = None) -> Trial:
    """Run all checks of gradients, on copies and on a CPU, where the same example has the same gradient to the bit. On
    a GPU sums are made in another order each time, which is no state.

    Of a large module few gradients are computed, in float32. State is then looked for in forward passes too, with every
    synthetic example and in the module's own precision.
    """
    with generators_kept(), one_example_a_time():
        repeat = _Repeat(module, task)
        examples = synthetic_examples(example_spec, module, task)
        found = repeat.problems(examples)
    if not found and is_large(module):
        with generators_kept(), _forward_passes(module):
            examples = synthetic_examples(example_spec, module, task, every=True)
            found = _ForwardRepeat(module, task).problems(examples)
    with generators_kept(), one_example_a_time():
        if not found:  # a module that keeps nothing can be tried itself
            found = list(_disagreements(module, task, examples))
        elif repeat.no_gradient:  # plain autograd may have one, of parameters that θ does not reach
            found = [each for each in _disagreements(module, task, examples) if each.fix == _REACH] or found
        if not found and not isinstance(task, PerPerson):  # a person's records may mix: they are one example
            found = _mixing(module, examples)
        return Trial(found, repeat.draws)


@contextmanager
def _forward_passes(module: nn.Module) -> Iterator[None]:
    """Set how torch computes forward passes of single examples. A large body has oneDNN, without which one in bfloat16
    takes twenty times as long; the same pass has the same bits all the same."""
    with torch_threads(1) if is_large(module) else one_example_a_time():
        yield


def _disagreements(module: nn.Module, task: Task | None, examples: list[Examples]) -> Iterator[Problem]:
    """Find the parameters that the module reaches by another way than their registration."""
    model = FlatModel(module, task)
    try:
        require_agreement(
            model,
            examples,
            lambda theta, x, y, chosen: model.per_example_gradients(theta, x, y)[:, chosen],
            mode=partial(in_float32, module),
        )
    except Disagreement as error:
        if not error.parameters:
            yield Problem("", type(module).__name__, "gives every synthetic example a gradient that is nan", _FINITE)
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in error.parameters):
            names = [name for name in error.parameters if name.rpartition(".")[0] == layer]
            yield Problem(layer, type(module.get_submodule(layer)).__name__, _NOT_REACHED.format(listed(names)), _REACH)


class _Repeat:
    """The bitwise repeat test: one example's gradient is computed again and again, at two θ, with others between."""

    _of = "gradient"

    def __init__(self, module: nn.Module, task: Task | None) -> None:
        self._module, self._task = module, task
        # By its kind too: no synthetic example may reach a Dropout.
        self.draws = any(may_draw(layer) for layer in module.modules())
        self._found: dict[tuple[str | None, str], Problem] = {}
        self.no_gradient = False

    def problems(self, examples: list[Examples]) -> list[Problem]:
        try:
            asked = self._first_accepted(examples[0], examples[-1])
            # The second copy sees others before the one that is asked for: what the first example of all leaves behind
            # shows only there.
            models = self._fresh(), self._fresh()
        except Exception as error:  # the user's forward may raise anything
            self.no_gradient = True
            why = f"has no {self._of} for an example made like {layout(examples[-1].x)} ({one_line(error)})"
            if type(self._task) is CustomLoss and self._task.function is not _any_loss:
                self._add(None, why, "its loss must be made of what the module gives, without `.detach()` or `.item()`")
            else:
                self._add("", why, "it must take such examples and give what the loss can be made of")
            return list(self._found.values())
        others = [example for example in examples if example is not asked]
        theta = models[0].flatten()
        # At a second θ too: where weights start at zero, what lies behind them does not show in a gradient.
        moved = theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).to(theta)
        for at, between in ((theta, others), (moved, others[:2])):
            if self._differs(models, at, asked, between) and not self._found:
                why = f"gives an example another {self._of} once others were seen, or each time that it is asked"
                self._add("", why, f"it must keep nothing of an example, and {_DRAW_FROM_TORCH}")
        return list(self._found.values())

    def failures(self, examples: list[Examples]) -> list[Problem]:
        """Repeat after passes that fail at some of the layers, the last of them behind the module, as its loss may."""
        asked, model = self._first_accepted(examples[0], examples[-1]), self._fresh()
        other, theta = next(example for example in examples if example is not asked), model.flatten()
        layers = model.module.named_modules()
        names = [name for name, layer in layers if not isinstance(layer, torch.jit.ScriptModule)]  # takes no hooks
        first, held = self._asked(model, theta, asked)
        for name in [*names[1 :: -(-len(names) // _FAILURES)], ""]:
            self._fail(model, theta, other, name)
            again, now = self._asked(model, theta, asked)
            for layer, variable in _changed(held, now):
                why = f"leaves something of an example behind where it raises an error for it, in '{variable}'"
                self._add(layer, why, _RESTORE)
            if not self._found and (first is None or again is None or not same_bits(first, again)):
                why = f"gives an example another {self._of} once it has raised an error for one before it"
                self._add("", why, _RESTORE)
        return list(self._found.values())

    def _differs(
        self, models: tuple[FlatModel, FlatModel], theta: Tensor, asked: Examples, others: list[Examples]
    ) -> bool:
        """Return whether the gradient differs, or what the module holds after it."""
        first, held = self._asked(models[0], theta, asked)
        differs = False
        for number, model in enumerate(models):
            for other in others[-1:-3:-1] if number else others:  # two examples are enough to come before it
                with suppress(Exception):  # one that a synthetic example raises costs that one its gradient
                    self._gradient(model, theta, other)
                again, now = self._asked(model, theta, asked)
                places = _changed(held, now)
                for place in places:
                    self._add_kept(place, now.get(place, ()))
                differs |= bool(places) or first is None or again is None or not same_bits(first, again)
        return differs

    def _fail(self, model: FlatModel, theta: Tensor, example: Examples, layer: str) -> None:
        """Run a pass that ends in an error behind a layer. Switches are restored, as engines do."""

        def fail(*_: object) -> None:
            raise RuntimeError("a trial")

        switches, given = Switches(), theta.clone()
        torch.default_generator.manual_seed(SEED)
        handle = model.module.get_submodule(layer).register_forward_hook(fail)
        try:
            with suppress(Exception), self._precision():
                self._value(model, given, *_clones(example))
        finally:
            handle.remove()
            switches.put_back()
        self._check_theta(model, given, theta)

    def _first_accepted(self, *examples: Examples) -> Examples:
        """Return the first that has a gradient; a synthetic one need not, as where a special token is missing."""
        for example in examples:
            try:
                model = self._fresh()
                theta = model.flatten()
                self._gradient(model, theta, example)
                if self.draws:
                    self._check_backward(model, theta, example)
                return example
            except Exception as error:
                failed = error
        raise failed

    def _check_backward(self, model: FlatModel, theta: Tensor, example: Examples) -> None:
        """An example's seed is for its forward pass: a backward pass may not draw."""
        both = torch.get_rng_state()
        torch.default_generator.manual_seed(SEED)
        with self._precision():
            model.mean_loss(theta.clone().requires_grad_(), *example)
        if not torch.equal(both, torch.get_rng_state()):
            self._add("", "draws random numbers in its backward pass", "draw them in the forward pass and keep them")

    def _asked(self, model: FlatModel, theta: Tensor, asked: Examples) -> tuple[Tensor | None, _State]:
        gradient: Tensor | None = None
        with suppress(Exception):
            gradient = self._gradient(model, theta, asked)
        return gradient, _state(model.module, model.task)

    def _gradient(self, model: FlatModel, theta: Tensor, example: Examples) -> Tensor:
        """Compute the gradient with the same randomness each time: torch's own generator is then no state."""
        torch.default_generator.manual_seed(SEED)
        seeded, others, given = torch.get_rng_state(), _other_generators(), theta.clone()
        with self._precision():
            gradient = self._value(model, given, *_clones(example))
        self.draws |= not torch.equal(seeded, torch.get_rng_state())
        self._check_theta(model, given, theta)
        for which, state in _other_generators().items():
            if state != others[which]:
                # Where a config of transformers does not have the switch, its models read it as on.
                masks = any(
                    getattr(getattr(each, "config", None), "apply_spec_augment", hasattr(each, "_mask_hidden_states"))
                    for each in model.module.modules()
                )
                fix = _NO_SPEC_AUGMENT if masks else _DRAW_FROM_TORCH
                self._add("", f"draws from {which}, whose numbers all examples share", fix)
        return gradient

    def _precision(self) -> AbstractContextManager[None]:
        return in_float32(self._module)

    def _value(self, model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        return model.gradient(theta, x, y)

    def _check_theta(self, model: FlatModel, given: Tensor, theta: Tensor) -> None:
        """Find the first parameter that a pass has changed."""
        for name, part in model.parts(given != theta).items() if not same_bits(given, theta) else ():
            if part.any():
                layer, _, variable = name.rpartition(".")
                self._add_kept((layer, variable), ())
                return

    def _add_kept(self, place: tuple[str | None, str], values: object) -> None:
        layer, variable = place
        if any(isinstance(value, _Drawn) for value in (values if isinstance(values, tuple) else ())):
            why = f"draws from a generator of its own, '{variable}', which all examples share"
            self._add(layer, why, _DRAW_FROM_TORCH)
        else:
            self._add(layer, f"keeps something of one example for the next, in '{variable}'", _KEEP_NOTHING)

    def _add(self, layer: str | None, why: str, fix: str) -> None:
        of = self._task if layer is None else self._module.get_submodule(layer)
        kind = of.what if isinstance(of, CustomLoss) else type(of).__name__
        self._found.setdefault((layer, why.partition("'")[0]), Problem(layer, kind, why, fix))

    def _fresh(self) -> FlatModel:
        """Copies of the module and of the task."""
        return FlatModel(copied(self._module).to("cpu"), copy.deepcopy(self._task))


class _ForwardRepeat(_Repeat):
    """The same test of outputs in place of gradients, in the module's own precision."""

    _of = "answer"

    def _precision(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _value(self, model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        if not isinstance(model.task, OutputTask):  # a loss may ask for what has a gradient
            return model.mean_loss(theta.requires_grad_(torch.is_grad_enabled()), x, y).detach()
        with torch.no_grad():
            return model.outputs(theta, x)

    def _check_backward(self, model: FlatModel, theta: Tensor, example: Examples) -> None:
        """There is no backward pass."""


class _ScoreRepeat(_ForwardRepeat):
    """The test of the outputs that scores are made of, in eval mode."""

    def _value(self, model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        with evaluating(model.module), torch.no_grad():
            return super()._value(model, theta, x, y)


class _Drawn(NamedTuple):
    """The state of a generator."""

    state: object


_State = dict[tuple[str | None, str], tuple[object, ...]]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _state(module: nn.Module, task: object) -> _State:
    """Return the values that a module's layers and its task hold, by layer and attribute; None is the task."""
    layers = dict(module.named_modules())
    known = {id(layer) for layer in layers.values()}
    state: _State = {(None, key): tuple(_values(value, set())) for key, value in vars(task).items()}
    for name, layer in layers.items():
        held = {**vars(layer), **layer._parameters, **layer._buffers}
        for key, value in held.items():
            if key not in ("_parameters", "_buffers", "_modules"):
                state[name, key] = tuple(_values(value, known))
    return state


def _values(value: object, known: set[int]) -> Iterator[object]:
    """Values that can be compared later. `known` are objects seen before, by id."""
    if isinstance(value, _PLAIN):
        yield value
    elif isinstance(value, Tensor):
        yield plain_values(value.detach()).clone() if value.layout is torch.strided else repr(value)
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, torch.Generator):
        yield _Drawn(value.get_state().numpy().tobytes())
    elif isinstance(value, np.random.Generator):
        yield _Drawn(repr(value.bit_generator.state))
    elif isinstance(value, np.random.RandomState):
        kind, keys, *rest = value.get_state()
        yield _Drawn((kind, np.asarray(keys).tobytes(), *rest))
    elif isinstance(value, random.Random):
        yield _Drawn(value.getstate())
    elif isinstance(value, set | frozenset):
        yield sorted(map(repr, value))
    elif id(value) not in known and not isinstance(value, type):
        known.add(id(value))
        parts: Mapping[object, object] | list[object] | tuple[object, ...] | deque[object]
        parts = value if isinstance(value, Mapping | list | tuple | deque) else getattr(value, "__dict__", {})
        yield len(parts)
        for part in parts.items() if isinstance(parts, Mapping) else enumerate(parts):
            yield repr(part[0])
            yield from _values(part[1], known)


def _changed(before: _State, after: _State) -> list[tuple[str | None, str]]:
    """Return where the two differ, one attribute per layer."""
    found: dict[str | None, tuple[str | None, str]] = {}
    for place in {**before, **after}:
        one, other = before.get(place), after.get(place)
        if place[0] in found or (one is None and other is None):
            continue
        same = one is not None and other is not None and len(one) == len(other) and all(map(_equal, one, other))
        if not same:
            found[place[0]] = place
    return list(found.values())


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _other_generators() -> dict[str, object]:
    """Return the states of the generators that Python and numpy share among all that runs."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


def _clones(example: Examples) -> Iterator[Tree]:
    return (mapped(lambda leaf: leaf.detach().clone(), tree) for tree in example)


def _mixing(module: nn.Module, examples: list[Examples]) -> list[Problem]:
    """Warn of a module that gives an example another output in a batch than alone, in the modes of its layers or in
    eval mode. Engines that separate examples take each alone, so that the guarantee holds; but the module is evaluated
    in batches. Dropout draws other numbers for a batch: it is left out, and a module that still draws is compared in
    eval mode only."""
    alone, batch = examples[_PLACE].x, joined([example.x for example in examples[:_TOGETHER]])
    try:
        mixes = _mixes(module, alone, batch)
    except Exception:  # only a loss of the user's own knows how to call it
        return []
    if not mixes:
        return []
    why = (
        "gives an example another output in a batch than alone; examples are trained one by one, so that the guarantee "
        "holds, but such a model trains otherwise than it evaluates"
    )
    fix = "make each output of its own example alone (batch_first=True, GroupNorm, no mean over the first dimension)"
    return [Problem("", type(module).__name__, why, fix, unsound=False)]


def _mixes(module: nn.Module, alone: Tree, batch: Tree) -> bool:
    if not is_large(module):
        with suppress(Exception):  # some modules are made for one precision only
            # In double precision, where rounding cannot be mistaken for mixing.
            return _differs_in_batch(copied(module).to("cpu").double(), in_float64(alone), in_float64(batch), 1e-7)
    with in_float32(module):
        return _differs_in_batch(copied(module).to("cpu"), alone, batch, 1e-3)


def _differs_in_batch(module: nn.Module, alone: Tree, batch: Tree, tolerance: float) -> bool:
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
        elif isinstance(layer, nn.RReLU):
            layer.training = False
    for evaluated in (False, True):
        if evaluated:
            module.eval()
        before = torch.get_rng_state()
        with torch.no_grad():
            pairs = list(zip(_tensors(returned(module, alone)), _tensors(returned(module, batch))))
        if torch.equal(before, torch.get_rng_state()) and not all(_same_row(*pair, tolerance) for pair in pairs):
            return True
    return False


def _same_row(alone: Tensor, together: Tensor, tolerance: float) -> bool:
    """Return whether the example's row is the same, where examples are the first dimension of both."""
    if alone.ndim == 0 or alone.shape[1:] != together.shape[1:] or len(alone) not in (1, len(together)):
        return True
    row = together if len(alone) == len(together) else together[_PLACE : _PLACE + 1]
    return close(alone, row, tolerance)


def _tensors(found: object) -> list[Tensor]:
    """Return the tensors in what a module returns."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, Mapping):
        return [tensor for part in found.values() for tensor in _tensors(part)]
    if isinstance(found, tuple | list):
        return [tensor for part in found for tensor in _tensors(part)]
    logits = getattr(found, "logits", None)
    return [logits] if isinstance(logits, Tensor) else []


def _tree(example: object) -> Tree:
    if isinstance(example, Tensor):
        return example
    if isinstance(example, Mapping):
        return {str(key): _tree(part) for key, part in example.items()}
    if isinstance(example, tuple | list):
        return tuple(_tree(part) for part in example)
    raise ConfigError(
        f"the example holds a {type(example).__name__}; it must be a tensor, or a tuple or dict of tensors"
    )


def _any_loss(module: nn.Module, example: Tree) -> Tensor:
    """Return a loss of every number that the module gives, each with a weight of its own."""
    assert isinstance(example, tuple)
    found = [values for values in _tensors(returned(module, example[0])) if values.requires_grad]
    if not found:
        raise ConfigError("what the module gives has no gradient: is it under torch.no_grad, or detached?")
    return torch.stack(
        [(values * torch.cos(torch.arange(values.numel()).view(values.shape))).sum() for values in found]
    ).sum()
