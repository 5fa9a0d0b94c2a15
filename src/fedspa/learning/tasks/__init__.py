"""What can be learned."""

from fedspa.learning.tasks.base import Baseline, CustomLoss, Loss, Metric, ModuleLoss, OutputTask, Task
from fedspa.learning.tasks.outputs import Binary, Classification, MultiLabel, Regression
from fedspa.learning.tasks.tokens import NextToken, TokenClassification
from fedspa.learning.tasks.wrappers import PerPerson

__all__ = [
    "Baseline",
    "Binary",
    "Classification",
    "CustomLoss",
    "Loss",
    "Metric",
    "ModuleLoss",
    "MultiLabel",
    "NextToken",
    "OutputTask",
    "PerPerson",
    "Regression",
    "Task",
    "TokenClassification",
]
