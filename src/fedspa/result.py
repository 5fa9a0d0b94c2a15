"""What a run leaves in its user's hands: the trained module, its answers and its card.

The module is built again from the config, and its parameters are read from model.safetensors, which holds no code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedspa.data import sources
from fedspa.data.columns import Schema
from fedspa.data.features import transform
from fedspa.data.plugin import GIVEN
from fedspa.data.table import features_of
from fedspa.errors import ConfigError, DataError, first_line, quoted
from fedspa.examples import Tree, layout, moved, of_layout, split
from fedspa.learning import models
from fedspa.learning.forward import evaluating, outputs
from fedspa.learning.layers import is_quantised
from fedspa.learning.tasks.named import kind_of
from fedspa.report import card
from fedspa.runs import rundir
from fedspa.runs.config import Config, load
from fedspa.runs.guarantee import shown_bytes, statement
from fedspa.runs.rundir import RoundMetrics, label, read_metrics, shown_score

_AT_ONCE = 256  # examples in a forward pass


@dataclass(frozen=True, repr=False)
class RunResult:
    """A finished run: what it reached, what it promises, and the model.

    Attributes:
        summary: Scores, guarantee, bytes and settings in one flat mapping; `summary.json` in the folder has the same.
            `summary["epsilon"]` holds together with `summary["delta"]` and what `print(result)` names beside them.
        metrics: A line per round: score, loss, ε so far, bytes.
        module: The trained `torch.nn.Module`, with its own parameter names.
        folder: Where the run's files are, `report.html` among them.

    Examples:
        >>> import fedspa
        >>> config = {"federation": {"agents": 4, "rounds": 2, "per_round": 2}, "privacy": {"epsilon": 8.0}}
        >>> result = fedspa.run(config)
        >>> again = fedspa.RunResult.load(result.folder)
        >>> again.summary["epsilon"] == result.summary["epsilon"]
        True
    """

    summary: Mapping[str, Any]
    metrics: list[RoundMetrics]
    module: nn.Module
    folder: Path = field(default_factory=Path)

    @classmethod
    def load(cls, run: Path | str, module: nn.Module | None = None) -> RunResult:
        """The result of a run that finished earlier, from its folder: of `fedspa.run`, the command line, or the server
        of a Flower federation.

        Args:
            run: The run's folder.
            module: Where the run was given its module in Python: one built as that was. Its parameters are replaced.

        Returns:
            The result, with its module in eval mode on the CPU.

        Raises:
            ConfigError: The folder holds no finished run, or the module cannot be built from it.
        """
        folder = path_of(run, "run")
        summary, trained = finished(folder, module)
        return cls(summary, list(read_metrics(folder / "metrics.jsonl")), trained.eval(), folder)

    def predict(self, x: Any) -> NDArray[Any]:
        """Return what the model answers for records.

        Args:
            x: Records as the run's data had them, a row each: a tensor, an array, or a dict or tuple of them. Where the
                run was trained on a table, also a pandas frame with the table's columns; targets need not be there.
                Images of a run with `data.features` are given as images.

        Returns:
            An answer per record: classes by number, or by name where a table's schema lists them; numbers in the
            target's own unit; truth values for several labels; a token for each position. Of a task of one's own, the
            module's outputs.

        Raises:
            DataError: The records are not made as those that the model was trained on.

        Examples:
            >>> import fedspa
            >>> from sklearn.datasets import load_digits
            >>> config = {"federation": {"agents": 4, "rounds": 2, "per_round": 2}, "privacy": {"epsilon": 8.0}}
            >>> result = fedspa.run(config)
            >>> images = load_digits().images[:5, None] / 16
            >>> result.predict(images).shape
            (5,)
        """
        schema = self._schema
        values: NDArray[Any] = kind_of(self.summary["task"]).answers(self._outputs_of(x)).numpy()
        return values if schema is None else schema.decoded(values)

    def predict_proba(self, x: Any) -> NDArray[Any]:
        """Return the probability of each class or label for records.

        They are the softmax or sigmoid of the module's outputs. Noise and clipping leave them uncalibrated as often as
        not: rank by them, and check a threshold on records of your own.

        Args:
            x: Records, as `predict` takes them.

        Returns:
            A row per record: a column per class, in the order of the classes' numbers or of the table's schema, also
            for `binary`; a column per label for `multi-label`. For tasks on tokens, such a row for each position.

        Raises:
            ConfigError: The run's task has no classes or labels.
            DataError: The records are not made as those that the model was trained on.

        Examples:
            >>> import fedspa
            >>> from sklearn.datasets import load_digits
            >>> config = {"federation": {"agents": 4, "rounds": 2, "per_round": 2}, "privacy": {"epsilon": 8.0}}
            >>> result = fedspa.run(config)
            >>> images = load_digits().images[:5, None] / 16
            >>> result.predict_proba(images).shape
            (5, 10)
        """
        found = kind_of(self.summary["task"]).probabilities(self._outputs_of(x))
        if found is None:
            raise ConfigError(
                f"task {self.summary['task']!r} has no probabilities; those with classes or labels have. Take "
                "`result.predict(x)`, or the outputs of `result.module`"
            )
        values: NDArray[Any] = found.numpy()
        return values

    def card(self) -> str:
        """The model card, as Markdown: the guarantee and what it does not cover, scores beside the baseline, the plan,
        the data's counts, settings and versions. It says what `report.html` says, from the same files.

        Returns:
            The text.
        """
        return card(self.folder)

    def save_pretrained(self, folder: Path | str) -> Path:
        """Write a Hugging Face model or `peft` adapter into a folder, as its own `save_pretrained` does, with the run's
        model card as README.md.

        Args:
            folder: The folder; files of the same names are replaced. Save the tokenizer beside the model yourself.

        Returns:
            The folder.

        Raises:
            ConfigError: The module has no `save_pretrained`, or its parameters are no longer those of the run, for
                which the card speaks.
        """
        save = getattr(self.module, "save_pretrained", None)
        if not callable(save):
            raise ConfigError(
                f"the module is a {type(self.module).__name__}, and only models of transformers and peft have "
                "save_pretrained; `model.safetensors` in the run's folder has its parameters"
            )
        _check_unchanged(self.module, self.folder)
        target = path_of(folder, "folder")
        save(str(target))
        (target / "README.md").write_text(self.card(), "utf-8")
        return target

    def __repr__(self) -> str:
        summary, name = self.summary, self.summary["score"]
        reached = f"{label(name)} {shown_score(name, summary['score_last'])}"
        if summary["baseline_answer"] is not None:
            reached += f" ({shown_score(name, summary['baseline'])} by {summary['baseline_answer']})"
        sent = f"{shown_bytes(summary['uplink_bytes'])} per agent"
        return (
            f"<RunResult: {reached} after {summary['rounds']} rounds, {sent} uploaded, in {self.folder}\n"
            f" guarantee: {statement(summary)}>"
        )

    @property
    def _schema(self) -> Schema | None:
        """Return the schema of the table that the run was trained on, if it was one."""
        return None if self.summary["schema"] is None else Schema.model_validate(self.summary["schema"])

    def _outputs_of(self, x: Any) -> Tensor:
        """Return the module's outputs for records as the run's data had them."""
        schema = self._schema
        records = features_of(x, schema) if schema is not None and hasattr(x, "columns") else sources.inputs(x, "x")
        return self._outputs(self._as_trained(records))

    def _like(self) -> Tree:
        """One example of zeros, as the module takes them."""
        return of_layout(known(self.summary, "shape of a record", self.folder))

    def _as_trained(self, x: Tree) -> Tree:
        """Records as the module takes them, or a DataError."""
        if (features := self.summary["features"]) is not None:
            if not isinstance(x, Tensor):
                raise DataError(f"x is {layout(x)} per record; the model was trained on images, one tensor")
            x = transform(features, x.to(torch.float32))
        like = self._like()
        unlike = DataError(f"x is {layout(x)} per record, a row each; the model was trained on {layout(like)}")
        return _fitted(x, like, unlike)

    def _outputs(self, x: Tree) -> Tensor:
        device = next((values.device for values in self.module.state_dict().values()), torch.device("cpu"))
        try:
            with torch.no_grad(), evaluating(self.module):
                return torch.cat([outputs(self.module, moved(few, device)).cpu() for few in split(x, _AT_ONCE)])
        except Exception as error:  # the user's module may raise anything
            raise DataError(f"the module failed on x, {layout(x)} per record ({first_line(error)})") from error


def load_model(run: Path | str, module: nn.Module | None = None) -> nn.Module:
    """The trained module of a run that finished earlier: of `fedspa.run`, the command line, or the server of a Flower
    federation. `RunResult.load` gives the whole result, with `predict` and `card`.

    A model that a config names as `package.module:function` is built by that function, so its code is imported: load
    the folders of people whose code you would run.

    Args:
        run: The run's folder.
        module: Where the run was given its module in Python: one built as that was. Its parameters are replaced.

    Returns:
        The module, in eval mode on the CPU.

    Raises:
        ConfigError: The folder holds no finished run, or the module cannot be built from it.

    Examples:
        >>> import fedspa, torch
        >>> config = {"federation": {"agents": 4, "rounds": 2, "per_round": 2}, "privacy": {"epsilon": 8.0}}
        >>> result = fedspa.run(config)
        >>> module = fedspa.load_model(result.folder)
        >>> torch.equal(module[1].weight, result.module[1].weight)
        True
    """
    return RunResult.load(run, module).module


def _fitted(x: Tree, like: Tree, unlike: DataError) -> Tree:
    """`x` with whole numbers as floats where the model takes floats; raises `unlike` where it is made otherwise. Rows
    of whole numbers may have another length than those that were trained on, as texts have."""
    if isinstance(x, Tensor) and isinstance(like, Tensor):
        if like.is_floating_point() and x.shape[1:] == like.shape[1:]:
            return x.to(like.dtype)
        if x.dtype == like.dtype and x.ndim == like.ndim and not like.is_floating_point():
            return x
    elif isinstance(x, dict) and isinstance(like, dict) and x.keys() == like.keys():
        return {key: _fitted(part, like[key], unlike) for key, part in x.items()}
    elif isinstance(x, tuple) and isinstance(like, tuple) and len(x) == len(like):
        return tuple(_fitted(part, other, unlike) for part, other in zip(x, like))
    raise unlike


def finished(folder: Path, module: nn.Module | None = None) -> tuple[dict[str, Any], nn.Module]:
    """The summary of the run in `folder`, and its trained module on the CPU: built anew, or the one that is given, with
    the run's parameters in place of its own."""
    rundir.check_is_run(folder)
    config, summary = load(folder / "config.toml"), rundir.read_summary(folder)
    if summary is None:
        raise ConfigError(
            f"the run in {folder} is not finished: there is no summary.json; `fedspa run --resume {folder}` resumes it"
        )
    if module is None:
        module = _built(config, summary, folder)
    elif not isinstance(module, nn.Module):
        raise ConfigError(f"module is a {type(module).__name__}; it must be a torch.nn.Module, built as the run's was")
    _fill(module.cpu(), folder)
    return summary, module


