"""Interrupts are deferred, not lost; process states are read from the system."""

import os
import signal
import threading

import pytest

from labkit.launch import processes


@pytest.fixture(autouse=True)
def pythons_own_handler():
    """A shell that starts a job in the background has it ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_takes_effect_after_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), processes.interrupt_deferred():
        interrupt()
        done.append("cleaned up")
    assert done == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_happens_and_the_handler_is_back():
    before = signal.getsignal(signal.SIGINT)
    with processes.interrupt_deferred():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_exception_of_the_block_is_not_hidden():
    with pytest.raises(ValueError, match="mine"), processes.interrupt_deferred():
        raise ValueError("mine")


def test_other_threads_have_nothing_to_defer():
    outcome = []

    def work():
        with processes.interrupt_deferred():
            outcome.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [True]


def test_process_state():
    assert processes.process_state(os.getpid()) == "R"
    assert processes.process_state(2**22 + 1) is None


def test_signals_to_the_dead_are_ignored():
    processes.send_signal(2**22 + 1, signal.SIGTERM)
    processes.kill_family(2**22 + 1)
