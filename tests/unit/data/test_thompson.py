"""The Thompson selector: posteriors computed by hand, and properties of its draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.selectors.thompson import ThompsonOptions, ThompsonSelector
from rollmesh.shared.errors import CorruptSnapshot

from .builders import leveled


def selector(tasks: MemoryPool, *, seed: int = 0, **options: float) -> ThompsonSelector:
    return ThompsonSelector(pool=tasks, seed=seed, options=ThompsonOptions(**options))  # type: ignore[arg-type]


def observe(chosen: ThompsonSelector, position: int, successes: float, failures: float, times: int = 1) -> None:
    for _ in range(times):
        chosen.observe(GroupResult(position=position, successes=successes, failures=failures))


def posterior(chosen: ThompsonSelector, position: int) -> tuple[float, float]:
    alpha, beta = chosen.posterior(np.array([position]))
    return float(alpha[0]), float(beta[0])


def mean(chosen: ThompsonSelector, position: int) -> float:
    alpha, beta = posterior(chosen, position)
    return alpha / (alpha + beta)


def shares(chosen: ThompsonSelector, num_draws: int, in_flight: frozenset[int] = frozenset()) -> dict[int, float]:
    counts = Counter(chosen.draw(i, in_flight) for i in range(num_draws))
    return {position: count / num_draws for position, count in counts.items()}


def test_posterior_before_any_result_is_the_flat_level_prior() -> None:
    assert posterior(selector(leveled("1", "2"), prior_strength=4.0), 0) == (2.0, 2.0)


def test_posterior_after_one_group_is_the_hand_computed_one() -> None:
    chosen = selector(leveled("1", "1", "2"), prior_strength=4.0)
    observe(chosen, 0, successes=6.0, failures=2.0)
    # Level 1: A = 6/8, B = 2/8, m = 1.75 / 3. Prompt 0 adds its own 6 and 2; prompt 1 has the level's prior only.
    assert posterior(chosen, 0) == pytest.approx((4 * 1.75 / 3 + 6, 4 * 1.25 / 3 + 2))
    assert posterior(chosen, 1) == pytest.approx((4 * 1.75 / 3, 4 * 1.25 / 3))
    assert posterior(chosen, 2) == (2.0, 2.0)


def test_posterior_halves_evidence_after_the_half_lives() -> None:
    chosen = selector(leveled("1", "2"), prior_strength=4.0, prompt_half_life_groups=2.0, level_half_life_groups=1.0)
    observe(chosen, 0, successes=8.0, failures=0.0)
    observe(chosen, 1, successes=0.0, failures=4.0, times=2)
    # Prompt 0 was observed two groups ago, so 8 counts as 4. Level 1 has one group (A = 1, m = 2/3), because levels
    # decay separately.
    assert posterior(chosen, 0) == pytest.approx((4 * 2 / 3 + 4, 4 / 3))
    # Level 2: B = 1/2 + 1, m = 1 / 3.5. Prompt 1: 4 faded by one group (2^-1/2), then 4 more.
    assert posterior(chosen, 1) == pytest.approx((4 / 3.5, 4 * 2.5 / 3.5 + 4 * 2**-0.5 + 4))


def test_posterior_counts_no_more_own_evidence_than_the_limit() -> None:
    chosen = selector(leveled("1"), prior_strength=4.0, prompt_evidence_max=10.0)
    observe(chosen, 0, successes=12.0, failures=4.0)
    assert posterior(chosen, 0) == pytest.approx((4 * 1.75 / 3 + 7.5, 4 * 1.25 / 3 + 2.5))


def test_groups_without_a_score_change_nothing() -> None:
    chosen = selector(leveled("1"))
    before = chosen.snapshot()
    observe(chosen, 0, successes=0.0, failures=0.0)
    assert chosen.snapshot() == before


def test_draws_prefer_the_informative_prompts() -> None:
    chosen = selector(leveled("easy", "middle", "hard"), uniform_share=0.0)
    observe(chosen, 0, 16.0, 0.0, times=10)
    observe(chosen, 1, 8.0, 8.0, times=10)
    observe(chosen, 2, 0.0, 16.0, times=10)
    assert shares(chosen, 200)[1] > 0.95


def test_a_lower_target_prefers_harder_prompts() -> None:
    results = {0: (8.0, 8.0), 1: (3.0, 13.0)}
    found = {}
    for target in (0.5, 0.2):
        chosen = selector(leveled("a", "b"), uniform_share=0.0, target=target)
        for position, (successes, failures) in results.items():
            observe(chosen, position, successes, failures, times=20)
        found[target] = shares(chosen, 200)
    assert found[0.5][0] > 0.9
    assert found[0.2][1] > 0.9


@pytest.mark.row("S060", missing="Scores from the diversity of answers, and their refresh every T steps.")
def test_uniform_share_of_the_draws_is_uniform() -> None:
    levels = ["middle"] * 2 + ["hard"] * 8
    chosen = selector(leveled(*levels), uniform_share=0.25)
    for position in range(10):
        observe(chosen, position, *((8.0, 8.0) if position < 2 else (0.0, 16.0)), times=5)
    found = shares(chosen, 4000)
    # Only the uniform draws reach the hard prompts: 0.25 * 8 / 10, standard error 0.006.
    assert sum(found.get(position, 0.0) for position in range(2, 10)) == pytest.approx(0.2, abs=0.03)


def test_an_unvisited_prompt_is_drawn_with_positive_probability_without_any_uniform_share() -> None:
    chosen = selector(leveled("1", "1", "1"), uniform_share=0.0)
    observe(chosen, 0, 8.0, 8.0, times=20)
    observe(chosen, 1, 8.0, 8.0, times=20)
    assert shares(chosen, 2000)[2] > 0.01


def test_the_estimate_recovers_after_the_policy_jumps() -> None:
    chosen = selector(leveled(*["1"] * 8), level_half_life_groups=16.0, prompt_half_life_groups=32.0)
    for _ in range(25):
        for position in range(8):
            observe(chosen, position, 0.0, 16.0)
    assert mean(chosen, 7) < 0.05
    for _ in range(16):
        for position in range(7):
            observe(chosen, position, 16.0, 0.0)
    # After 112 groups = 7 short half-lives, the level is estimated as solved, and so is prompt 7, which was not drawn
    # since.
    assert mean(chosen, 0) > 0.9
    assert mean(chosen, 7) > 0.3


@pytest.mark.row("S058")
def test_fewer_groups_have_no_variance_than_with_uniform_draws_also_after_the_policy_jumps() -> None:
    """Groups of 8 over 20 solved, 10 even and 20 impossible tasks, the latter with a long history. After a jump the
    even ones are solved, and the impossible ones even. One even task is in flight, so not drawn, until the jump."""
    tasks = leveled(*["easy"] * 20, *["middle"] * 10, *["hard"] * 20)
    rates = np.repeat([1.0, 0.5, 0.0], [20, 10, 20])
    chosen = selector(tasks, level_half_life_groups=16.0, prompt_half_life_groups=32.0)
    rng = np.random.default_rng(0)
    for n in range(30, 50):
        observe(chosen, n, 0.0, 8.0, times=20)

    def zero_variance(first: int, num: int, in_flight: frozenset[int] = frozenset(), uniform: bool = False) -> float:
        found = 0
        for index in range(first, first + num):
            position = int(rng.integers(50)) if uniform else chosen.draw(index, in_flight)
            successes = int(rng.binomial(8, rates[position]))
            found += successes in (0, 8)
            if not uniform:
                observe(chosen, position, successes, 8 - successes)
        return found / num

    unvisited = 20
    assert zero_variance(0, 300, frozenset({unvisited})) < 0.5 * zero_variance(0, 300, uniform=True)
    assert shares(chosen, 1000).get(unvisited, 0.0) > 0.005
    assert np.mean([mean(chosen, n) for n in range(30, 50)]) < 0.05
    rates = np.repeat([1.0, 0.5], [30, 20])
    zero_variance(300, 100)  # about 50 of them are of the level that is even now, three half-lives
    assert zero_variance(400, 100) < 0.5 * zero_variance(0, 300, uniform=True)
    assert np.mean([mean(chosen, n) for n in range(30, 50)]) > 0.42, "without a decay of the level it is 0.36"


def test_draws_avoid_what_is_in_flight_while_anything_else_is_left() -> None:
    chosen = selector(leveled("1", "1", "1"))
    assert set(shares(chosen, 100, frozenset({0, 2}))) == {1}
    assert set(shares(chosen, 100, frozenset({0, 1, 2}))) == {0, 1, 2}


def test_a_pool_that_is_all_impossible_is_not_drawn_from_its_front() -> None:
    chosen = selector(leveled(*["1"] * 10), uniform_share=0.0)
    for position in range(10):
        observe(chosen, position, 0.0, 1e6)
    assert len(shares(chosen, 200)) == 10


def test_large_pools_are_drawn_from_everywhere_with_few_candidates() -> None:
    chosen = selector(leveled(*["1"] * 400), num_candidates=4, uniform_share=0.0)
    drawn = {chosen.draw(i, frozenset()) for i in range(400)}
    assert len(drawn) > 200
    assert max(drawn) > 350


@pytest.mark.row("S045", missing="The number of solved tasks that training made unsolved, in evaluations.")
def test_same_snapshot_and_same_facts_give_the_same_draws() -> None:
    tasks = leveled(*"1122334455")
    chosen, other = selector(tasks, seed=3), selector(tasks, seed=3)
    observe(chosen, 4, 3.0, 5.0, times=3)
    other.restore(chosen.snapshot())
    for part in (chosen, other):
        observe(part, 2, 1.0, 7.0)
    assert [chosen.draw(i, frozenset()) for i in range(50)] == [other.draw(i, frozenset()) for i in range(50)]
    assert chosen.snapshot() == other.snapshot()


def test_seeds_give_different_draws() -> None:
    tasks = leveled(*["1"] * 50)
    first, second = selector(tasks, seed=1), selector(tasks, seed=2)
    assert [first.draw(i, frozenset()) for i in range(20)] != [second.draw(i, frozenset()) for i in range(20)]


@pytest.mark.parametrize("state", [b"", b"\xc1", b"\x80", b"junk", b"\x01"])
def test_restore_refuses_what_is_not_a_snapshot_and_keeps_the_state(state: bytes) -> None:
    chosen = selector(leveled("1"))
    observe(chosen, 0, 1.0, 1.0)
    before = chosen.snapshot()
    with pytest.raises(CorruptSnapshot):
        chosen.restore(state)
    assert chosen.snapshot() == before


def test_restore_refuses_a_snapshot_of_another_pool() -> None:
    with pytest.raises(CorruptSnapshot, match="pool"):
        selector(leveled("1")).restore(selector(leveled("2")).snapshot())


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", 0.0), ("target", 1.0), ("uniform_share", 1.5), ("prior_strength", 0.0), ("num_candidates", 0)],
)
def test_options_out_of_range_name_field_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field}.*{value}"):
        ThompsonOptions(**{field: value})  # type: ignore[arg-type]
