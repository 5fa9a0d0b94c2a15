"""Secure aggregation on Flower: whole cohorts, and whatever keeps one from being whole or honest. Training ends, or
says why, and nobody reveals more than its policy admits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedspa.agent import participate
from fedspa.agent.ledger.ledger import Ledger
from fedspa.errors import ConfigError, FedspaError
from fedspa.flower.transport import FlowerTransport
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum

from .local_grid import POLICY, LocalGrid
from .test_resume import Killed, die_in_round, honest
from .test_strategy import CPSGD, reply, theta

SUMS: dict[str, Any] = {
    "federation.per_round": 4,
    "algorithm.local_steps": 1,
    "algorithm.batch": 100,
    "algorithm.mask": "shared",
    "privacy.noise_multiplier": 1.5,
    "privacy.adversary": "secure-aggregation",
    "privacy.members": 3,
    "privacy.colluders": 1,
    "flower.quorum": "",
}
TRUST = "min_honest = 2\nmax_worst_case = 20.0\n"


def write_roster(path: Path, keys: dict[str, SecretKey]) -> Path:
    lines = "".join(f'{name} = "{key.public.hex()}"\n' for name, key in keys.items())
    path.write_text("[members]\n" + lines)
    return path


@pytest.fixture
def clinics(deployment: LocalGrid, tmp_path: Path) -> LocalGrid:
    """The four agents with keys, a roster each, and policies that admit sums. Nodes are in another order than names."""
    keys = {f"site-{i}": SecretKey.generate() for i in range(4)}
    nodes = {}
    for i, (_, site) in enumerate(sorted(deployment.nodes.items(), reverse=True)):
        home = tmp_path / site["agent"]
        keys[site["agent"]].save(home / "site.key")
        roster = write_roster(home / "roster.toml", keys)
        policy = POLICY.format(epsilon=8.0).replace("max_compression = 0.5", "max_compression = 1.0")
        (home / "policy.toml").write_text(policy + TRUST)
        nodes[100 + i] = {**site, "key": str(home / "site.key"), "roster": str(roster)}
    grid = LocalGrid(nodes, deployment.run_config | SUMS)
    grid.run_config["flower.roster"] = str(write_roster(tmp_path / "server.toml", keys))
    return grid


def asked(grid: LocalGrid, kind: str = "train") -> list[Message]:
    return [message for message in grid.sent if message.metadata.message_type == kind]


def spent(tmp_path: Path) -> list[int]:
    found = []
    for i in range(4):
        with Ledger.open(tmp_path / f"site-{i}/ledger.sqlite", create=False) as ledger:
            found.append(sum(ledger.spent(f"site-{i}").values()))
    return found


def rounds(tmp_path: Path) -> list[int]:
    return [json.loads(line)["agents"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the server reads in each round, beside the sum of what was masked for it."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    plain: dict[tuple[int, int], list[np.ndarray]] = {}
    upload, values = participate.upload, MaskedSum.values

    def masking(numbers, session, name, secret):
        plain.setdefault((session.round, session.attempt), []).append(numbers)
        return upload(numbers, session, name, secret)

    def reading(self):
        total = values(self)
        found.append((total, sum(plain[self.session.round, self.session.attempt])))
        return total

    monkeypatch.setattr(participate, "upload", masking)
    monkeypatch.setattr(MaskedSum, "values", reading)
    return found


BINOMIAL = CPSGD | {"privacy.noise_multiplier": "", "algorithm.batch": 20, "algorithm.mask": "per-agent"}


@pytest.mark.parametrize(
    "changes",
    [{}, BINOMIAL],
    ids=["fedspa", "cpsgd"],
)
def test_a_run_of_sums(clinics, train, tmp_path, sums, changes):
    if changes is BINOMIAL:
        for i in range(4):
            text = POLICY.format(epsilon=8.0).replace("add-remove", "replace-one").replace("l2", "coordinate")
            text = text.replace("multiplier = 0.8", "multiplier = 0.001")
            (tmp_path / f"site-{i}/policy.toml").write_text(text + TRUST)
    clinics.run_config |= changes
    summary = train(clinics)
    assert summary["private"]
    assert summary["dropped"] == {}
    assert summary["epsilon"] < summary["epsilon_worst_case"]
    assert len(sums) == 3
    assert all(np.array_equal(read, added) for read, added in sums)
    assert spent(tmp_path) == [3] * 4
    for i in range(4):
        with Ledger.open(tmp_path / f"site-{i}/ledger.sqlite", create=False) as ledger:
            (event,) = ledger.spent(f"site-{i}")
            assert (event.members, event.colluders) == (3, 1)


def test_what_leaves_is_a_name_or_masked_words_and_all_are_told_of_one_cohort(clinics, train):
    train(clinics)
    records = [dict(message.content[kind]) for message in clinics.replies for kind in message.content]
    names = [record["name"] for record in records if "name" in record]
    payloads = [record["payload"] for record in records if "payload" in record]
    assert sorted(names) == [f"site-{i}" for i in range(4)]
    assert len(payloads) == 12
    assert len(records) == 16
    assert all(payload[:4] == b"FSPS" for payload in payloads)
    # One size for all; the words are as good as uniform: no byte of a body is the rule.
    (size,) = {len(payload) for payload in payloads}
    body = np.frombuffer(b"".join(payload[56:] for payload in payloads), np.uint8)
    assert abs(body.mean() - 127.5) < 6 * 74 / np.sqrt(len(body))
    assert size < 2 * 4 * 130
    for t in range(3):
        questions = [message for message in asked(clinics) if message.metadata.group_id == str(t)]
        terms = [message.content["terms"] for message in questions]
        assert {tuple(each["cohort"]) for each in terms} == {tuple(f"site-{i}" for i in range(4))}
        assert len({each["binding"] for each in terms}) == 1
        numbers = {message.metadata.dst_node_id: message.content["terms"]["number"] for message in questions}
        assert numbers == {100: 3, 101: 2, 102: 1, 103: 0}  # by name, whatever the nodes' ids


def test_a_silent_member_voids_the_round_and_is_left_out_of_the_next(clinics, train, tmp_path):
    clinics.fault = lambda node, question, answer: (
        [] if node == 102 and question.metadata.message_type == "train" else [answer()]
    )
    summary = train(clinics)
    assert summary["dropped"] == {"silent": 2, "void-missing": 2}
    assert rounds(tmp_path) == [0, 3, 0]  # left out of one turn, then asked again
    assert spent(tmp_path) == [3, 0, 3, 3]
    assert any("2 rounds gave no sum" in warning for warning in summary["warnings"])
    assert summary["participations_max"] == 3


def test_a_member_that_cannot_be_spared_ends_the_run_with_its_name(clinics, train, tmp_path):
    clinics.fault = lambda node, question, answer: (
        [] if node == 102 and question.metadata.message_type == "train" else [answer()]
    )
    with pytest.raises(
        FedspaError, match=r"3 rounds in a row gave no sum \(1 of 4 members .*: site-1\).*resume"
    ) as caught:
        train(clinics, privacy__members=4, federation__rounds=6)
    assert "\n" not in str(caught.value)
    assert rounds(tmp_path) == [0, 0, 0]
    clinics.fault = honest
    assert train(clinics, flower__resume=True)["rounds"] == 6
    assert rounds(tmp_path) == [0, 0, 0, 4, 4, 4]


def spoilt(question: Message, answer: Message, how: str) -> Message:
    """A message of this very session whose words are somebody's own."""
    import zlib

    data = bytearray(answer.content["update"]["payload"])
    count = question.content["terms"]["active"]
    bits = data[5]
    if how == "all":
        data[56:] = np.random.default_rng(0).integers(0, 256, len(data) - 56).astype(np.uint8).tobytes()
        data[-1] = 0
    else:  # only values: the check words are honest
        body = int.from_bytes(data[56:], "little")
        for word in range(count):
            body ^= (1 << (bits - 1)) << (word * bits)
        data[56:] = body.to_bytes(len(data) - 56, "little")
    data[52:56] = zlib.crc32(data[56:], zlib.crc32(data[:52])).to_bytes(4, "little")
    return reply(question, payload=bytes(data))


