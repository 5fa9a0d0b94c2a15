"""What can be learned."""

from fedspa.learning.tasks.base import Baseline, CustomLoss, Loss, Metric, ModuleLoss, OutputTask, PerPerson, Task
from fedspa.learning.tasks.outputs import Binary, Classification, MultiLabel, NextToken, Regression, TokenClassification

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