def _check_unchanged(module: nn.Module, folder: Path) -> None:
    """Raise where the module has other parameters than the run left, or more: its card would vouch for them."""
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")
    now = module.state_dict()
    changed = any(name not in now or not torch.equal(now[name].cpu(), values) for name, values in kept.items())
    # The file has values that go by several names under one of them; of a quantised module, what was trained only.
    places = {now[name].untyped_storage().data_ptr() for name in kept if name in now}
    added = [] if is_quantised(module) else [value for name, value in now.items() if name not in kept]
    if changed or any(value.numel() and value.untyped_storage().data_ptr() not in places for value in added):
        raise ConfigError(
            f"the module has other parameters than the run in {folder} left, and the model card is of those; take "
            f"fedspa.RunResult.load({str(folder)!r}), or the module's own save_pretrained without a card"
        )


def path_of(given: object, what: str) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise ConfigError(f"{what} is {quoted(given)}; give a path")
    return Path(given)


def known(summary: Mapping[str, Any], fact: str, folder: Path) -> Any:
    """Return what the run found of its records and module."""
    found = summary.get("provenance")
    if not isinstance(found, dict) or fact not in found:
        raise ConfigError(f"summary.json in {folder} does not say the {fact}; give the folder of a whole run")
    return found[fact]


