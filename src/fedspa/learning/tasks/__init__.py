"""What can be learned."""

from fedspa.learning.tasks.base import Baseline, Task
from fedspa.learning.tasks.classification import Classification
from fedspa.learning.tasks.labels import Binary, MultiLabel
from fedspa.learning.tasks.own import OfModule, Own
from fedspa.learning.tasks.person import PerPerson
from fedspa.learning.tasks.regression import Regression
from fedspa.learning.tasks.tokens import NextToken, TokenClassification

__all__ = [
    "Baseline",
    "Binary",
    "Classification",
    "MultiLabel",
    "NextToken",
    "OfModule",
    "Own",
    "PerPerson",
    "Regression",
    "Task",
    "TokenClassification",
]