@pytest.mark.parametrize(("how", "code"), [("all", "void-check"), ("values", "void-bound")])
def test_garbage_voids_the_round(clinics, train, tmp_path, how, code):
    clinics.fault = lambda node, question, answer: [
        spoilt(question, answer(), how) if node == 101 and question.metadata.group_id == "1" else answer()
    ]
    summary = train(clinics)
    assert summary["dropped"] == {code: 1}
    assert rounds(tmp_path) == [4, 0, 4]
    assert theta(tmp_path / "run").isfinite().all()


def answer_of(grid: LocalGrid, node: int, question: Message, **changes: Any) -> dict[str, Any]:
    """What the node says to the same question with other terms."""
    terms = ConfigRecord(dict(question.content["terms"]) | changes)
    asked = Message(
        RecordDict({"theta": question.content["theta"], "terms": terms}), dst_node_id=node, message_type="train"
    )
    return dict(grid.answer(asked).content["update"])


def test_a_server_that_shows_two_cohorts_gets_no_sum(clinics, train, tmp_path, monkeypatch):
    """Two members are told of three, the two others of all four, each with a binding that fits: what they send cannot
    be added up, and no member pays for more than it was asked."""
    original = FlowerTransport._announce

    def two_faced(self, terms, number, session, cohort=()):
        if session is not None and number < 2:
            members = {self.name(number): self.public_key(number) for number in (0, 1, 2)}
            session = self._state.server.session(self.run, session.attempt, members, terms, "secure")
        return original(self, terms, number, session, cohort)

    monkeypatch.setattr(FlowerTransport, "_announce", two_faced)
    with pytest.raises(FedspaError, match="3 rounds in a row gave no sum"):
        train(clinics, federation__rounds=6, privacy__members=3)
    assert set(rounds(tmp_path)) == {0}
    dropped = [json.loads(line)["dropped"] for line in (tmp_path / "run/replies.jsonl").read_text().splitlines()]
    assert dropped[0]["payload-binding"] == 2


