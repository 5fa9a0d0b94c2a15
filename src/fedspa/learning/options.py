"""The options of each task, [task.options] in a config. It needs no torch: configs and reports read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Error = Literal["mse", "mae", "huber"]
Weights = Annotated[list[Annotated[float, Field(ge=0, le=1e6)]], Field(min_length=1, max_length=10_000)]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of all tasks, public numbers; `OPTIONS` says which task has which.

    `scale` follows from a table's schema: how much of the targets' own unit 1 is, in which errors are reported.
    """

    weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    loss: Error = "mse"
    huber: float = 1.0
    ignore_index: int = -100
    scale: float = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any], scale: float = 1.0) -> Options:
        """Return the options that a checked [task.options] gives."""
        weights = given.get("weights")
        return cls(**{**given, "weights": None if weights is None else tuple(weights), "scale": scale})


class TaskOptions(BaseModel):
    """A task without options."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Labels(TaskOptions):
    weights: Weights | None = Field(
        None, description="Public weights of the ones of each label against its zeros, as in `[1.0, 9.0]`."
    )


class _Classes(TaskOptions):
    weights: Weights | None = Field(None, description="Public weights of the classes, as in `[1.0, 9.0]`.")
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="This share of a label goes to all classes."
    )


class _Numbers(TaskOptions):
    loss: Error = Field("mse", description="Squared, absolute or Huber's error.")
    huber: Annotated[float, Field(ge=1e-10, le=1e10)] = Field(
        1.0, description="For the loss `huber`: squared up to this error, and absolute beyond."
    )

    @model_validator(mode="after")
    def _of_huber(self) -> _Numbers:
        if self.huber != 1 and self.loss != "huber":
            raise ValueError(f"task.options.huber is {self.huber:g}, which is for loss = 'huber'; it is {self.loss!r}")
        return self


class _Tokens(TaskOptions):
    ignore_index: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        -100, description="The label of tokens that do not count."
    )


OPTIONS: dict[str, type[TaskOptions]] = {
    "classification": _Classes,
    "binary": _Labels,
    "multi-label": _Labels,
    "regression": _Numbers,
    "next-token": _Tokens,
    "token-classification": _Tokens,
}
