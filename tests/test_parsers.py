"""Files that an agent trusts its budget to, under any bytes: a policy, and a ledger that was damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, verify
from fedspa.agent.policy import Policy
from fedspa.errors import FedspaError, LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent

KEYS = [
    *("epsilon", "delta", "neighbours", "min_noise_multiplier", "max_local_steps", "max_rounds", "max_compression"),
    *("clippings", "other"),
]
values = st.sampled_from(
    ["1", "0", "-1", "nan", "inf", "1e400", "true", '"l2"', '["l2"]', "[]", "[[[]]]", '"add-remove"', "0.5", "'"]
)


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_one_line(text: str) -> None:
    refused_in_one_line(lambda: Policy.parse(text))


@given(st.dictionaries(st.sampled_from(KEYS), values))
def test_any_keys_are_a_policy_or_one_line(keys: dict[str, str]) -> None:
    refused_in_one_line(lambda: Policy.parse("\n".join(f"{key} = {value}" for key, value in keys.items())))


@given(st.binary(max_size=200))
def test_any_file_is_a_policy_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_bytes(content)
    refused_in_one_line(lambda: Policy.load(path))


AGENTS = ("agent-0", "agent-1")
WRITTEN = {
    "agent-0": {GaussianEvent("poisson", 10, 600, 30, 2.0): 3},
    "agent-1": {GaussianEvent("poisson", 10, 600, 30, 2.0): 2, GaussianEvent("fixed", 5, 100, 3, 1.5): 1},
}


@cache
def ledger_and_anchor() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        with Ledger.open(path) as ledger:
            for agent, events in WRITTEN.items():
                for kind, (event, times) in enumerate(events.items()):
                    for number in range(times):
                        ledger.reserve(agent, event, "run", f"{kind}-{number}")
                        ledger.release(agent, "run", f"{kind}-{number}", "digest")
        return path.read_bytes(), Path(f"{path}.anchor").read_bytes()


def ledger_bytes() -> bytes:
    return ledger_and_anchor()[0]


def put(path: Path, content: bytes) -> None:
    """A ledger of this content beside the anchor of the whole one."""
    path.write_bytes(content)
    Path(f"{path}.anchor").write_bytes(ledger_and_anchor()[1])


def test_the_whole_one_opens(tmp_path: Path) -> None:
    put(tmp_path / "ledger.sqlite", ledger_bytes())
    assert verify(tmp_path / "ledger.sqlite") == []
    Ledger.open(tmp_path / "ledger.sqlite", create=False).close()


@settings(max_examples=150)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_ledger_is_refused_or_verify_tells(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[float, int]]
) -> None:
    """Whatever a few damaged bytes do: it fails closed, and no ledger that verifies shows another spend."""
    content = bytearray(ledger_bytes())
    for place, value in damage:
        content[int(place * len(content))] = value
    path = tmp_path_factory.mktemp("damaged") / "ledger.sqlite"
    put(path, bytes(content))
    try:
        problems = verify(path)
        with Ledger.open(path, create=False) as ledger:
            spent = {agent: dict(ledger.spent(agent)) for agent in AGENTS}
    except LedgerError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert not any("\n" in problem for problem in problems)
    assert problems or spent == WRITTEN


def test_damage_in_the_text_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, ledger_bytes().replace(b"CREATE TABLE entry", b"CREATE TABL\x80 entry"))
    with pytest.raises(LedgerError):
        Ledger.open(path, create=False)


def test_an_export_of_damage_in_the_text_of_an_event(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, ledger_bytes().replace(b'"batch":', b'"batch";'))
    with pytest.raises(LedgerError):
        export(path)


def test_damage_is_told_in_one_line(tmp_path: Path) -> None:
    content = bytearray(ledger_bytes())
    page = 2 * 4096  # the third page is the index of the table `event`
    content[page + 3 : page + 5] = (0).to_bytes(2)  # number of cells
    put(tmp_path / "ledger.sqlite", bytes(content))
    problems = verify(tmp_path / "ledger.sqlite")
    assert problems
    assert not any("\n" in problem for problem in problems)


@given(st.binary(max_size=5000))
def test_any_bytes_are_no_ledger(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "ledger.sqlite"
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.open(path)
    assert path.read_bytes() == content


def refused_in_one_line(read: Callable[[], object]) -> None:
    try:
        read()
    except FedspaError as error:
        assert "\n" not in str(error)  # noqa: PT017