def _built(config: Config, summary: Mapping[str, Any], folder: Path) -> nn.Module:
    name = config.model.name
    if name.startswith(GIVEN):
        raise ConfigError(
            f"the run in {folder} was given its module in Python ({name.removeprefix(GIVEN)}), which no file builds; "
            f"build it the same way: fedspa.load_model({str(folder)!r}, module=…)"
        )
    like = of_layout(known(summary, "shape of a record", folder))
    shape = tuple(like.shape[1:]) if isinstance(like, Tensor) else None
    return models.build(
        name, shape, known(summary, "number of outputs", folder) or None, config.run.seed, config.run.code
    )


def _fill(module: nn.Module, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    path = folder / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} has no model.safetensors; a finished run has one, so bring it back from a copy")
    try:
        if is_quantised(module):
            _fill_trained(module, path)
        else:
            load_model(module, path)
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({first_line(error)}); bring it back from a copy") from error
    except Exception as error:  # torch's, of names and shapes; and a module may have its own way to load
        reason = quoted(" ".join(str(error).split()))[1:-1]
        raise ConfigError(
            f"the parameters in {path} are not those of this {type(module).__name__} ({reason}); build "
            "the module as for the run"
        ) from error


def _fill_trained(module: nn.Module, path: Path) -> None:
    """Load the parameters that are trained. Quantised weights are those that the module was built with."""
    from safetensors.torch import load_file

    kept = load_file(path)
    trained = {name: values for name, values in module.named_parameters() if values.requires_grad}
    shapes = [{name: values.shape for name, values in each.items()} for each in (kept, trained)]
    if shapes[0] != shapes[1]:  # `copy_` would broadcast
        raise ValueError(f"the file has {len(kept)} trained parameters, the module {len(trained)}, or of other shapes")
    with torch.no_grad():
        for name, values in kept.items():
            trained[name].copy_(values)
