"""What a frozen body makes of records: made once for each when it is first asked for, and kept.

On a CPU a record goes through the body by itself, as a contiguous copy on one thread, so that its features are a
function of that record alone, to the bit. On a GPU batches of one size do.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from fedspa.errors import DataError, one_line
from fedspa.examples import Tree, count, leaves, mapped, moved, taken
from fedspa.learning.backbone import Split, bytes_of
from fedspa.learning.forward import in_modes, one_example_a_time
from fedspa.learning.layers import is_quantised

log = logging.getLogger(__name__)

MEMORY = 2 * 2**30  # bytes of features that are kept in memory; more of them lie in a file without a name
_AT_ONCE, _AT_ONCE_GPU = 16, 64  # records: between two looks at Ctrl-C, and in one batch
_SAID_EVERY = 10.0  # seconds
_CPU = torch.device("cpu")


def space_lacking(split: Split, records: int) -> str | None:
    """Why the features of so many records cannot be kept, or None if they can."""
    needed, folder = records * bytes_of(leaves(split.example_spec)), tempfile.gettempdir()
    free = shutil.disk_usage(folder).free if needed > MEMORY else needed
    if needed <= free:
        return None
    return (
        f"features of {records:,} records take {needed / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f}: let "
        "TMPDIR name a larger disk"
    )


class Features:
    """The features of records, or of persons (`data.persons`), each of whose places holds a record."""

    def __init__(
        self, split: Split, x: Tree, *, strict: bool, persons: bool = False, per_example: bool = True, threads: int = 1
    ) -> None:
        """`strict`: what the body raises for a record is a DataError. Without, such a record has features that are not
        numbers, so that its gradient counts as zero. On a GPU `per_example` keeps it from batches, too."""
        self._split, self._strict, self._threads = split, strict, threads
        # Its own: a head may have been moved since.
        self._device = next((part.device for part in (*split.body.parameters(), *split.body.buffers())), _CPU)
        split.features(moved(split.tried, self._device))  # what fails for every record fails here, for a synthetic one
        # What LLM.int8() takes for an outlier depends on all records of a batch.
        alone = per_example or self._device.type == "cpu" or is_quantised(split.body)
        self._batch = 1 if alone else _AT_ONCE_GPU
        self._counts: Tensor | None = None
        self._places = 1
        if persons:
            assert isinstance(x, dict)
            counts = x["count"]
            assert isinstance(counts, Tensor)
            self._counts, self._places = counts, next(leaves(x["records"])).shape[1]
            x = mapped(lambda leaf: leaf.flatten(0, 1), x["records"])
        self._x, self._made, self._alone = x, torch.zeros(count(x), dtype=torch.bool), Lock()
        on_disk = count(x) * bytes_of(leaves(split.example_spec)) > MEMORY
        self._kept = mapped(lambda leaf: _storage((count(x), *leaf.shape[1:]), leaf.dtype, on_disk), split.example_spec)

    def of(self, rows: Tensor | None = None) -> Tree:
        """Return the features of all examples; only those of `rows` are computed, or all of them."""
        if rows is None:
            rows = torch.arange(len(self._made) // self._places)
        with self._alone:
            if self._counts is None:
                self._make(rows)
                return self._kept
            places = rows[:, None] * self._places + torch.arange(self._places)
            there = torch.arange(self._places) < self._counts[rows, None]
            self._make(places[there])
            empty, firsts = places[~there], places[:, :1].expand_as(places)[~there]
            for leaf in leaves(self._kept):
                leaf[empty] = leaf[firsts]
        records = mapped(lambda leaf: leaf.view(-1, self._places, *leaf.shape[1:]), self._kept)
        return {"records": records, "count": self._counts}

    def _make(self, rows: Tensor) -> None:
        missing = torch.from_numpy(np.unique(rows[~self._made[rows]].numpy()))
        if not len(missing):
            return
        parts = torch.split(missing, self._batch if self._batch > 1 else _AT_ONCE)
        threads = self._threads if self._batch == 1 and self._device.type == "cpu" else 1
        began = said = time.monotonic()
        with in_modes(self._split.modes), one_example_a_time(), ThreadPoolExecutor(threads) as pool:
            try:
                done = 0
                for part, _ in zip(parts, pool.map(self._make_part, parts)):
                    done += len(part)
                    if (now := time.monotonic()) - said > _SAID_EVERY:
                        said = now
                        left = (now - began) * (len(missing) / done - 1)
                        log.info("features of %d of %d records are made; %.0f s left", done, len(missing), left)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        self._made[missing] = True

    def _make_part(self, rows: Tensor) -> None:
        if self._batch > 1:
            # Always the same number: the last one fills the batch up.
            padded = torch.cat([rows, rows[-1:].expand(self._batch - len(rows))])
            try:
                self._keep(rows, self._split.features(moved(taken(self._x, padded), self._device)))
                return
            except (Exception, SystemExit):  # one of them, but which?
                pass
        for row in rows.tolist():
            one = slice(row, row + 1)
            try:
                self._keep(torch.tensor([row]), self._split.features(moved(taken(self._x, one), self._device)))
            except (Exception, SystemExit) as error:  # whatever a record makes the body raise: no refusal may reveal it
                if self._strict:
                    raise DataError(f"the model fails on these records ({one_line(error)})") from error
                for leaf in leaves(self._kept):
                    leaf[row] = _nothing(leaf.dtype)

    def _keep(self, rows: Tensor, made: Tree) -> None:
        parts = [part[: len(rows)].cpu() for part in leaves(made)]
        for stored, part in zip(leaves(self._kept), parts):
            if part.shape != (len(rows), *stored.shape[1:]):
                raise ValueError(f"the features of a record have shape {tuple(part.shape)}")
        for stored, part in zip(leaves(self._kept), parts):
            stored[rows] = part


def _nothing(kind: torch.dtype) -> float | int | bool:
    """Return a value that no head accepts."""
    if kind.is_floating_point:
        return torch.nan
    return False if kind == torch.bool else torch.iinfo(kind).min


def _storage(shape: tuple[int, ...], kind: torch.dtype, on_disk: bool) -> Tensor:
    if not on_disk:
        return torch.empty(shape, dtype=kind)
    size = torch.empty(0, dtype=kind).element_size() * torch.Size(shape).numel()
    # It has no name, so that it is gone with the process, however that ends.
    with tempfile.TemporaryFile(prefix="fedspa-features-") as file:
        return torch.from_numpy(np.memmap(file, np.uint8, "w+", shape=(max(1, size),)))[:size].view(kind).view(shape)