def question_of(clinics, train, group: str) -> Message:
    """A whole training, and what node 103 was asked in one round of it."""
    questions: list[Message] = []

    def watch(node, question, answer):
        if node == 103 and question.metadata.group_id == group:
            questions.append(question)
        return [answer()]

    clinics.fault = watch
    train(clinics)
    (question,) = questions
    return question


def test_asked_again_with_another_cohort_or_for_an_old_round_a_member_refuses(clinics, train, tmp_path):
    """The server shows one cohort, keeps the answer, and asks for the same attempt with another; or it was restored
    from an old copy and asks for a round that its members answered long ago."""
    question = question_of(clinics, train, "2")
    old = next(m for m in asked(clinics) if (m.metadata.group_id, m.metadata.dst_node_id) == ("0", 103))
    assert answer_of(clinics, 103, old) == {"refusal": "stale"}
    first = answer_of(clinics, 103, question)
    assert first == answer_of(clinics, 103, question)
    assert "payload" in first
    # Its own binding is held against what it was told: any other cohort without the right one is refused at once.
    others = answer_of(clinics, 103, question, cohort=["site-0", "site-1", "site-2"])
    assert others == {"refusal": "aggregation"}
    assert spent(tmp_path) == [3] * 4


def test_a_member_that_lost_its_answer_voids_the_round(clinics, train, tmp_path):
    die_in_round(clinics, 1, 2)
    with pytest.raises(Killed):
        train(clinics)
    clinics.fault = honest
    for outbox in tmp_path.glob("site-*/ledger.sqlite.outbox"):
        for file in outbox.iterdir():
            file.unlink()
    summary = train(clinics, flower__resume=True)
    assert summary["dropped"] == {"refused-spent": 2, "void-missing": 1}
    assert rounds(tmp_path)[1] == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cohort": ["site-1", "site-2", "site-3"]}, "aggregation"),  # without itself
    ({"cohort": ["site-0", "site-1"]}, "aggregation"),  # too few for the plan
    ({"cohort": ["site-0", "site-1", "site-2", "server"]}, "aggregation"),  # of its own making
    ({"cohort": []}, "aggregation"),
    ({"binding": bytes(32)}, "aggregation"),
    ({"binding": b""}, "aggregation"),
    ({"members": 2, "colluders": 1}, "aggregation"),  # below the policy's min_honest
    ({"adversary": "local"}, "terms"),
    ({"cohort": ["x" * 65]}, "terms"),
    ({"cohort": [1, 2, 3]}, "terms"),
    ({"attempt": 0}, "terms"),
    ({"colluders": 3}, "terms"),
    ({"binding": b"short"}, "terms"),
]


