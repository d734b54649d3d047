"""Signals to training and to `difftx prepare`."""

import signal

import pytest

from difftx.commands import prepare
from difftx.parallel import multihost
from difftx.parallel.multihost import Interrupt


@pytest.fixture
def interrupt():
    # The tests may run as a background job, in which the shell ignores Ctrl-C.
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = Interrupt()
    yield interrupt
    interrupt.close()
    signal.signal(signal.SIGINT, outer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request(interrupt, number):
    assert not interrupt.requested(1)
    signal.raise_signal(number)
    assert interrupt.requested(1)
    signal.raise_signal(number)  # Counts as the same request.
    signal.raise_signal(signal.SIGINT)
    assert interrupt.requested(2)


def test_a_later_signal_acts_immediately(interrupt, monkeypatch):
    signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(multihost, "REPEAT_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_signals_after_the_save_have_no_effect(interrupt, monkeypatch):
    monkeypatch.setattr(multihost, "REPEAT_SECONDS", 0.0)
    signal.raise_signal(signal.SIGTERM)
    interrupt.ignores_signals = True
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pytest.fail("the signal had an effect")


def test_close_restores_the_previous_handlers():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    interrupt = Interrupt()
    assert signal.getsignal(signal.SIGTERM) not in before
    interrupt.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.usefixtures("interrupt")  # It restores the handlers.
def test_a_second_signal_ends_prepare_immediately():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, prepare._interrupt)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == [signal.SIG_DFL] * 2
