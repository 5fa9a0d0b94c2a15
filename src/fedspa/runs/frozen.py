"""What of a run's module is frozen and therefore computed once per record, and what is left to train."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedspa.examples import Examples, Tree, layout
from fedspa.learning import forward
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features, room_lacking
from fedspa.learning.tasks import Task
from fedspa.privacy.event import Unit
from fedspa.runs.config import Config


@dataclass(frozen=True)
class Frozen:
    """`trained` is what an engine trains, the module or its head, on examples made as `like`. Without a `split`, `why`
    says why there is none; "" where nothing is frozen. `scored` is the split in eval mode, if that can be cut too."""

    trained: nn.Module
    like: Examples
    split: Split | None
    scored: Split | None
    why: str

    @property
    def engine_scores(self) -> bool:
        """Whether an engine that trains may be given what is scored."""
        if self.split is None:
            return True
        return self.scored is not None and layout(self.scored.like) == layout(self.split.like)

    def told(self, reason: str) -> str:
        """Why the engine was chosen, and what was taken out before."""
        if self.split is not None:
            return f"{reason}; {self.split.description}"
        return f"{reason}; the frozen part is computed in every step: {self.why}" if self.why else reason

    def features(self, x: Tree, unit: Unit, config: Config) -> Features | None:
        """Of what agents train on."""
        if self.split is None:
            return None
        return Features(
            self.split,
            x,
            strict=not config.private,
            persons=unit == "person",
            alone=config.privacy.noise == "exact",
            threads=config.run.threads,
        )


def frozen_body(config: Config, module: nn.Module, like: Examples, task: Task, records: int) -> Frozen:
    """Of a module on records made as those `like` which one is given, for so many of them."""
    if config.run.engine == "reference":
        return Frozen(module, like, None, None, "")
    trained = split(module, like, task)
    if isinstance(trained, str):
        return Frozen(module, like, None, None, trained)
    if (lacking := room_lacking(trained, records)) is not None:
        return Frozen(module, like, None, None, lacking)
    scored: Split | str = trained
    if any(layer.training for layer in module.modules()):
        with forward.evaluating(module):
            scored = split(module, like, task)
    return Frozen(
        trained.head, Examples(trained.like, like.y), trained, scored if isinstance(scored, Split) else None, ""
    )
