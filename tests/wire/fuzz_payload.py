"""Coverage-guided fuzzing of the decoders with atheris: python tests/wire/fuzz_payload.py -max_total_time=600

Anything but an update that keeps its promises or a PayloadError (hostile_input.py) ends the run with the input on disk.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fedspa.wire", "fedspa.mechanisms", "fedspa.randomness"]):
    from hostile_input import check, corpus

if __name__ == "__main__":
    warnings.simplefilter("error")
    # libFuzzer leaves without a goodbye, so nothing can be tidied up after it; what it found serves the next run.
    folder = Path(tempfile.gettempdir()) / "fedspa-fuzz-decoders"
    folder.mkdir(exist_ok=True)
    for number, data in enumerate(corpus()):
        (folder / str(number)).write_bytes(data)
    limits = ["-max_len=512", "-timeout=10", "-rss_limit_mb=1024"]
    atheris.Setup([sys.argv[0], *limits, *sys.argv[1:], str(folder)], check)
    atheris.Fuzz()
