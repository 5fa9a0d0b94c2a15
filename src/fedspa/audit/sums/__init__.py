"""The audit of secure aggregation, whatever the mechanism whose shares of noise are added up: its questions."""

from __future__ import annotations

from fedspa.audit.result import Question, certain
from fedspa.audit.setting import Setting
from fedspa.audit.sums import masks, retry, views
from fedspa.audit.sums.cohort import Summed
from fedspa.secagg.total import Void


def questions(setting: Setting, target: Summed) -> list[Question]:
    """A cohort whose masks do not cancel, or whose sum no honest one could have, has failed them all."""
    asked = views.noise_questions, views.attack_questions, masks.upload_questions, retry.retry_questions
    try:
        return [question for ask in asked for question in ask(setting, target)]
    except Void as void:
        return [certain("sum: words", "count", 0.0, 1.0, str(void))]
