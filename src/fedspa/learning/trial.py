"""A model tried on synthetic examples before it sees any: does it have gradients, and does it keep examples apart?

What one example leaves behind in a model would be in the next one's gradient, beyond any clip. And what fails for every
example must fail here, by name: once records are private, an example whose gradient fails counts as zero.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError, MixingWarning, listed, one_line, warn
from fedspa.examples import Examples, Tree, layout, mapped
from fedspa.learning.agreement import SEED, Disagreement, require_agreement
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.forward import evaluating
from fedspa.learning.mixing import mixing
from fedspa.learning.sound import Problem, Unsound, may_draw
from fedspa.learning.synthetic import synthetic_examples
from fedspa.learning.tasks import Own, PerPerson, Task
from fedspa.learning.tasks.base import OfOutputs
from fedspa.learning.threads import Switches, one_example_a_time
from fedspa.learning.traces.blame import of_function
from fedspa.learning.traces.outside import Outside
from fedspa.learning.traces.state import Drawn, State, Where, changed, of_task, parameter_at, same_bits, within
from fedspa.learning.traces.watch import first_difference, foreign_generators, generators_kept, watched

_FAILURES = 6  # layers at which a pass is made to fail
_KEEP_NOTHING = "make it of the example alone, in each forward pass anew"
_DRAW_FROM_TORCH = (
    "draw from torch's default generator, as torch.rand does: each example then has randomness of its own"
)
_NOT_REACHED = (
    "uses its parameters {} otherwise than by their registration (through a dict, list, closure or another object), "
    "where engines cannot pass them other values: their gradients would differ from plain autograd's"
)
_REACH = "read them in `forward` as attributes of the layer that registers them, and keep no second reference to them"
_FINITE = "it must be finite: look at the task's loss, and at divisions and logarithms in its forward pass"
_NO_SPEC_AUGMENT = "`module.config.apply_spec_augment = False` switches SpecAugment off, which draws them"
_PUT_BACK = "what it sets for a forward pass it must put back in a `finally:`, or make anew at the start of each"


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found. `draws` says that an example's gradient draws from torch's default generator, as Dropout does:
    sound where each example is given randomness of its own."""

    problems: list[Problem]
    draws: bool


def try_gradients(module: nn.Module, like: Examples, task: Task | None = None) -> bool:
    """Refuse a model without gradients, and a forward pass that keeps state or draws from elsewhere than torch's
    default generator; warn of one that mixes the examples of a batch. Returns whether it draws from that generator.

    Others are made as those `like` which some are given. These must not be private.
    """
    FlatModel(module, task)  # refuses what is known by name, before anything is copied
    found = trial(module, like, task)
    for problem in found.problems:
        if problem.unsound:
            raise Unsound(problem)
        warn(str(problem), MixingWarning)
    return found.draws


def try_failures(module: nn.Module, like: Examples, task: Task | None = None) -> None:
    """Refuse a module that leaves something behind where it raises an error. For engines that call the module."""
    for problem in failures(module, like, task):
        raise Unsound(problem)


def failures(module: nn.Module, like: Examples, task: Task | None = None) -> list[Problem]:
    """What is left behind of a module that raises an error half-way, as for a word that it does not know: the next
    example would find it. Of a trial of gradients there must have been no complaint."""
    return _found(_Trying(module, task), like, failures=True)


def try_scores(module: nn.Module, like: Examples, task: Task | None = None) -> None:
    """Refuse a module that keeps state, or draws from elsewhere, where agents score with it. A trial of gradients does
    not look there: in eval mode a forward pass may be another one. The examples are records."""
    trying = _Scoring(module, task)
    for failing in (False, True):
        for problem in _found(trying, like, failures=failing):
            raise ConfigError(f"in eval mode, in which agents score, {problem}")


def _found(trying: _Trying, like: Examples, *, failures: bool) -> list[Problem]:
    with generators_kept(), one_example_a_time():
        try:
            examples = trying.examples(like)
            return trying.left_by_failures(examples) if failures else trying.problems(examples)
        finally:
            trying.outside.restore()


def trial(module: nn.Module, like: Examples, task: Task | None = None) -> Trial:
    """All that is found, on copies and on a CPU, where the same example has the same gradient to the bit. On a GPU it
    need not: sums are made in another order each time, which must not be mistaken for a state."""
    with generators_kept(), one_example_a_time():
        trying = _Trying(module, task)
        try:
            examples = trying.examples(like)
            found = trying.problems(examples)
            trying.outside.restore()
            if not found:  # a module that keeps nothing can be tried itself
                found = list(_differing(module, task, examples))
            elif trying.no_gradient:  # plain autograd may have one, of parameters that θ does not reach
                found = [each for each in _differing(module, task, examples) if each.mend == _REACH] or found
            if not found and not isinstance(task, PerPerson):  # a person's records may mix: they are one example
                found = mixing(copied(module).to("cpu"), examples)
            return Trial(found, trying.draws)
        finally:
            trying.outside.restore()


