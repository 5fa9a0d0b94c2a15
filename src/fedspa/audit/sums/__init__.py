"""The audit of secure aggregation, whatever the mechanism whose shares of noise are added up: its questions."""

from __future__ import annotations

from collections.abc import Iterator

from fedspa.audit.result import Question
from fedspa.audit.setting import Setting
from fedspa.audit.sums import masks, retry, views
from fedspa.audit.sums.cohort import Summed


def questions(setting: Setting, target: Summed) -> Iterator[Question]:
    yield from views.noise_questions(setting, target)
    yield from views.attack_questions(setting, target)
    yield from masks.upload_questions(setting, target)
    yield from retry.retry_questions(setting, target)
