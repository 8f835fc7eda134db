"""CircuitBreaker: a state machine beside a plain account of what it must be."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npu_kvconnector.config import GuardConfig
from npu_kvconnector.tiers.breaker import BreakerState, CircuitBreaker

CONFIG = GuardConfig(failures=3, open_seconds=2, max_open_seconds=7)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG, clock)
    for _ in range(CONFIG.failures):
        assert breaker.allows()
        breaker.fail()
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(CONFIG, Clock())
    for _ in range(10):
        breaker.fail()
        breaker.fail()
        breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert opened(Clock()).state is BreakerState.OPEN


def test_one_try_decides_and_each_failed_try_doubles_the_pause_up_to_its_limit() -> None:
    clock = Clock()
    breaker = opened(clock)
    for pause in (2, 4, 7, 7):
        clock.now += pause - 0.5
        assert not breaker.allows()
        clock.now += 0.5
        assert breaker.allows()
        breaker.begin()
        assert not breaker.allows()
        breaker.fail()
    clock.now += 7
    assert breaker.allows()
    breaker.begin()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.times_opened == 5


def test_what_was_begun_before_it_opened_does_not_close_it() -> None:
    breaker = opened(Clock())
    breaker.succeed()
    assert breaker.state is BreakerState.OPEN


class Breaker(RuleBasedStateMachine):
    """Whatever happens: open means nothing is allowed, and it is not open for longer than the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = CircuitBreaker(CONFIG, self.clock)
        self.last_failure = 0.0
        self.in_a_row = 0

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def begin(self) -> None:
        if self.breaker.allows():
            self.breaker.begin()

    @rule()
    def fail(self) -> None:
        self.breaker.fail()
        self.in_a_row += 1
        self.last_failure = self.clock.now

    @rule()
    def succeed(self) -> None:
        self.breaker.succeed()
        if self.breaker.state is BreakerState.CLOSED:
            self.in_a_row = 0

    @invariant()
    def it_opens_after_failures_alone_and_not_for_ever(self) -> None:
        if self.breaker.state is not BreakerState.CLOSED:
            assert self.in_a_row >= CONFIG.failures
        if self.clock.now >= self.last_failure + CONFIG.max_open_seconds:
            self.breaker.allows()
            assert self.breaker.state is not BreakerState.OPEN


Breaker.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_breaker = Breaker.TestCase