def test_what_a_member_refuses_before_it_pays(clinics, train, tmp_path):
    die_in_round(clinics, 0, 0)
    with pytest.raises(Killed):
        train(clinics)
    (question, *_) = asked(clinics)
    node = next(node for node, site in clinics.nodes.items() if site["agent"] == "site-0")
    for changes, code in REFUSED:
        assert answer_of(clinics, node, question, **changes) == {"refusal": code}, changes
    assert spent(tmp_path) == [0] * 4


def test_a_site_with_another_key_for_a_member_says_so_before_it_pays(clinics, train, tmp_path, caplog):
    """Its roster differs from the server's: it would mask for a sum that cannot be."""
    roster = tmp_path / "site-2/roster.toml"
    lines = roster.read_text().splitlines()
    lines[1] = f'site-0 = "{SecretKey.generate().public.hex()}"'
    roster.write_text("\n".join(lines) + "\n")
    summary = train(clinics)
    assert summary["dropped"] == {"refused-aggregation": 1, "void-missing": 1}
    assert spent(tmp_path)[2] == 0
    assert rounds(tmp_path) == [0, 3, 3]
    assert "compare the digests of the rosters" in caplog.text


@pytest.mark.parametrize("lack", ["key", "policy", "member"])
def test_who_would_not_take_part_says_so_before_a_round_counts_on_it(clinics, train, tmp_path, lack):
    if lack == "key":
        node = next(site for site in clinics.nodes.values() if site["agent"] == "site-1")
        del node["key"], node["roster"]
    elif lack == "policy":
        (tmp_path / "site-1/policy.toml").write_text(POLICY.format(epsilon=8.0))
    else:  # its operator has not been told of site-3
        roster = tmp_path / "site-1/roster.toml"
        roster.write_text("\n".join(roster.read_text().splitlines()[:-1]) + "\n")
    summary = train(clinics, federation__rounds=1)
    assert summary["dropped"] == {}
    assert rounds(tmp_path) == [3]
    assert spent(tmp_path) == [1, 0, 1, 1]


def test_a_floor_above_the_policys_is_refused(clinics, train, tmp_path):
    for i in range(4):
        policy = tmp_path / f"site-{i}/policy.toml"
        policy.write_text(policy.read_text().replace("epsilon = 8.0", "epsilon = 0.9").replace("20.0", "0.95"))
    with pytest.raises(FedspaError, match=r"4 of 4 agents refuse this run \((aggregation|budget)\)"):
        train(clinics)
    assert spent(tmp_path) == [0] * 4


def test_a_node_that_takes_anothers_name_only_voids_rounds(clinics, train, tmp_path):
    """It says that it is site-1 and has no key of it; the real one comes later and is not let in."""
    clinics.nodes[99] = dict(clinics.nodes[100])
    clinics.online.add(99)

    def liar(node, question, answer):
        if node != 99:
            return [answer()]
        if question.metadata.message_type == "query":
            return [Message(RecordDict({"member": ConfigRecord({"name": "site-1"})}), reply_to=question)]
        return [reply(question, payload=bytes(100))]

    clinics.fault = liar
    summary = train(clinics)
    assert summary["dropped"] == {"payload-magic": 2, "void-missing": 2}
    assert rounds(tmp_path) == [0, 3, 0]


@pytest.mark.parametrize(
    "record",
    [{"name": "nobody"}, {"name": 7}, {"name": "site-1", "more": 1}, {"refusal": "patient 17"}, {}],
    ids=str,
)
def test_a_strange_introduction_is_none(clinics, train, tmp_path, record):
    clinics.fault = lambda node, question, answer: [
        Message(RecordDict({"member": ConfigRecord(record)}), reply_to=question)
        if node == 100 and question.metadata.message_type == "query"
        else answer()
    ]
    assert train(clinics, federation__rounds=1)["dropped"] == {}
    assert rounds(tmp_path) == [3]


@pytest.mark.parametrize("after", [2, 4])
def test_a_server_that_died_asks_the_same_cohort_for_the_same_attempt(clinics, train, tmp_path, after):
    if after == 4:  # all have answered, and nothing of it was written down
        die_in_round(clinics, 2, 0)
    else:
        die_in_round(clinics, 1, after)
    with pytest.raises(Killed):
        train(clinics)
    clinics.fault = honest
    summary = train(clinics, flower__resume=True)
    assert summary["dropped"] == {}
    assert rounds(tmp_path) == [4, 4, 4]
    assert spent(tmp_path) == [3] * 4
    assert summary["participations_max"] == 3


