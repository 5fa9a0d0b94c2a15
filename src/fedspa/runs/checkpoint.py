"""A run's state on disk: enough to resume after a kill as if nothing had happened.

One safetensors file a checkpoint (`round-000012.safetensors`: twelve rounds are done) with the server's tensors and
everything else as JSON in the header; nothing is ever unpickled. Files are written whole or not at all. A digest finds
damage, and a damaged newest file falls back to the one before it. Its size does not grow with the rounds: their metrics
are in metrics.jsonl, of which a checkpoint of t rounds counts the first t lines.

No private key is in it: a stored key would let anyone who reads the disk subtract the noise. Seeded noise follows from
the config; for `secure` and `exact` a resumed run draws a new key and its ledger counts the interrupted round twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from fedspa import durable
from fedspa.errors import FedspaError, first_line, os_errors_as
from fedspa.runs.config import Config
from fedspa.runs.sections import Section
from fedspa.server.optimizers import ServerState

Fact = str | int
_NAME = re.compile(r"round-(\d{6,9})\.safetensors")
_KEPT_FILES = 2  # so that one may be damaged
_FORMAT = 1
# What the file's header holds of a checkpoint as it is.
_KEPT = ("run", "config", "seconds", "facts", "extra")


class CheckpointError(FedspaError):
    """No checkpoint can be read, or none that belongs to this run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The server's state after `state.round` rounds.

    `run` is the run's name in ledgers, `seconds` the time spent so far. `facts` are what was trained, beside the config
    (runs/identity.py); `extra` is the caller's own. `damaged` names newer files that could not be read.
    """

    state: ServerState
    run: str
    config: Config
    seconds: float = 0.0
    facts: Mapping[str, Fact] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()


class _Header(Section):
    """The JSON part."""

    format: Literal[1]
    round: Annotated[int, Field(ge=0)]
    run: Annotated[str, Field(min_length=1, max_length=200)]
    config: Config
    seconds: Annotated[float, Field(ge=0)]
    facts: dict[str, Fact]
    extra: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder` (made if need be), durably; then remove all but the last two.

    OSError where the disk does not take it, CheckpointError where the state is not finite: what was there before is
    still there.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.state.tensors.items()}
    if (fault := _fault(tensors)) is not None:
        raise CheckpointError(f"nothing was saved after round {checkpoint.state.round}: {fault}")
    folder.mkdir(exist_ok=True)
    header = json.dumps(
        {
            "format": _FORMAT,
            "round": checkpoint.state.round,
            **{key: getattr(checkpoint, key) for key in _KEPT},
            "config": checkpoint.config.model_dump(exclude_none=True),
        },
        allow_nan=False,
    )
    path = folder / f"round-{checkpoint.state.round:06d}.safetensors"
    metadata = {"fedspa": header, "digest": _digest(header, tensors)}
    durable.replace_tensors(path, lambda draft: save_file(tensors, draft, metadata))
    _prune(folder, checkpoint.state.round)
    return path


def load(path: Path) -> Checkpoint:
    """Return the checkpoint in one file, or a CheckpointError that says what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            names = set(file.keys())
            if "theta" not in names:
                raise CheckpointError(f"{path} is damaged: its tensors are {', '.join(sorted(names))[:80] or 'none'}")
            # Copies: a tensor that stays mapped would change under the run if the file did.
            tensors = {name: file.get_tensor(name).clone() for name in names}
        header, digest = metadata["fedspa"], metadata["digest"]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)[:200]}") from None
    if (fault := _fault(tensors)) is not None:
        raise CheckpointError(f"{path} is damaged: {fault}")
    if _digest(header, tensors) != digest:
        raise CheckpointError(f"{path} is damaged: its digest does not fit its content")
    try:
        known = _Header.model_validate_json(header)
    except (ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is no checkpoint of this fedspa: {first_line(error)[:200]}") from None
    kept: dict[str, Any] = {key: getattr(known, key) for key in _KEPT}
    return Checkpoint(state=ServerState.of_tensors(tensors, known.round), **kept)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`; None where there never was one, a CheckpointError where all are damaged
    or of another format."""
    damaged: list[str] = []
    for path in _files(folder):
        try:
            return replace(load(path), damaged=tuple(damaged))
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no whole checkpoint in {folder} ({'; '.join(damaged)}); restore one from a backup")
    return None


def _fault(tensors: Mapping[str, Tensor]) -> str | None:
    """Return why these are not the tensors of a server that can continue."""
    shape = tensors["theta"].shape
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.ndim != 1 or tensor.shape != shape or not len(tensor):
            return f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}"
        # Carries NaN and ∞ through, without a second tensor of this size.
        if not all(math.isfinite(bound) for bound in torch.aminmax(tensor)):
            return f"{name} holds NaN or ∞"
    return None


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"\0{name}\0{tensors[name].numel()}\0".encode())
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Newest first, by their number of rounds: a clock that jumped would mislead."""
    if not folder.is_dir():
        return []
    with os_errors_as(CheckpointError, f"{folder} cannot be read"):
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_rounds, reverse=True)


def _rounds(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _prune(folder: Path, newest: int) -> None:
    """Files beyond `newest` go too: a run that fell back behind them will write them anew."""
    files = _files(folder)
    kept = [path for path in files if _rounds(path) <= newest][:_KEPT_FILES]
    for path in (*(path for path in files if path not in kept), *folder.glob(f"*{durable.DRAFT}")):
        path.unlink(missing_ok=True)
