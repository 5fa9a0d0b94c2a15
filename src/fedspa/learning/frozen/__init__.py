"""What depends on no trained parameter, computed once per record and run; all else is trained on what came of it."""

from fedspa.learning.frozen.features import Features
from fedspa.learning.frozen.split import Split, split

__all__ = ["Features", "Split", "split"]
