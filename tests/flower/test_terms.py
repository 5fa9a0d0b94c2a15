"""Terms on the way to an agent: back as they were, or refused."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import BINOMIAL_PLAN, GAUSSIAN_PLAN

from fedspa.algorithms import Terms, chosen
from fedspa.flower.terms import VERSION, Announcement, TermsError, from_record, record_model, to_record
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.runs.sections import Task

SIZES = {"dimension": 650, "clip_value": 0.3, "batch": 20, "records": 100, "participations": 3}
PLAN = replace(GAUSSIAN_PLAN, **SIZES, active=130, clip="l2", local_steps=4)
TERMS = Terms(
    round=2,
    mask="per-agent",
    mask_seed=None,
    local_lr=0.1,
    steps=PLAN,
)
FREE = NoPlan(650, 130, "poisson", 20, 4)
GIVEN = Announcement(
    run="0123456789abcdef" * 2,
    number=1,
    algorithm="fedspa",
    model="logistic",
    task=Task(),
    classes=10,
    features="",
    coding="int",
    mask_seed=bytes(range(16)),
    noise="secure",
    terms=TERMS,
)


@pytest.mark.parametrize("given", ["GIVEN", "CPSGD"])
def test_terms_say_what_they_protect(given):
    announced = globals()[given]
    persons = replace(announced, terms=replace(announced.terms, steps=replace(announced.terms.steps, unit="person")))
    assert from_record(to_record(persons)) == persons
    for unit in ("", "people", 1, b"person"):
        with pytest.raises(TermsError, match=r"^unit is"):
            from_record(ConfigRecord(dict(to_record(announced)) | {"unit": unit}))


CPSGD_PLAN = replace(BINOMIAL_PLAN, **SIZES, bits=4, trials=9000, agents=10)
CPSGD = replace(
    GIVEN,
    algorithm="cpsgd",
    terms=replace(
        TERMS,
        mask="shared",
        mask_seed=bytes(range(16)),
        steps=CPSGD_PLAN,
    ),
)


SUMMED = replace(
    GIVEN,
    terms=replace(
        TERMS,
        mask="shared",
        mask_seed=bytes(range(16)),
        steps=DiscreteGaussianPlan(650, 130, 0.3, 100, 3, 500, "add-remove", 1e-3, 3, 1, 10),
    ),
    attempt=2,
    cohort=("east", "north", "south", "west"),
    binding=bytes(range(32)),
)


def test_there_and_back_with_a_cohort():
    assert SUMMED.adversary == "secure-aggregation"
    assert from_record(to_record(SUMMED)) == SUMMED
    in_sums = replace(CPSGD.terms, steps=replace(CPSGD_PLAN, adversary="secure-aggregation", members=3, colluders=1))
    binomial = replace(CPSGD, terms=in_sums, cohort=SUMMED.cohort, binding=SUMMED.binding)
    assert from_record(to_record(binomial)) == binomial


def test_a_sum_is_no_algorithm_of_another_adversary():
    with pytest.raises(TermsError, match=r"adversary|is missing|unknown key"):
        from_record(ConfigRecord(dict(to_record(GIVEN)) | {"adversary": "secure-aggregation"}))


@pytest.mark.parametrize(("key", "value"), [("active", 649), ("sampling", "poisson"), ("local_steps", 2)])
def test_parts_that_disagree_with_the_plan_are_refused_by_name(key, value):
    """cpSGD's plan decides these; the record says them once more."""
    with pytest.raises(TermsError, match=f"{key} is {value!r}; the plan of the same terms has"):
        from_record(ConfigRecord(dict(to_record(CPSGD)) | {key: value}))


LAYERED = replace(
    GIVEN, terms=replace(TERMS, mask="fixed", mask_seed=GIVEN.mask_seed, layers=((600, 100), (40, 20), (10, 10)))
)


SHARED = replace(GIVEN, terms=replace(TERMS, mask="shared", mask_seed=GIVEN.mask_seed))


@pytest.mark.parametrize("announced", [GIVEN, CPSGD, SHARED, LAYERED], ids=["given", "cpsgd", "shared", "layered"])
def test_there_and_back(announced):
    assert from_record(to_record(announced)) == announced


def test_there_and_back_without_privacy():
    plain = replace(
        GIVEN,
        algorithm="fedavg",
        coding="f32",
        noise=None,
        terms=replace(TERMS, steps=FREE),
    )
    record = to_record(plain)
    assert "noise_multiplier" not in record
    assert from_record(record) == plain


