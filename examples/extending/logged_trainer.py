"""A trainer: the torch trainer, with a line in a file for each update."""

import dataclasses
import json
from pathlib import Path

import msgspec

from rollmesh.services.learner.engine import TrainerEngine
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer


class LoggedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str = "updates.jsonl"


class LoggedTrainer(TrainerEngine):
    Options = LoggedOptions
    trains_model = True  # `rollmesh check` checks model, loss and device

    @classmethod
    def open(cls, config, options):
        restored = TorchTrainer.open(config)  # from the newest checkpoint, or from the initial model
        return dataclasses.replace(restored, engine=cls(restored.engine, Path(config.directory) / options.file))

    def __init__(self, inner, file):
        self.inner, self.file = inner, file

    def __getattr__(self, name):  # step, vocab_size, score, export_weights, save, close
        return getattr(self.inner, name)

    def update(self, k, samples, groups):
        result = self.inner.update(k, samples, groups)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": k, "applied": result.applied, "samples": result.used_ids}) + "\n")
        return result
