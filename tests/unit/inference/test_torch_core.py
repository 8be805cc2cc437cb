"""The torch engine's core, step by step, against transformers."""

import gc
import weakref

import numpy as np
import pytest
import torch

from rollmesh.services.inference.engine import KvPolicy, ScoreResult
from rollmesh.services.inference.engines.torch import built_in_runner
from rollmesh.shared.domain.outputs import array_names
from rollmesh.shared.domain.trajectory import FinishReason

from .builders import VOCAB, Build, TinyModel, random_prompt, read_chars, version

PROMPT = [20, 33, 47, 5, 90, 61]


def test_logprobs_equal_a_transformers_forward(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    prompts = {f"r{i}": random_prompt(i, 3 + 5 * i) for i in range(8)}
    for name, prompt in prompts.items():
        run.submit(name, prompt, max_tokens=30, seed=len(prompt))
    run.run()
    for name, prompt in prompts.items():
        expected = tiny.logprobs(0, prompt + run.tokens(name))[len(prompt) :]
        np.testing.assert_allclose(run.logprobs(name), expected, atol=1e-4)
        np.testing.assert_allclose(run.logprobs_model(name), expected, atol=1e-4)


def test_greedy_equals_transformers_generate(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    run.submit("r", PROMPT, temperature=0.0, max_tokens=40)
    run.run()
    with torch.no_grad():
        expected = tiny.models[0].generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)[0, len(PROMPT) :]
    assert run.tokens("r") == expected.tolist()


def test_tempered_and_truncated_logprobs_are_those_of_the_distribution_sampled_from(
    stepper: Build, tiny: TinyModel
) -> None:
    run = stepper()
    run.submit("r", PROMPT, temperature=0.7, top_k=12, top_p=0.8, max_tokens=40)
    run.run()
    ids = PROMPT + run.tokens("r")
    with torch.no_grad():
        logits = tiny.models[0](torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1].double().numpy() / 0.7
    for row, token, logprob in zip(logits, run.tokens("r"), run.logprobs("r"), strict=True):
        order = np.argsort(-row)[:12]
        probs = np.exp(row[order] - row[order].max())
        probs /= probs.sum()
        kept = order[: int(np.searchsorted(np.cumsum(probs), 0.8)) + 1]
        assert token in kept
        expected = row[token] - np.log(np.exp(row[kept]).sum())
        assert logprob == pytest.approx(expected, abs=1e-4)


def test_recompute_in_mid_sequence_gives_the_new_weights_logprobs(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(flush_tokens=1000)
    for i in range(4):
        run.submit(f"r{i}", PROMPT + random_prompt(i, 3 * i), max_tokens=30, seed=i)
    for _ in range(12):
        run.step()
    run.activate(1, tiny.weights(1))
    run.run()
    for i in range(4):
        prompt, name = PROMPT + random_prompt(i, 3 * i), f"r{i}"
        ids, at = prompt + run.tokens(name), len(prompt)
        assert {delta.version.step for delta in run.deltas[name]} == {0, 1}
        for delta in run.deltas[name]:
            expected = tiny.logprobs(delta.version.step, ids)[at : at + len(delta.token_ids)]
            np.testing.assert_allclose(delta.logprobs, expected, atol=1e-4)
            assert delta.kv_step_oldest == delta.version.step
            at += len(delta.token_ids)


def test_keep_over_two_updates_stamps_the_oldest_step(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(flush_tokens=2)
    run.submit("old", PROMPT, max_tokens=20)
    for step in (1, 2):
        for _ in range(4):
            run.step()
        run.activate(step, tiny.weights(step % 2), KvPolicy.KEEP)
    run.step()
    run.submit("new", PROMPT, max_tokens=4)
    run.run()
    assert [(d.version.step, d.kv_step_oldest) for d in run.deltas["old"]][-1] == (2, 0)
    assert [(d.version.step, d.kv_step_oldest) for d in run.deltas["new"]][-1] == (2, 2)
    expected = tiny.logprobs(0, PROMPT + run.tokens("new"))[len(PROMPT) :]
    np.testing.assert_allclose(run.logprobs("new"), expected, atol=1e-4)


def test_mixed_cache_is_no_prefix_even_when_its_first_version_is_active_again(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(flush_tokens=1)
    run.submit("old", PROMPT, max_tokens=60)
    for step in (1, 0):
        for _ in range(6):
            run.step()
        run.activate(step, tiny.weights(step), KvPolicy.KEEP)
    run.step()
    prefix = PROMPT + run.tokens("old")[:-1]
    run.submit("new", prefix, max_tokens=4)
    run.run()
    assert run.deltas["new"][0].num_prompt_cached == 0
    np.testing.assert_allclose(
        run.logprobs("new"), tiny.logprobs(0, prefix + run.tokens("new"))[len(prefix) :], atol=1e-4
    )


@pytest.mark.row("S073")
def test_the_episodes_of_a_large_group_share_the_prefill_of_their_prompt(stepper: Build) -> None:
    """64 requests of one prompt, 16 at once: the prompt is computed far less often than once per request."""
    run, prompt = stepper(slots_max=16), random_prompt(1, 60)
    run.submit("r0", prompt, max_tokens=2)
    run.run()
    for number in range(1, 64):
        run.submit(f"r{number}", prompt, max_tokens=2, seed=number)
    run.run()
    computed = [run.deltas[f"r{number}"][0].num_prompt_prefilled for number in range(64)]
    cached = [run.deltas[f"r{number}"][0].num_prompt_cached for number in range(64)]
    assert [a + b for a, b in zip(computed, cached, strict=True)] == [len(prompt)] * 64
    assert sum(computed) < 64 * len(prompt) / 4


def test_tied_head_follows_an_update(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    run.activate(1, tiny.weights(1))
    run.step()
    run.submit("r", PROMPT, max_tokens=20)
    run.run()
    np.testing.assert_allclose(run.logprobs("r"), tiny.logprobs(1, PROMPT + run.tokens("r"))[len(PROMPT) :], atol=1e-4)


def test_late_request_gets_its_first_token_within_two_steps_while_31_decode(stepper: Build) -> None:
    run = stepper(slots_max=32)
    for i in range(31):
        run.submit(f"r{i}", random_prompt(i, 10), max_tokens=60)
    for _ in range(5):
        run.step()
    assert run.core.load().num_running == 31
    run.submit("late", random_prompt(99, 40), max_tokens=5)
    steps = 0
    while not run.deltas["late"]:
        run.step()
        steps += 1
    assert steps <= 2
    assert all(len(run.tokens(f"r{i}")) > 0 for i in range(31))


def test_long_prefix_is_computed_in_chunks_while_others_decode(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(prefill_tokens_max=16, flush_tokens=1)
    run.submit("short", PROMPT, max_tokens=40)
    run.step()
    run.submit("long", random_prompt(1, 100), max_tokens=5)
    while not run.deltas["long"]:
        before = len(run.tokens("short"))
        run.step()
        assert len(run.tokens("short")) == before + 1
    run.run()
    expected = tiny.logprobs(0, random_prompt(1, 100) + run.tokens("long"))[100:]
    np.testing.assert_allclose(run.logprobs("long"), expected, atol=1e-4)


def test_next_turn_of_a_session_computes_its_new_tokens_only(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    prefix, observation = list(PROMPT), [50, 51, 52]
    for turn in range(4):
        run.submit(f"t{turn}", prefix, session="s", max_tokens=6, seed=turn)
        run.run()
        first = run.deltas[f"t{turn}"][0]
        if turn:
            # The last sampled token was never fed, so it counts as a new token.
            assert first.num_prompt_prefilled == len(observation) + 1
            assert first.num_prompt_cached == len(prefix) - len(observation) - 1
        expected = tiny.logprobs(0, prefix + run.tokens(f"t{turn}"))[len(prefix) :]
        np.testing.assert_allclose(run.logprobs(f"t{turn}"), expected, atol=1e-4)
        prefix = prefix + run.tokens(f"t{turn}") + observation


def test_the_cache_of_ended_requests_is_no_pressure(stepper: Build) -> None:
    run = stepper()
    run.submit("a", random_prompt(1, 30), session="s", max_tokens=4)
    run.step()
    load = run.core.load()
    assert (load.kv_tokens_used, load.kv_tokens_reusable) == (30, 0)
    assert load.kv_pressure == 30 / load.kv_tokens_max
    run.run()
    load = run.core.load()
    assert (load.kv_tokens_used, load.kv_tokens_reusable, load.kv_pressure) == (33, 33, 0.0)


def test_outputs_of_mixed_requests_survive_rare_deltas_and_a_swap(stepper: Build, tiny: TinyModel) -> None:
    """A token's outputs wait until its delta, under any number of tokens per delta, and are those of the version that
    drew it."""
    for flush_tokens in (1, 5, 1000):
        run = stepper(flush_tokens=flush_tokens, prefill_tokens_max=16)
        wishes = [(("entropy", "top_k"), 3), (("hidden",), 8), ((), 8), (("top_k", "kept_mass", "mean_logprob"), 20)]
        for i, (outputs, num_top) in enumerate(wishes):
            run.submit(f"r{i}", random_prompt(i, 4 + 9 * i), max_tokens=30, seed=i, outputs=outputs, num_top=num_top)
            run.step()
        for _ in range(8):
            run.step()
        run.activate(1, tiny.weights(1))
        run.run()
        for i, (outputs, num_top) in enumerate(wishes):
            prompt, name = random_prompt(i, 4 + 9 * i), f"r{i}"
            ids, at = torch.tensor([prompt + run.tokens(name)]), len(prompt)
            for delta in run.deltas[name]:
                rows = slice(at - 1, at - 1 + len(delta.token_ids))
                with torch.no_grad():
                    out = tiny.models[delta.version.step](ids, output_hidden_states=True)
                every = torch.log_softmax(out.logits[0, rows], dim=-1)
                top = every.topk(num_top, dim=-1)
                expected = {
                    "entropy": -(every.exp() * every).sum(-1),
                    "top_k_ids": top.indices,
                    "top_k_logprobs": top.values,
                    "kept_mass": torch.ones(len(every)),
                    "mean_logprob": every.mean(-1),
                    "hidden": out.hidden_states[-1][0, rows],
                }
                assert set(delta.arrays) == set(array_names(outputs))
                for array, values in delta.arrays.items():
                    np.testing.assert_allclose(values, expected[array], rtol=2e-3, atol=1e-3, err_msg=array)
                at += len(delta.token_ids)


def test_score_in_spans_and_blocks_equals_score_at_once(
    stepper: Build, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = ("entropy", "top_k", "mean_logprob", "hidden")
    rows = [np.array(random_prompt(i, num), np.int32) for i, num in enumerate((70, 1, 33, 16))]
    weights = tiny.weights(0)
    whole = stepper().core._runner.score(weights, rows, outputs, 5)
    monkeypatch.setattr(built_in_runner, "_SCORE_SPAN", 16)
    monkeypatch.setattr(built_in_runner, "_LOGITS_MAX", 7 * VOCAB)
    in_parts = stepper().core._runner.score(weights, rows, outputs, 5)
    for row, one, other in zip(rows, whole, in_parts, strict=True):
        np.testing.assert_allclose(other["logprobs"], tiny.logprobs(0, row), atol=1e-4)
        assert set(one) == set(other) == {"logprobs", *array_names(outputs)}
        for array, values in one.items():
            np.testing.assert_allclose(other[array], values, rtol=2e-3, atol=1e-3, err_msg=array)
            assert len(values) == len(row)


def test_group_members_compute_their_common_prompt_once(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    prompt = random_prompt(7, 40)
    for i in range(16):
        run.submit(f"r{i}", prompt, seed=i, max_tokens=10)
    run.run()
    load = run.core.load()
    assert load.tokens_prefilled == 40 + 15
    assert load.tokens_prefix_hit == 15 * 39
    for i in range(16):
        expected = tiny.logprobs(0, prompt + run.tokens(f"r{i}"))[40:]
        np.testing.assert_allclose(run.logprobs(f"r{i}"), expected, atol=1e-4)
    assert len({tuple(run.tokens(f"r{i}")) for i in range(16)}) > 1


def test_prefix_entries_do_not_survive_an_update(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    run.submit("a", PROMPT, session="s", max_tokens=6)
    run.run()
    turn = PROMPT + run.tokens("a") + [40]
    run.activate(1, tiny.weights(1), KvPolicy.KEEP)
    run.step()
    run.submit("b", turn, session="s", max_tokens=6)
    run.run()
    assert run.deltas["b"][0].num_prompt_cached == 0
    np.testing.assert_allclose(run.logprobs("b"), tiny.logprobs(1, turn + run.tokens("b"))[len(turn) :], atol=1e-4)


def test_tokens_do_not_depend_on_batch_composition(stepper: Build) -> None:
    alone = stepper()
    alone.submit("r", PROMPT, seed=5, max_tokens=40)
    alone.run()
    crowd = stepper()
    for i in range(20):
        crowd.submit(f"x{i}", random_prompt(i, 4 + i), seed=i, max_tokens=5 + 3 * i, temperature=0.5 + 0.1 * i)
    for _ in range(3):
        crowd.step()
    crowd.submit("r", PROMPT, seed=5, max_tokens=40)
    crowd.run()
    assert crowd.tokens("r") == alone.tokens("r")
    np.testing.assert_allclose(crowd.logprobs("r"), alone.logprobs("r"), atol=1e-4)


@pytest.mark.row("S083")
def test_a_branch_of_a_running_sequence_copies_its_cache_and_a_cancelled_one_frees_it(
    stepper: Build, tiny: TinyModel
) -> None:
    run = stepper(flush_tokens=1)
    prompt = random_prompt(7, 40)
    run.submit("parent", prompt, max_tokens=20)
    for _ in range(8):
        run.step()
    before = run.tokens("parent")
    assert 2 < len(before) < 20, "it is running"
    branch = [*prompt, *before[:-1], (before[-1] + 1) % 90]
    run.submit("branch", branch, max_tokens=30)
    run.step()
    run.step()
    first = run.deltas["branch"][0]
    assert first.num_prompt_cached == len(branch) - 1, "only the other token is computed"
    assert run.core.load().num_running == 2
    run.core.cancel("branch")
    run.step()
    assert run.core.load().num_running == 1
    run.run()
    assert len(run.tokens("parent")) == 20
    expected = tiny.logprobs(0, prompt + run.tokens("parent"))[40:]
    np.testing.assert_allclose(run.logprobs("parent"), expected, atol=1e-4)
    load = run.core.load()
    assert load.kv_tokens_used == load.kv_tokens_reusable, "nothing holds the cache of the cancelled branch"


def test_slots_are_reused_under_pressure_without_mixing_sequences(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(slots_max=3)
    prompts = {f"r{i}": random_prompt(i % 5, 4 + 3 * (i % 7)) for i in range(24)}
    for i, (name, prompt) in enumerate(prompts.items()):
        run.submit(name, prompt, session=f"s{i % 4}", seed=i, max_tokens=4 + i % 9)
        if i % 3 == 0:
            run.step()
    run.run()
    for name, prompt in prompts.items():
        expected = tiny.logprobs(0, prompt + run.tokens(name))[len(prompt) :]
        np.testing.assert_allclose(run.logprobs(name), expected, atol=1e-4)
    assert run.core.load().num_running == run.core.load().num_waiting == 0


def test_stop_string_ends_at_the_token_that_completes_it(stepper: Build) -> None:
    free = stepper()
    free.submit("r", PROMPT, seed=3, max_tokens=60)
    free.run()
    tokens = free.tokens("r")
    at = next(i for i in range(5, 50) if tokens[i] != tokens[i + 1])
    string = read_chars(tokens[at : at + 2])
    run = stepper()
    run.submit("r", PROMPT, seed=3, max_tokens=60, stop=("never to be seen", string))
    run.run()
    assert run.tokens("r") == tokens[: at + 2]
    assert run.deltas["r"][-1].finish is FinishReason.STOP


def test_higher_priority_waits_less(stepper: Build) -> None:
    run = stepper(slots_max=1)
    run.submit("low", PROMPT, priority=0)
    run.submit("high", PROMPT, priority=1)
    while not run.deltas["high"]:
        run.step()
    assert run.deltas["low"] == []


def test_score_under_a_swap_waiting_behind_it_is_of_one_version(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(prefill_tokens_max=16)
    rows = [np.array(random_prompt(i, 12), np.int32) for i in range(5)]
    results: list[list[ScoreResult] | ValueError] = []
    run.core.score(rows, (), 0, results.append)
    run.activate(1, tiny.weights(1))
    run.run()
    (scores,) = results
    assert isinstance(scores, list)
    assert run.core.version == version(1)
    assert [result.version.step for result in scores] == [0] * 5
    for row, result in zip(rows, scores, strict=True):
        np.testing.assert_allclose(result.logprobs, tiny.logprobs(0, row), atol=1e-4)


@pytest.mark.parametrize("kv", list(KvPolicy))
def test_a_retained_version_continues_with_its_cache_and_the_others_move_on(
    stepper: Build, tiny: TinyModel, kv: KvPolicy
) -> None:
    run = stepper(flush_tokens=1)
    for name, pinned in (("pinned", 0), ("free", None)):
        run.submit(name, PROMPT, max_tokens=20, pinned=pinned)
    for _ in range(6):
        run.step()
    before = run.core.load().tokens_prefilled
    run.activate(1, tiny.weights(1), kv, retain=[0])
    run.step()
    recomputed = run.core.load().tokens_prefilled - before
    assert recomputed == (len(PROMPT) + 6 if kv is KvPolicy.RECOMPUTE else 0), "the pinned one is never computed again"
    run.run()
    assert {delta.version.step for delta in run.deltas["pinned"]} == {0}
    assert {delta.version.step for delta in run.deltas["free"]} == {0, 1}
    expected = tiny.logprobs(0, PROMPT + run.tokens("pinned"))[len(PROMPT) :]
    np.testing.assert_allclose(run.logprobs("pinned"), expected, atol=1e-4)


@pytest.mark.parametrize("prefill_tokens_max", [2048, 1])
def test_probes_are_scored_under_the_new_weights_before_these_sample(
    stepper: Build, tiny: TinyModel, prefill_tokens_max: int
) -> None:
    """More probes than fit into one micro-batch are scored between steps, so that other versions go on."""
    run = stepper(flush_tokens=1, prefill_tokens_max=prefill_tokens_max)
    run.submit("r", PROMPT, max_tokens=20)
    for _ in range(8):
        run.step()
    before = len(run.tokens("r"))
    probes, events = [np.array(PROMPT, np.int32), np.array(PROMPT[::-1], np.int32)], list[object]()
    run.core.activate(
        version(1), tiny.weights(1), KvPolicy.KEEP, lambda: events.append("active"), probes=probes, scored=events.append
    )
    assert run.core.control(), "a caller waits for the swap"
    run.core.answer()
    num_parts = 1 if prefill_tokens_max > 1 else 2
    assert len(events) == (2 if num_parts == 1 else 1)
    assert run.core.has_control is (num_parts == 2)
    assert len(run.tokens("r")) == before
    run.step()
    active, scores = events
    assert active == "active"
    assert isinstance(scores, list)
    assert [score.version for score in scores] == [version(1)] * 2
    for probe, score in zip(probes, scores, strict=True):
        np.testing.assert_allclose(score.logprobs[1:], tiny.logprobs(1, probe.tolist())[1:], atol=1e-4)
    run.run()
    assert {delta.version.step for delta in run.deltas["r"]} == {0, 1}


def test_a_step_decodes_one_batch_per_version_in_use(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(flush_tokens=1)
    for i in range(4):
        run.submit(f"old{i}", random_prompt(i, 6), max_tokens=30, pinned=0)
    run.step()
    run.activate(1, tiny.weights(1), retain=[0])
    for i in range(4):
        run.submit(f"new{i}", random_prompt(i, 6), max_tokens=30)
    run.step()
    run.step()
    before = {name: len(run.tokens(name)) for name in run.deltas}
    run.step()
    assert {name: len(run.tokens(name)) - before[name] for name in run.deltas} == dict.fromkeys(run.deltas, 1)
    run.run()
    for i in range(4):
        for name, index in ((f"old{i}", 0), (f"new{i}", 1)):
            expected = tiny.logprobs(index, random_prompt(i, 6) + run.tokens(name))[6:]
            np.testing.assert_allclose(run.logprobs(name), expected, atol=1e-4)


def test_the_memory_of_a_dropped_version_is_freed(stepper: Build, tiny: TinyModel) -> None:
    run = stepper(flush_tokens=1)
    held = []
    for step in (1, 2, 3):
        weights = tiny.weights(step % 2)
        held.append(weakref.ref(weights.embed))
        run.activate(step, weights, retain=[step - 1])
        del weights
        run.submit(f"r{step}", PROMPT, max_tokens=100, pinned=step)
        run.step()
        run.step()
    gc.collect()
    assert [ref() is not None for ref in held] == [False, True, True]
    assert run.deltas["r1"][-1].finish is FinishReason.CANCELLED
    run.core.discard(version(2))
    run.step()
    gc.collect()
    assert [ref() is not None for ref in held] == [False, False, True]


def test_a_request_for_a_version_that_was_dropped_meanwhile_is_cancelled(stepper: Build, tiny: TinyModel) -> None:
    run = stepper()
    run.activate(1, tiny.weights(1))
    run.step()
    run.submit("late", PROMPT, pinned=0)
    run.step()
    assert [delta.finish for delta in run.deltas["late"]] == [FinishReason.CANCELLED]
    results: list[object] = []
    run.core.score([np.array(PROMPT, np.int32)], (), 8, results.append, version(0))
    run.run()
    run.step()
    assert isinstance(results[0], ValueError)