# One wrong value at a time; each must be refused, with the key or its rule named.
BAD = {
    "version": [0, 2, 3, -1],
    "editions": ["", "mask 2", "mask", "\n" * 1000, 1],
    "run": ["", "0" * 31, "g" * 32, "../../etc/passwd", "0" * 33],
    "number": [-1, True, 1.0],
    "round": [-1, 2**31, 2**62, 1.0, "2"],
    "dimension": [0, -5, 2**31, 650.0, 129],
    "active": [0, -1, 651, 1.5],
    "mask": ["", "mine"],
    "mask_seed": [b"", bytes(15), bytes(17), "seed"],
    "layer_sizes": [[650], [1.5], "650", 650],
    "layer_active": [[130], ["x"], b"", -1],
    "sampling": ["shuffled"],
    "batch": [0, -1, 101, 2.5],
    "local_steps": [0, -3, 1.0],
    "local_lr": [0.0, -1.0, float("nan"), float("inf"), 1],
    "algorithm": ["sgd", "fedavg"],
    "coding": ["pickle"],
    "classes": [-1, 10**7],
    "features": ["pixels", 1],
    "model": ["x" * 201],
    "model_seed": [b"", bytes(7), bytes(16), 0],
    "constants": [[1.0], [1, 2, 3, 4, 5], ["x"] * 5, [1.0] * 6, 1.0],
    "private": [False, 1],
    "unit": ["", "people", 1],
    "records": [0, 19, -1],
    "participations": [0, -1],
    "clip": ["none"],
    "clip_value": [0.0, float("nan"), -1.0],
    "noise_multiplier": [0.0, -1.0, float("nan"), float("inf")],
    "neighbours": ["none"],
    "delta": [0.0, 1.0, 0.01, float("nan")],
    "noise": ["none", ""],
    "options": ["", "[]", "nope", '{"keep": 0.5}', "{" * 20_000, 1],
    "adversary": ["", "server", "secure-aggregation"],
    "attempt": [0, 2, -1, 2**31, 1.0],
    "scored": [-1, 65, 1.0, True],
    "local_optimizer": ["rmsprop", 1],
    "local_beta1": [-0.1, 1.0, 1],
    "local_beta2": [0.4, 1.0],
    "local_kappa": [0.0, 1e11],
    "recovery": [1, "yes", True],  # nothing is added up here
    "cohort": [["north", "south"], [1, 2], ["x" * 65], "north"],
    "binding": [bytes(32), bytes(31), ""],
    "task": [
        "",
        "regression",
        "{}x",
        '{"name": 3}',
        '{"nme": "regression"}',
        '{"options": {"huber": NaN}}',
        '{"options": {"huber": 2.0}}',
        "[" * 100_000,
    ],
}


BAD_CPSGD = {
    "bits": [0, 17, 4.0],
    "trials": [0, 2**31],
    "adversary": ["server"],
    "agents": [0],
    "records": [0],
    "batch": [101],
    "active": [649],
    "mask": ["per-agent"],
    "sampling": ["poisson"],
    "local_steps": [2],
    "delta": [0.5],
    "noise_multiplier": [1.0],
    "algorithm": ["fedspa"],
}
BAD_SUMMED = {
    "adversary": ["local"],
    "cohort": [["x" * 65], [1, 2, 3], ["north"] * 10_001],
    "binding": [bytes(31)],
    "attempt": [0],
    "members": [0],
    "colluders": [3],
    "algorithm": ["fedavg"],
    "most": [2],
    "bound": [0],
}
BAD_LAYERED = {
    "layer_sizes": [[600, 40, 11], [600, 50]],
    "layer_active": [[100, 41, -11], [100, 20, 11]],
    "mask": ["shared"],
}
ALL_BAD = [
    (announced, key, value)
    for announced, table in ((GIVEN, BAD), (CPSGD, BAD_CPSGD), (SUMMED, BAD_SUMMED), (LAYERED, BAD_LAYERED))
    for key, values in table.items()
    for value in values
]


@pytest.mark.parametrize(
    ("announced", "key", "value"), ALL_BAD, ids=[f"{place}-{key}" for place, (_, key, _) in enumerate(ALL_BAD)]
)
def test_one_bad_value_is_refused(announced, key, value):
    assert announced is not GIVEN or key in to_record(announced)
    with pytest.raises(TermsError):
        from_record(ConfigRecord(dict(to_record(announced)) | {key: value}))


