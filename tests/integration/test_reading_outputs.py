"""The agent and the scorers of examples/outputs in a whole mesh: what they read equals a forward of the model over the
recorded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.config import load_train_config
from rollmesh.demo.tiny_model import build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.services.inference.engine import Emit, GenerateDelta, GenerateRequest
from rollmesh.services.inference.engines.torch.engine import TorchEngine
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.policy import PolicyClient
from rollmesh.services.reward.scorer import ScorerResult
from rollmesh.services.rollout.agent import Environment, Turn
from rollmesh.services.rollout.agents.diverse_answers import pooled
from rollmesh.services.rollout.tokenizer import load_tokenizer
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.objects import load_object
from rollmesh.shared.domain.trajectory import IntArray, Message, Role
from rollmesh.trainer.model_files import write_model_folder

from ..chaos.world import mesh_config
from .test_engine_outputs import SMALL
from .test_mesh import Operator

FOLDER = Path(__file__).parents[2] / "examples" / "outputs"
TURNS: list[tuple[IntArray, Turn]] = []
"""Prompt and turn of each generation."""
SCORED: list[tuple[IntArray, IntArray, ScoredTokens]] = []
"""Prompt, tokens and result of each scoring request of an agent or a scorer."""
ITEMS: list[tuple[ScoreItem, Any]] = []
"""What each scorer got and returned."""
FIRST_DELTAS: list[tuple[GenerateRequest, GenerateDelta]] = []
TOLERANCE = 2e-4

CarefulExample: Any = load_object("careful.py:Careful", FOLDER)
CertaintyExample: Any = load_object("certainty.py:Certainty", FOLDER)
DependenceExample: Any = load_object("certainty.py:Dependence", FOLDER)


class Careful(CarefulExample):  # type: ignore[misc]
    """The agent of the example, and a score of a word after its conversation."""

    async def run(self, task: Any, env: Environment) -> None:
        await super().run(task, env)
        await env.logprobs(env.encode("yes"), outputs=["entropy", "top_k", "mean_logprob", "hidden"])


class Certainty(CertaintyExample):  # type: ignore[misc]
    async def score(self, item: ScoreItem) -> ScorerResult:
        found: ScorerResult = await super().score(item)
        ITEMS.append((item, found))
        return found


class Dependence(DependenceExample):  # type: ignore[misc]
    async def score(self, item: ScoreItem) -> ScorerResult:
        found: ScorerResult = await super().score(item)
        ITEMS.append((item, found))
        return found


class WatchedEngine(TorchEngine):
    """Records the first delta of each request, which reports the reused prefix."""

    def submit(self, request: GenerateRequest, emit: Emit) -> None:
        def watched(delta: GenerateDelta) -> None:
            if request.request_id not in seen:
                seen.add(request.request_id)
                FIRST_DELTAS.append((request, delta))
            emit(delta)

        seen: set[str] = set()
        super().submit(request, watched)


def test_check_accepts_the_example_and_names_an_output_that_a_scorer_lacks() -> None:
    config = load_train_config(FOLDER / "config.yaml")
    assert find_mistakes(config, FOLDER) == []
    less = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, outputs=("entropy",)))
    (mistake,) = find_mistakes(less, FOLDER)
    assert str(mistake) == (
        "`rollout.outputs` must contain top_k, because `reward.scorers[1]` reads the columns [top_k_logprobs]; samples have "
        "[logprobs, entropy]"
    )


@pytest.mark.row("S037")
async def test_agents_and_scorers_read_what_the_model_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for records in (TURNS, SCORED, ITEMS, FIRST_DELTAS):
        records.clear()
    watch(monkeypatch)
    model = tmp_path / "model"
    model.mkdir()
    net = build_tiny_model(SMALL, seed=1)
    write_model_folder(net, build_tokenizer(), model)
    config = config_from_dict(MeshConfig, settings(model))
    async with Mesh(config, run_dir=tmp_path / "run") as mesh:
        await Operator(mesh).finished()
    for prompt, turn in TURNS:
        check_turn(net, prompt, turn)
    # Two turns of each episode, both after an own prompt, a word, and two pairs of the scorer.
    assert len(SCORED) >= 5 * 8
    for prompt, tokens, scored in SCORED:
        assert scored.version.step == 0
        check_scored(net, prompt, tokens, scored)
    check_rewards(net, model)
    check_reuse(model)


def settings(model: Path) -> dict[str, Any]:
    base = mesh_config(model, batch_groups=2, group_size=4, updates_max=1, max_staleness=0)
    tree: dict[str, Any] = msgspec.to_builtins(base) | {"model": str(model)}
    example = load_train_config(FOLDER / "config.yaml")
    tree["inference"] |= {"engine": {"name": f"{__name__}:WatchedEngine", "options": {"context_max": 512}}}
    tree["counts"]["inference"] = 1
    outputs = {"outputs": example.rollout.outputs, "num_top": example.rollout.num_top}
    tree["rollout"] |= {"agent": f"{__name__}:Careful", "limits": {"context_tokens_max": 512}, **outputs}
    tree["reward"] |= {
        "scorers": [
            {"name": f"{__name__}:Certainty", "reward": "correct"},
            {"name": f"{__name__}:Dependence", "reward": "dependence"},
        ],
        "weights": {},
    }
    tree["learner"] = {"tensorboard": False}
    return tree


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the calls of agents and scorers."""
    generate, logprobs, logprobs_of = Environment.generate, Environment.logprobs, PolicyClient.logprobs_of

    async def generated(env: Environment, **wishes: Any) -> Turn:
        prompt = env.token_ids
        turn = await generate(env, **wishes)
        TURNS.append((prompt, turn))
        return turn

    async def scored(env: Environment, tokens: Any, *, under: Any = None, **wishes: Any) -> ScoredTokens:
        prompt = env.token_ids if under is None else env._state.tokenizer.encode_prompt(under, env._tools.schemas)
        found = await logprobs(env, tokens, under=under, **wishes)
        SCORED.append((prompt, tokens, found))
        return found

    async def scored_of(client: PolicyClient, pairs: Sequence[Any], **wishes: Any) -> list[ScoredTokens]:
        found = await logprobs_of(client, pairs, **wishes)
        for (under, tokens), each in zip(pairs, found, strict=True):
            SCORED.append((under if isinstance(under, np.ndarray) else client._encoded(under), tokens, each))
        return found

    monkeypatch.setattr(Environment, "generate", generated)
    monkeypatch.setattr(Environment, "logprobs", scored)
    monkeypatch.setattr(PolicyClient, "logprobs_of", scored_of)