def test_members_who_changed_places_are_not_counted_for_each_other(clinics, train, tmp_path):
    """Another name in the server's roster gives all behind it another number, by which the server counts."""
    die_in_round(clinics, 1, 0)
    with pytest.raises(Killed):
        train(clinics)
    clinics.fault = honest
    roster = tmp_path / "server.toml"
    members = roster.read_text()
    roster.write_text(members.replace("site-3", "site-00"))
    with pytest.raises(FedspaError, match="names other members than when the run began"):
        train(clinics, flower__resume=True)
    roster.write_text(members)
    assert train(clinics, flower__resume=True)["participations_max"] == 3


def test_a_cohort_that_is_not_whole_any_more_makes_a_new_attempt(clinics, train, tmp_path, sums):
    die_in_round(clinics, 1, 2)
    with pytest.raises(Killed):
        train(clinics, federation__per_round=4)
    clinics.fault = honest
    gone = max(clinics.online)  # it has not answered yet
    clinics.online.remove(gone)
    summary = train(clinics, flower__resume=True, flower__round_timeout=2.0)
    assert [json.loads(line).get("attempt", 1) for line in (tmp_path / "run/asked.jsonl").read_text().splitlines()] == [
        1,
        1,
        2,
        1,
    ]
    # Two have paid for both attempts, and their last turn is gone: too few are left for the third round.
    assert rounds(tmp_path) == [4, 3, 0]
    assert sorted(spent(tmp_path)) == [1, 2, 3, 3]
    assert summary["dropped"] == {"no-cohort": 1}
    assert all(np.array_equal(read, added) for read, added in sums)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flower.quorum": 2}, "flower.quorum is 2; a sum needs its whole cohort"),
        ({"flower.roster": ""}, "flower.roster is missing"),
        ({"federation.agents": 5}, "federation.agents is 5, and .* has 4 members"),
    ],
)
def test_settings_that_do_not_go_with_sums(clinics, train, changes, said):
    clinics.run_config |= changes
    with pytest.raises(ConfigError, match=said):
        train(clinics)
    assert not clinics.sent


def test_what_is_no_message_is_dropped_and_its_sender_left_out(clinics, train, tmp_path):
    clinics.fault = lambda node, question, answer: [
        reply(question, payload=b"garbage") if node == 100 and question.metadata.group_id == "0" else answer()
    ]
    assert train(clinics)["dropped"] == {"payload-length": 1, "void-missing": 1}
    assert rounds(tmp_path) == [0, 3, 4]


def test_a_replay_of_an_older_round_is_no_message_of_this_one(clinics, train, tmp_path):
    kept: list[bytes] = []

    def replay(node, question, answer):
        found = answer()
        if node == 101 and question.metadata.message_type == "train":
            kept.append(found.content["update"]["payload"])
            if question.metadata.group_id == "1":
                return [reply(question, payload=kept[0])]
        return [found]

    clinics.fault = replay
    assert train(clinics)["dropped"] == {"payload-round": 1, "void-missing": 1}


def test_someone_elses_message_leaves_masks_that_do_not_cancel(clinics, train):
    kept: dict[str, bytes] = {}

    def copy(node, question, answer):
        found = answer()
        if question.metadata.group_id == "1":
            return [reply(question, payload=kept.setdefault("first", found.content["update"]["payload"]))]
        return [found]

    clinics.fault = copy
    assert train(clinics)["dropped"] == {"void-check": 1}


def test_a_simulation_that_died_with_secure_noise_is_a_new_attempt(simulation, train, tmp_path):
    """Its nodes have no outbox: they would mask other numbers with the same keystreams."""
    simulation.run_config |= SUMS | {"algorithm.batch": 360, "privacy.noise": "secure"}
    die_in_round(simulation, 1, 2)
    with pytest.raises(Killed):
        train(simulation)
    simulation.fault = honest
    train(simulation, flower__resume=True)
    lines = [json.loads(line) for line in (tmp_path / "run/asked.jsonl").read_text().splitlines()]
    assert [(line["round"], line.get("attempt", 1)) for line in lines][:3] == [(0, 1), (1, 1), (1, 2)]
