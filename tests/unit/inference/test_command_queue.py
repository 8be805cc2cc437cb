"""The queue of commands to the compute thread."""

import threading

from rollmesh.services.inference.engines.torch.command_queue import CommandQueue


def waiter(commands: CommandQueue[int], num: int) -> threading.Thread:
    """Start a thread that sleeps in `wait`, and return it once it does."""
    thread = threading.Thread(target=commands.wait, args=(num, 20.0), daemon=True)
    thread.start()
    while commands._wake_at != num:
        thread.join(0.001)
    return thread


def test_thread_sleeps_through_commands_until_enough_wait() -> None:
    commands: CommandQueue[int] = CommandQueue()
    thread = waiter(commands, 3)
    commands.put(1, urgent=False)
    commands.put(2, urgent=False)
    thread.join(0.05)
    assert thread.is_alive()
    commands.put(3, urgent=False)
    thread.join(10)
    assert not thread.is_alive()
    assert [commands.take() for _ in range(len(commands))] == [1, 2, 3]


def test_urgent_command_wakes_it() -> None:
    commands: CommandQueue[int] = CommandQueue()
    thread = waiter(commands, 100)
    commands.put(1)
    thread.join(10)
    assert not thread.is_alive()


def test_wait_returns_at_once_if_enough_wait_already_and_after_its_timeout() -> None:
    commands: CommandQueue[int] = CommandQueue()
    commands.put(1, urgent=False)
    commands.wait(1, None)
    commands.wait(2, 0.001)
    assert len(commands) == 1


def test_old_signals_do_not_end_a_later_wait() -> None:
    commands: CommandQueue[int] = CommandQueue()
    for number in range(5):
        commands.put(number)
    commands.wait(1, None)
    while commands:
        commands.take()
    thread = waiter(commands, 1)
    thread.join(0.05)
    assert thread.is_alive()
    commands.put(9, urgent=False)
    thread.join(10)
    assert not thread.is_alive()
