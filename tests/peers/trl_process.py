"""TRL's side of the comparison, in TRL's interpreter: `python -m tests.peers.trl_process` reads a `TrlWork` from stdin.

The trainers are those of the installed TRL. Only generation is replaced, by completions that are given. TRL scores
them, computes advantages, log-probs before the update and under the reference, and weights of a sampler correction
(`_generate_and_score_completions`), and then the loss under other weights (`_compute_loss`).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import split_tensor_dict

from rollmesh.trainer.model_files import load_model, load_tokenizer
from tests.peers.trl_work import CURRENT, GRADIENT, REFERENCE, START, Played, TrlRun, TrlWork, set_weights


class GivenRloo(RLOOTrainer):  # type: ignore[misc]
    """RLOOTrainer, which has no `rollout_func`, with given completions."""

    played: list[Played]

    def _generate(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        completions = [one.completion for one in self.played]
        return [one.prompt for one in self.played], completions, ["" for _ in completions]


TRAINERS: dict[str, tuple[Any, Any]] = {
    "grpo": (GRPOTrainer, GRPOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig),
    "rloo": (GivenRloo, RLOOConfig),
    "async_grpo": (GRPOTrainer, GRPOConfig),
}


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Implements `rollout_func` of GRPOTrainer."""
    played: list[Played] = trainer.played
    return {
        "prompt_ids": [one.prompt for one in played],
        "completion_ids": [one.completion for one in played],
        "logprobs": [one.behavior for one in played],
        "env_mask": [one.mask for one in played],
    }


def reward_of(name: str) -> Any:
    def given(rewards: list[dict[str, float]], **kwargs: Any) -> list[float | None]:
        return [one.get(name) for one in rewards]

    given.__name__ = name
    return given


def make_trainer(run: TrlRun, folder: str) -> Any:
    """Return the trainer of a run. `num_iterations` 2 lets it compute the log-probs before the update, as it does when
    it takes several steps per batch."""
    first = run.batches[0]
    trainer_class, config_class = TRAINERS[run.trainer]
    functions = [reward_of(name) for name in run.rewards]
    if run.overlong is not None:
        functions.append(get_soft_overlong_punishment(*run.overlong))
    start = Path(first.folder, START)
    return trainer_class(
        model=load_model(start),
        processing_class=load_tokenizer(start),
        reward_funcs=functions,
        train_dataset=Dataset.from_list([{"prompt": "p"}] * len(first.episodes)),
        args=config_class(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            num_iterations=2,
            per_device_train_batch_size=len(first.episodes) // run.steps,
            steps_per_generation=run.steps,
            gradient_accumulation_steps=run.accumulated,
            num_generations=run.group_size,
            **run.options,
        ),
        **({} if run.trainer == "rloo" else {"rollout_func": rollout}),
    )


def loss_of_async_grpo(trainer: Any, model: PreTrainedModel, advantages: Tensor) -> Tensor:
    """Return the loss of AsyncGRPOTrainer, whose ratio is against the sampler.

    Its constructor requires servers of vLLM, so that its method gets the trainer `trainer`, and the packed row that its
    collator makes. Without a shared prefix, attention between the samples of a row is that of transformers."""
    played: list[Played] = trainer.played
    ids, labels, positions = (list[int]() for _ in range(3))
    behavior, of_tokens, segments = (list[float]() for _ in range(3))
    for number, one in enumerate(played):
        row = one.prompt + one.completion
        mask = [0] * len(one.prompt) + one.mask
        ids += row
        positions += range(len(row))
        labels += [token if trains else -100 for token, trains in zip(row[1:], mask[1:], strict=True)] + [-100]
        behavior += [logprob for logprob, trains in zip(one.behavior, one.mask, strict=True) if trains]
        of_tokens += [float(advantages[number])] * sum(one.mask)
        segments += [number] * sum(one.mask)
    index = [place for place, label in enumerate(labels) if label != -100]
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "position_ids": positions,
        "shift_labels": labels,
        "token_index": index,
        "old_log_probs": behavior,
        "advantages": of_tokens,
        "segment_id": segments,
        "tree_kv_index": [-1],
        "tree_cu_seqlens_q": [-1],
        "tree_cu_seqlens_k": [-1],
        "tree_max_seqlens": [0, 0],
    }
    inputs = {name: torch.tensor([values]) for name, values in inputs.items()}
    inputs |= {"global_n_tokens": torch.tensor([len(index)]), "global_n_forward_tokens": [0], "mean_seq_len": [1]}
    for counter in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s"):
        setattr(trainer, f"_step_{counter}", 0.0)

    def forward(**fields: Any) -> Any:
        return model(**{name: values for name, values in fields.items() if not name.startswith("tree_")})

    found: Tensor = AsyncGRPOTrainer.compute_loss(trainer, forward, inputs)
    return found


def computed(trainer: Any, run: TrlRun, number: int) -> dict[str, Tensor]:
    """Return the loss, its gradient and the advantages of a batch."""
    batch, model = run.batches[number], trainer.model
    set_weights(model, Path(batch.folder, START, "model.safetensors"))
    if getattr(trainer, "ref_model", None) is not None:
        set_weights(trainer.ref_model, Path(batch.folder, REFERENCE))
    model.train()
    trainer.played = batch.episodes
    trainer.use_vllm, trainer._last_loaded_step = run.corrects_sampler, trainer.state.global_step
    trainer.current_gradient_accumulation_steps = run.accumulated
    inputs = trainer._generate_and_score_completions(
        [{"prompt": "p", "rewards": one.rewards} for one in batch.episodes]
    )
    set_weights(model, Path(batch.folder, CURRENT))
    losses = torch.zeros(())
    for _ in range(run.repeats):
        model.zero_grad()
        for part in split_tensor_dict(inputs, run.steps)[: run.accumulated]:
            if run.trainer == "async_grpo":
                loss = loss_of_async_grpo(trainer, model, part["advantages"])
            else:
                loss = trainer._compute_loss(model, part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses += loss.detach() / run.repeats
    with torch.no_grad():
        ids, mask = (
            torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1) for kind in ("ids", "mask")
        )
        length = inputs["completion_ids"].shape[1]
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, length, compute_entropy=True)
    gradients = {GRADIENT + name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": losses, "advantages": inputs["advantages"], "entropies": entropies, **gradients}


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=TrlWork)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for run in work.runs:
            trainer = None
            for number in range(len(run.batches)):
                if trainer is None or run.repeats > 1:  # the control of the entropy has a state
                    trainer = make_trainer(run, folder)
                found = {name: values.contiguous() for name, values in computed(trainer, run, number).items()}
                save_file(found, Path(work.results, f"{run.name}-{number}.safetensors"))


if __name__ == "__main__":
    main()
