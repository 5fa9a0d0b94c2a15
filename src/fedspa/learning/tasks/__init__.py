"""What can be learned."""

from fedspa.learning.tasks.base import Task
from fedspa.learning.tasks.classification import Classification
from fedspa.learning.tasks.own import Own
from fedspa.learning.tasks.regression import Regression

__all__ = ["Classification", "Own", "Regression", "Task"]
