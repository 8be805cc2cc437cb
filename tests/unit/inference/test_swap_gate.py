import asyncio

from rollmesh.services.inference.engines.vllm.swap_gate import SwapGate


async def test_a_swap_waits_for_scores_and_holds_back_later_ones() -> None:
    gate, events = SwapGate(), []
    score_ends = asyncio.Event()

    async def score(name: str, until: asyncio.Event | None = None) -> None:
        async with gate.score():
            events.append(f"{name} begins")
            if until is not None:
                await until.wait()
            events.append(f"{name} ends")

    async def swap() -> None:
        async with gate.swap():
            events.append("swap")

    first = asyncio.create_task(score("first", score_ends))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(swap()), asyncio.create_task(swap())]
    await asyncio.sleep(0)
    later = asyncio.create_task(score("later"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (events, gate.swapping) == (["first begins"], True)
    score_ends.set()
    await asyncio.gather(first, later, *rest)
    assert events[:3] == ["first begins", "first ends", "swap"]
    assert sorted(events[3:]) == ["later begins", "later ends", "swap"]
    assert not gate.swapping


async def test_a_cancelled_swap_lets_scores_continue() -> None:
    gate = SwapGate()
    async with gate.score():
        swap = asyncio.create_task(gate.swap().__aenter__())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        swap.cancel()
        await asyncio.wait([swap])
        assert not gate.swapping
        async with asyncio.timeout(5), gate.score():
            pass
