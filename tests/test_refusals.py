"""How long a refusal for want of a place answers others."""

import pytest
from cosyvoice_triton.refusals import LastRefusal

from tests.support.waiting import Clock


def test_a_refusal_answers_those_who_come_within_a_tenth_of_a_second_and_those_who_waited() -> None:
    clock = Clock(now := 100.0)
    refusal = LastRefusal(clock)
    refusal.note(error := ValueError("full"))
    clock.now = now + 0.099
    with pytest.raises(ValueError) as refused:
        refusal.check()
    assert refused.value is error
    clock.now = now + 0.101
    refusal.check()
    refusal.check(since=now + 0.1)  # who came after it
    assert refusal.error(since=now) is error
