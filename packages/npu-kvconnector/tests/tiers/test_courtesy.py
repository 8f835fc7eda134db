"""Courtesy on a machine of two cores, which do what each test says."""

from __future__ import annotations

import pytest

from npu_kvconnector.tiers.courtesy import LOADING, STORING, Courtesy, note_step


class Machine:
    """Time, and what the cores and the thread have worked; a piece of work takes 10 ms."""

    def __init__(self, others: float, share: float = LOADING) -> None:
        self.others, self.now, self.busy, self.worked = others, 50.0, 900.0, 7.0
        self.courtesy = Courtesy(
            share, clock=lambda: self.now, worked=lambda: self.worked, busy=lambda: self.busy, cores=2
        )
        note_step(is_idle=False)

    def let_pass(self, seconds: float) -> None:
        self.now += seconds
        self.busy += self.others * seconds

    def work(self, ahead: float = 100.0) -> float:
        """Do a piece of work, rest as long as it says, and return that."""
        self.let_pass(0.01)
        self.worked += 0.01
        self.busy += 0.01
        rest = left = self.courtesy.rest(ahead)
        while left > 0.2 and self.courtesy.still_rests():  # as who rests for long does
            self.let_pass(0.2)
            left -= 0.2
        self.let_pass(min(left, 0.2))
        return rest


def look(machine: Machine) -> None:
    machine.courtesy.look()
    machine.let_pass(0.15)
    machine.courtesy.look()


@pytest.mark.parametrize("asked", [LOADING, STORING, 0.0033])
@pytest.mark.parametrize(("others", "is_short"), [(0.2, False), (0.9, False), (1.2, True), (1.8, True)])
def test_it_works_for_a_small_share_of_the_time_where_others_want_all_cores(
    others: float, is_short: bool, asked: float
) -> None:
    machine, share = Machine(others, asked), asked if is_short else 1.0
    look(machine)
    machine.work()
    began, worked = machine.now, machine.worked
    for _ in range(200):
        machine.work()
    assert (machine.worked - worked) / (machine.now - began) == pytest.approx(share, rel=0.3)


def test_what_it_takes_itself_is_not_others() -> None:
    """Beside another process that takes half a core for it, such as a store on this host."""
    machine = Machine(0.5)
    look(machine)
    assert sum(machine.work() for _ in range(200)) == 0.0


def test_an_engine_that_computes_nothing_wants_no_cores() -> None:
    machine = Machine(2.0)
    look(machine)
    machine.work()
    note_step(is_idle=True)
    assert sum(machine.work() for _ in range(20)) == 0.0
    note_step(is_idle=False)
    machine.work()
    assert machine.work() > 0.0


def test_a_long_rest_has_an_end_when_cores_are_idle_or_the_engine_is() -> None:
    machine = Machine(2.0)
    look(machine)
    assert machine.courtesy.still_rests()
    note_step(is_idle=True)
    assert not machine.courtesy.still_rests()
    note_step(is_idle=False)
    machine.others = 0.2
    machine.let_pass(0.2)
    assert not machine.courtesy.still_rests()


def test_a_load_does_not_fall_behind_its_pace() -> None:
    machine = Machine(2.0)
    look(machine)
    machine.work()
    assert machine.work(ahead=0.004) == 0.004
    assert machine.work(ahead=-1.0) == 0.0


def test_what_was_seen_long_ago_says_nothing() -> None:
    machine = Machine(2.0)
    look(machine)
    assert machine.courtesy.is_short
    machine.let_pass(10)
    machine.work()
    assert machine.work() == 0.0