def test_every_key_is_needed_and_no_other_allowed():
    whole = dict(to_record(GIVEN))
    assert set(BAD) == set(whole)  # the list above leaves none out
    for key in whole:
        with pytest.raises(TermsError):
            from_record(ConfigRecord({k: v for k, v in whole.items() if k != key}))
    with pytest.raises(TermsError, match="sensitivity"):
        from_record(ConfigRecord({**whole, "sensitivity": 0.001}))


def test_terms_of_another_fedspa_are_told_by_their_version():
    """Before their keys are looked at: another version may have other keys."""
    other = {key: value for key, value in to_record(GIVEN).items() if key != "features"} | {"version": 2}
    with pytest.raises(TermsError, match=r"terms of version 2; this agent reads 1: upgrade one end"):
        from_record(ConfigRecord(other))


def test_other_keys_are_another_version():
    """Whoever changes the keys changes the version, and then this number."""
    given = {"": GIVEN, "cpsgd: ": CPSGD, "sums: ": SUMMED}
    keys = sorted({prefix + key for prefix, announced in given.items() for key in to_record(announced)})
    assert (VERSION, hashlib.sha256(" ".join(keys).encode()).hexdigest()[:8]) == (1, "892267b8")


def limits_of(announcement: Announcement) -> dict[str, tuple[float, float]]:
    """Least and most of every number in a record, from the model by which it is read."""
    model = record_model(chosen(announcement.algorithm, announcement.adversary).mechanism)
    numbers = {key for key, value in to_record(announcement).items() if type(value) in (int, float)} - {"version"}
    found = {}
    for key in numbers:
        bounds = {type(each).__name__: each for each in model.model_fields[key].metadata}
        found[key] = bounds["Ge"].ge, bounds["Le"].le
    return found


LIMITS = limits_of(GIVEN)
NUMBERS = [(announced, key) for announced in (GIVEN, CPSGD, SUMMED) for key in sorted(limits_of(announced))]


@pytest.mark.parametrize(
    ("announcement", "key"), NUMBERS, ids=[f"{a.algorithm}-{a.adversary}-{key}" for a, key in NUMBERS]
)
def test_every_number_has_a_least_and_a_most(announcement, key):
    """From the model itself: a new number without limits fails here, and in every reading."""
    kind, (least, most) = type(to_record(announcement)[key]), limits_of(announcement)[key]
    beyond = [most * 1.001 + 1, least - 1] if kind is int else [most * 1.001, least * 0.999, -least]
    extremes = [-(2**63), 2**63 - 1] if kind is int else [-1e308, 1e308, 5e-324, math.inf, -math.inf, math.nan, 0.0]
    for value in (*(kind(value) for value in beyond), *extremes):
        record = to_record(announcement)
        record[key] = value
        with pytest.raises(TermsError, match=f"^{key} is .*it must be|^{key} is .*finite"):
            from_record(record)


def test_the_limits_leave_room_for_every_update():
    """No single number within its limits keeps an update from being written; all together may, see below."""
    for key in ("local_lr", "clip_value", "noise_multiplier", "local_steps"):
        for value in LIMITS[key]:
            for noise in ("secure", "exact"):
                for coding in ("f32", "int"):
                    record = to_record(replace(GIVEN, coding=coding, noise=noise))
                    record[key] = value
                    terms = from_record(record).terms
                    assert 0 < terms.update_noise < terms.update_bound < 3.4e38


def test_terms_under_which_no_update_can_be_written_are_refused_before_the_spend():
    many = {"records": 2**31 - 1, "batch": 2**31 - 1, "delta": 1e-10, "bound": 2**24}  # sums beyond 64-bit integers
    with pytest.raises(TermsError, match="no update can be written"):
        from_record(ConfigRecord(dict(to_record(SUMMED)) | many))


def test_more_layers_than_any_model_has_are_refused():
    sizes, active = [650] + [0] * 10_000, [130] + [0] * 10_000
    record = dict(to_record(LAYERED)) | {"layer_sizes": sizes, "layer_active": active}
    with pytest.raises(TermsError, match=r"layer_sizes is .* at most 10000"):
        from_record(ConfigRecord(record))


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=20), st.binary(max_size=20), st.booleans()
)


@given(st.dictionaries(st.sampled_from(sorted(BAD)), VALUES, max_size=6))
def test_any_record_is_terms_or_a_terms_error(changes):
    record = to_record(GIVEN)
    for key, value in changes.items():
        record[key] = value
    try:
        read = from_record(record)
    except TermsError:
        return
    assert from_record(to_record(read)) == read