def distributions(net: Any, prompt: IntArray, tokens: IntArray) -> NDArray[np.float64]:
    """Return the log-probs [n, vocabulary] that the model gives before each of `tokens`."""
    with torch.no_grad():
        row = torch.tensor(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        logits = net(input_ids=row).logits[0, len(prompt) - 1 : -1].double()
    return np.asarray(torch.log_softmax(logits, dim=-1).numpy())


def entropies(dists: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-(np.exp(dists) * dists).sum(axis=1))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def check_turn(net: Any, prompt: IntArray, turn: Turn) -> None:
    dists = distributions(net, prompt, turn.token_ids)
    num = len(turn.token_ids)
    assert sorted(turn.arrays) == ["entropy", "top_k_ids", "top_k_logprobs"]
    close(turn.logprobs, dists[np.arange(num), turn.token_ids])
    close(turn.arrays["entropy"], entropies(dists))
    close(turn.arrays["top_k_logprobs"], -np.sort(-dists, axis=1)[:, :4])
    close(np.take_along_axis(dists, turn.arrays["top_k_ids"].astype(np.int64), 1), turn.arrays["top_k_logprobs"])


def check_scored(net: Any, prompt: IntArray, tokens: IntArray, scored: ScoredTokens) -> None:
    dists = distributions(net, prompt, tokens)
    close(scored.logprobs, dists[np.arange(len(tokens)), tokens])
    if scored.arrays:
        close(scored.arrays["entropy"], entropies(dists))
        close(scored.arrays["mean_logprob"], dists.mean(axis=1))
        close(scored.arrays["top_k_logprobs"], -np.sort(-dists, axis=1)[:, :4])
        with torch.no_grad():
            row = torch.tensor(np.concatenate([prompt, tokens]).astype(np.int64))[None]
            states = net(input_ids=row, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
        found = pooled(scored.arrays["hidden"])  # float16
        np.testing.assert_allclose(found, states.double().mean(0).numpy(), rtol=2e-3, atol=2e-3)


def check_rewards(net: Any, model: Path) -> None:
    """Compare the rewards with the model, from the tokens of the judged paths alone."""
    other = load_tokenizer(model).encode_prompt([Message(role="user", content="Answer any question.")], ())
    assert len(ITEMS) == 2 * 8
    for item, found in ITEMS:
        last = item.path[-1]
        before = np.concatenate([segment.token_ids for segment in item.path[:-1]])
        given = [segment for segment in item.path[1:-1] if segment.role is Role.ACTION]
        assert sorted(last.arrays) == ["entropy", "top_k_logprobs"], "top_k_ids is not declared"
        assert not any(segment.arrays for segment in item.path[:-1])
        assert item.num_action_tokens == len(last.token_ids)
        if isinstance(found, list):
            dists = distributions(net, before, last.token_ids)
            top = -np.sort(-dists, axis=1)
            close([reward.value for reward in found], [(top[:, 0] - top[:, 1]).mean(), -entropies(dists).mean()])
            continue
        answer = np.concatenate([segment.token_ids for segment in (*given, last)])
        means = [
            distributions(net, prompt, answer)[np.arange(len(answer)), answer].mean()
            for prompt in (item.path[0].token_ids, other)
        ]
        close(found.value, means[0] - means[1])
        assert found.evidence == "step 0"


def check_reuse(model: Path) -> None:
    """A generation after a given beginning computes only that beginning, because the node has cached the prompt."""
    beginning = load_tokenizer(model).encode_text("<answer>")
    num = len(beginning)
    forced = [(r, d) for r, d in FIRST_DELTAS if r.token_ids[-num:].tolist() == beginning.tolist()]
    assert (len(FIRST_DELTAS), len(forced)) == (len(TURNS), len(TURNS) // 2)
    for request, delta in forced:
        assert delta.num_prompt_cached == len(request.token_ids) - num
        assert delta.num_prompt_prefilled == num
