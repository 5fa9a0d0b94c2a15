import json

from fedspa.audit.result import Check, Report


def _check(name, unit, claimed, seen, holds=True, confidence=0.99):
    return Check(name, unit, claimed, seen, confidence, holds, "")


def test_headline_is_the_nearest_attack_while_all_hold():
    report = Report(
        (
            _check("pair", "mu", 1.0, 1.0, confidence=1.0),
            _check("far", "epsilon", 2.0, 0.1),
            _check("near", "mu", 1.0, 0.9),
            _check("shape", "deviation", 1.0, 0.99),
        ),
        1e-4,
    )
    assert report.holds
    assert report.headline.name == "near"


def test_headline_is_a_breach_before_a_departure():
    report = Report(
        (
            _check("shape", "deviation", 1.0, 50.0, holds=False),
            _check("breach", "mu", 1.0, 1.2, holds=False),
            _check("near", "mu", 1.0, 0.9),
        ),
        1e-4,
    )
    assert not report.holds
    assert report.headline.name == "breach"


def test_a_count_above_a_claim_of_zero_is_the_worst_there_is():
    report = Report((_check("a", "count", 0.0, 1.0, holds=False), _check("b", "deviation", 1.0, 9.0, holds=False)), 0.1)
    assert report.headline.name == "a"


def test_json_has_the_four_figures_and_the_checks():
    report = Report((_check("near", "mu", 1.0, 0.9),), 1e-4, ("a note",))
    parsed = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert parsed["claimed"] == 1.0
    assert parsed["lower_bound"] == 0.9
    assert parsed["confidence"] == 0.99
    assert parsed["holds"] is True
    assert parsed["notes"] == ["a note"]
    assert set(parsed["checks"][0]) >= {"name", "claimed", "lower_bound", "confidence", "holds", "detail"}