def _differing(module: nn.Module, task: Task | None, examples: list[Examples]) -> Iterator[Problem]:
    """The parameters that the module reaches by another way than their registration."""
    model = FlatModel(module, task)
    try:
        require_agreement(model, examples, lambda theta, x, y, chosen: model.gradients_alone(theta, x, y)[:, chosen])
    except Disagreement as error:
        if not error.parameters:
            yield Problem("", type(module).__name__, "gives every synthetic example a gradient that is nan", _FINITE)
        for layer in dict.fromkeys(name.rpartition(".")[0] for name in error.parameters):
            names = [name for name in error.parameters if name.rpartition(".")[0] == layer]
            yield Problem(layer, type(module.get_submodule(layer)).__name__, _NOT_REACHED.format(listed(names)), _REACH)


class _Trying:
    """One example's gradient asked for again and again, at two θ and with other examples in between."""

    _of = "gradient"

    def __init__(self, module: nn.Module, task: Task | None) -> None:
        self._module, self._task = module, task
        self.outside = Outside(module, task)
        # By its kind too: Dropout may stand where none of the examples comes by.
        self.draws = any(may_draw(layer) for layer in module.modules())
        self._found: dict[tuple[str | None, str], Problem] = {}
        self.no_gradient = False

    def examples(self, like: Examples) -> list[Examples]:
        return synthetic_examples(like, self._module, self._task)

    def problems(self, examples: list[Examples]) -> list[Problem]:
        try:
            asked = self._first_taken(examples[0], examples[-1])
            # The second copy sees the others before the one that is asked for: what the first example of all leaves
            # behind shows only there.
            models = self._fresh(), self._fresh()
        except Exception as error:  # the user's forward may raise anything
            self.no_gradient = True
            why = f"has no {self._of} for an example made like {layout(examples[-1].x)} ({one_line(error)})"
            if self._is_of_task(error, examples[-1].x):
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
                self._locate(at, asked, between)
        return list(self._found.values())

    def left_by_failures(self, examples: list[Examples]) -> list[Problem]:
        """Of passes that fail at some of the layers, the last of them behind the module, as its loss may."""
        asked, model = self._first_taken(examples[0], examples[-1]), self._fresh()
        other, theta = next(example for example in examples if example is not asked), model.flatten()
        layers = model.module.named_modules()
        names = [name for name, layer in layers if not isinstance(layer, torch.jit.ScriptModule)]  # takes no hooks
        self.outside.restore()
        first, held = self._asked(model, theta, asked)
        for name in [*names[1 :: -(-len(names) // _FAILURES)], ""]:
            self._fail(model, theta, other, name)
            again, now = self._asked(model, theta, asked)
            for layer, variable, _ in changed(held, now):
                why = f"leaves something of an example behind where it raises an error for it, in '{variable}'"
                self._add(layer, why, _PUT_BACK)
            if not self._found and (first is None or again is None or not same_bits(first, again)):
                why = f"gives an example another {self._of} once it has raised an error for one before it"
                self._add("", why, _PUT_BACK)
        return list(self._found.values())

    def _fail(self, model: FlatModel, theta: Tensor, example: Examples, layer: str) -> None:
        """A pass that ends in an error behind a layer. Switches are put back, as engines do it."""

        def fail(*_: object) -> None:
            raise RuntimeError("a trial")

        switches, given = Switches(), theta.clone()
        torch.default_generator.manual_seed(SEED)
        x, y = (mapped(lambda leaf: leaf.detach().clone(), tree) for tree in example)
        handle = model.module.get_submodule(layer).register_forward_hook(fail)
        try:
            with suppress(Exception):
                self._value(model, given, x, y)
        finally:
            handle.remove()
            switches.put_back()
        if not same_bits(given, theta):
            self._add_kept(parameter_at(model.module, given != theta), given)

    def _first_taken(self, *examples: Examples) -> Examples:
        """The first that has a gradient; what was made up need not have one, as where a special token is missing."""
        for example in examples:
            try:
                model = self._fresh()
                theta = model.flatten()
                self._gradient(model, theta, example)
                if self.draws:
                    self._refuse_drawing_backward(model, theta, example)
                return example
            except Exception as error:
                failed = error
        raise failed

    def _is_of_task(self, error: Exception, x: Tree) -> bool:
        with suppress(Exception):  # a module that cannot even be copied
            return type(self._task) is Own and of_function(error, self._fresh().module, x)
        return False

    def _refuse_drawing_backward(self, model: FlatModel, theta: Tensor, example: Examples) -> None:
        """An example's seed is for its forward pass."""
        both = torch.get_rng_state()
        torch.default_generator.manual_seed(SEED)
        model.mean_loss(theta.clone().requires_grad_(), *example)
        if not torch.equal(both, torch.get_rng_state()):
            self._add("", "draws random numbers in its backward pass", "draw them in the forward pass and keep them")

    def _differs(
        self, models: tuple[FlatModel, FlatModel], theta: Tensor, asked: Examples, others: list[Examples]
    ) -> bool:
        """Whether the gradient does, or what lies in the module after it."""
        self.outside.restore()
        first, held = self._asked(models[0], theta, asked)
        differs = False
        for number, model in enumerate(models):
            if number:  # two examples are enough to come before it
                self.outside.restore()
            for other in others[-1:-3:-1] if number else others:
                with suppress(Exception):  # what it raises for a strange example costs that one its gradient
                    self._gradient(model, theta, other)
                again, now = self._asked(model, theta, asked)
                places = changed(held, now)
                for place in places:
                    self._add_kept(place, now.get(place))
                differs |= bool(places) or first is None or again is None or not same_bits(first, again)
        return differs

    def _asked(self, model: FlatModel, theta: Tensor, asked: Examples) -> tuple[Tensor | None, State]:
        gradient: Tensor | None = None
        with suppress(Exception):
            gradient = self._gradient(model, theta, asked)
        return gradient, {**within(model.module), **of_task(model.task), **self.outside.state()}

    def _gradient(self, model: FlatModel, theta: Tensor, example: Examples) -> Tensor:
        """With the same randomness for each: torch's own is then no state."""
        torch.default_generator.manual_seed(SEED)
        seeded, foreign, given = torch.get_rng_state(), foreign_generators(), theta.clone()
        x, y = (mapped(lambda leaf: leaf.detach().clone(), tree) for tree in example)
        gradient = self._value(model, given, x, y)
        self.draws |= not torch.equal(seeded, torch.get_rng_state())
        if not same_bits(given, theta):
            self._add_kept(parameter_at(model.module, given != theta), given)
        for which in (name for name, state in foreign_generators().items() if state != foreign[name]):
            self._add_drawing(which, theta, example)
        return gradient

    def _value(self, model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        return model.gradient(theta, x, y)

    def _add_kept(self, place: Where, value: object) -> None:
        layer, variable, _ = place
        if isinstance(value, Drawn):
            self._add(
                layer, f"draws from a generator of its own, '{variable}', which all examples share", _DRAW_FROM_TORCH
            )
        else:
            self._add(layer, f"keeps something of one example for the next, in '{variable}'", _KEEP_NOTHING)

    def _add_drawing(self, which: str, theta: Tensor, example: Examples) -> None:
        model = self._fresh()
        with watched(model.module) as calls, suppress(Exception):
            self._value(model, theta.clone(), *example)
        layer = next((call.layer for call in calls if which in call.drew), "")
        # Where a config of transformers does not have the switch, its models read it as on.
        masking = any(
            getattr(getattr(each, "config", None), "apply_spec_augment", hasattr(each, "_mask_hidden_states"))
            for each in model.module.modules()
        )
        fix = _NO_SPEC_AUGMENT if masking else _DRAW_FROM_TORCH
        self._add(layer, f"draws from {which}, whose numbers all examples share", fix)

    def _locate(self, theta: Tensor, asked: Examples, others: list[Examples]) -> None:
        """The layer that gives the same example something else the second time."""
        self.outside.restore()
        model, passes = self._fresh(), []
        with watched(model.module) as calls:
            for example in (asked, *others, asked):
                calls.clear()
                with suppress(Exception):
                    self._gradient(model, theta, example)
                passes.append(list(calls))
        why = f"gives an example another {self._of} once others were seen, or each time that it is asked"
        mend = f"it must keep nothing of an example, and {_DRAW_FROM_TORCH}"
        self._add(first_difference(passes[0], passes[-1], same_bits), why, mend)

    def _add(self, layer: str | None, why: str, mend: str) -> None:
        of = self._task if layer is None else self._module.get_submodule(layer)
        kind = of.what if isinstance(of, Own) else type(of).__name__
        self._found.setdefault((layer, why.partition("'")[0]), Problem(layer, kind, why, mend))

    def _fresh(self) -> FlatModel:
        """Copies of the module and of the task."""
        return FlatModel(copied(self._module).to("cpu"), copy.deepcopy(self._task))


class _Scoring(_Trying):
    """The same of what scores are made of, in eval mode."""

    _of = "answer"

    def _value(self, model: FlatModel, theta: Tensor, x: Tree, y: Tree) -> Tensor:
        with evaluating(model.module), torch.no_grad():
            return model.outputs(theta, x) if isinstance(model.task, OfOutputs) else model.mean_loss(theta, x, y)

    def _refuse_drawing_backward(self, model: FlatModel, theta: Tensor, example: Examples) -> None:
        """There is no backward pass."""
