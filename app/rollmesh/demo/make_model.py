"""Make the model of a run: a tiny Qwen3 that is warm-started on demonstrations of generated sources.

As a separate process it writes one JSON object per step to standard output, so its caller stays responsive:

    python -m rollmesh.demo.make_model FOLDER SEED < MadeModelConfig.json

The folder gets its name only when it is complete. A rejected configuration is one line {"error": ...} and exit code 1.
Collaborators: `rollmesh.trainer` (model, supervised training), `rollmesh.services.data` (tasks and their ranges).
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from rollmesh.demo.chat import EncodedDemonstration, render_demonstration
from rollmesh.demo.config import MadeModelConfig, demonstrated_sources
from rollmesh.demo.sft import (
    WarmStartConfig,
    WarmStartFailed,
    WarmStartProgress,
    demonstration_probability,
    warm_start,
)
from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.demo.tokenizer import build_tokenizer
from rollmesh.services.data.generated import GeneratedSource
from rollmesh.services.data.task import Split
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.model_files import write_model_folder

T = TypeVar("T")


def resolve(config: MadeModelConfig) -> tuple[TinyModelConfig, WarmStartConfig]:
    """Return the nested settings. Raise ConfigError that names the key."""
    shape = _options(TinyModelConfig, config.shape, "made_model.shape")
    return shape, _options(WarmStartConfig, config.warm_start, "made_model.warm_start")


def make_model(
    config: MadeModelConfig, folder: Path, *, seed: int, on_step: Callable[[WarmStartProgress], None]
) -> WarmStartProgress:
    """Write the model to `folder`, which must not exist. Equal arguments give equal weights.

    Raise ConfigError, or WarmStartFailed if the target is not reached.
    """
    shape, sft = resolve(config)
    maker = Demonstrator(demonstrated_sources(config))
    model = build_tiny_model(shape, seed=seed)
    held_out = maker.validation()
    last = warm_start(
        model, maker.new, lambda m: demonstration_probability(m, held_out), sft, seed=seed, on_step=on_step
    )
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write_model_folder(model, build_tokenizer(model_max_length=shape.context_max), draft)
    draft.rename(folder)
    return last


class Demonstrator:
    """Renders demonstrations as conversations of the agent, each from one split."""

    def __init__(self, sources: Sequence[GeneratedSource]) -> None:
        self._sources = sources
        self._tokenizer = build_tokenizer()

    def new(self, level: int, rng: np.random.Generator) -> EncodedDemonstration:
        """Return a demonstration of a new task of the train range, of each source with the same probability. A source
        without the level gives its hardest one."""
        source = self._sources[int(rng.integers(len(self._sources)))] if len(self._sources) > 1 else self._sources[0]
        draws = random.Random(int(rng.integers(2**63)))
        while True:
            key = source.make(draws, min(level, source.hardest_level))
            if source.split(key) is Split.TRAIN:
                return self._render(source, key)

    def validation(self) -> list[EncodedDemonstration]:
        """Return the ideal episodes of the validation range."""
        return [self._render(source, key) for source in self._sources for _, key in source.keys(Split.VALIDATION)]

    def _render(self, source: GeneratedSource, key: str) -> EncodedDemonstration:
        shown = source.demonstration(key)
        return render_demonstration(
            self._tokenizer, source.prompt(key), shown.calls, shown.answer, tools=source.options.tools
        )


def _options(type_: type[T], values: dict[str, Any], key: str) -> T:
    try:
        return config_from_dict(type_, values)
    except ConfigError as err:
        raise ConfigError(f"`{key}`: {err.message}", violations=err.violations, key=key) from err


def main() -> int:
    """Run the process; see the module."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C also reaches the caller, which reports it
    torch.set_num_threads(1)
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=MadeModelConfig)
    try:
        make_model(config, folder, seed=seed, on_step=lambda progress: _write_line(msgspec.to_builtins(progress)))
    except (ConfigError, WarmStartFailed) as err:
        _write_line({"error": str(err)})
        return 1
    return 0


def _write_line(line: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
