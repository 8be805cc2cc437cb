"""The arm of the race that trains with TRL's GRPOTrainer, in TRL's own environment.

`python -m benchmarks.race.trl` reads a `RaceWork` as JSON from stdin and writes a `RaceRun` as JSON. Settings are
chosen for speed where they do not change the method: no gradient checkpointing, no logging, no saving, no dropout, no
reference model, fused AdamW, no log-probs of the sampler, half a batch per forward pass. TRL computes the log-probs of
the sampling policy itself, because it takes two optimizer steps per generated batch.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.race.play import RacePlayer
from benchmarks.race.work import RaceClock, RaceMark, RaceRun, RaceWork, UpdateSeen, race_config, race_limits
from rollmesh.trainer.model_files import load_model, load_tokenizer, write_weights
from rollmesh.trainer.optim import lr_at, make_optimizer

STEPS = 2
"""Optimizer steps per generated batch, as `num_minibatches` of the recipe."""


class TrlArm(TrainerCallback):
    """The rollouts of the trainer, and the marks after its updates."""

    def __init__(self, work: RaceWork, clock: RaceClock) -> None:
        self._work = work
        self._clock = clock
        config = race_config(work)
        self.run, self.optimizer = config.run, config.learner.optimizer
        self.tokenizer = load_tokenizer(work.model)
        self._player = RacePlayer(self.tokenizer, race_limits(config))
        self._tasks = {task.question: task for task in work.tasks}
        self._generation_s = self._generation_cpu_s = self._tokens = self._success = 0.0
        self._first_cpu_s = self._first_generation_cpu_s = 0.0
        self.marks: list[RaceMark] = []
        self.updates: list[UpdateSeen] = []

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Implements `rollout_func` of GRPOTrainer: `env_mask` excludes the results of tools, `correct` is passed to
        the reward."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        episodes = self._player.play(trainer.model, [self._tasks[prompt] for prompt in prompts])
        self._generation_s = time.perf_counter() - wall_s
        self._generation_cpu_s += time.process_time() - cpu_s
        self._tokens = float(sum(sum(episode.mask) for episode in episodes))
        self._success = sum(episode.correct for episode in episodes) / len(episodes)
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.completion_ids for episode in episodes],
            "logprobs": None,
            "env_mask": [episode.mask for episode in episodes],
            "correct": [episode.correct for episode in episodes],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        update, rest = divmod(state.global_step, STEPS)
        if rest:
            return
        before_s = self.marks[-1].wall_s if self.marks else 0.0
        mark = self._clock.mark(update)
        self.marks.append(mark)
        self.updates.append(
            UpdateSeen(
                update=update,
                samples=self.run.batch_groups * self.run.group_size,
                tokens=self._tokens,
                success=self._success,
                generation_s=self._generation_s,
                training_s=mark.wall_s - before_s - self._generation_s,
            )
        )
        if update == 1:
            self._first_cpu_s, self._first_generation_cpu_s = mark.cpu_s, self._generation_cpu_s
        if update % self._work.snapshot_every == 0:
            self._clock.pause()
            folder = Path(self._work.folder) / "snapshots" / str(update)
            shutil.copytree(self._work.model, folder)
            write_weights(kwargs["model"], folder / "model.safetensors")
            self._clock.go()
        if mark.wall_s > self._work.limit_s:
            control.should_training_stop = True

    def parts(self) -> dict[str, float]:
        """Return the shares of generation and of the rest, without the first update."""
        total_s = self.marks[-1].cpu_s - self._first_cpu_s
        generation = (self._generation_cpu_s - self._first_generation_cpu_s) / total_s if total_s else 0.0
        return {"inference": generation, "learner": 1.0 - generation}


def correct(completions: list[str], correct: list[float], **kwargs: Any) -> list[float]:
    """Reward function: the episodes were judged when they were played."""
    return correct


def train(work: RaceWork) -> RaceRun:
    arm = TrlArm(work, RaceClock())
    torch.manual_seed(work.seed)
    model = load_model(work.model)
    optimizer = make_optimizer(model, arm.optimizer)

    def factor(step: int) -> float:
        return lr_at(arm.optimizer, step // STEPS + 1) / arm.optimizer.lr

    batch = arm.run.batch_groups * arm.run.group_size
    trainer = GRPOTrainer(
        model=model,
        processing_class=arm.tokenizer,
        reward_funcs=correct,
        rollout_func=arm.rollout,
        train_dataset=Dataset.from_list([{"prompt": task.question} for task in work.tasks]),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)),
        callbacks=[arm],
        args=GRPOConfig(
            output_dir=str(Path(work.folder) / "trl"),
            use_cpu=True,
            seed=work.seed,
            max_steps=STEPS * work.updates,
            per_device_train_batch_size=batch // STEPS,
            steps_per_generation=STEPS,
            num_generations=arm.run.group_size,
            shuffle_dataset=False,
            loss_type="dapo",
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            max_grad_norm=arm.optimizer.clip_norm,
            temperature=1.0,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    return RaceRun(marks=tuple(arm.marks), updates=tuple(arm.updates), parts=arm.parts())


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=RaceWork)
    results, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr  # the trainer prints
    torch.set_num_threads(1)
    results.write(msgspec.json.encode(train(work)) + b"\n")
    results.flush()


if __name__ == "__main__":
    main()
