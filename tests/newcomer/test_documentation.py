"""Execute the blocks of README.md and docs/ that are not marked, in a folder such as a reader has after the first
pages.

The folder has the files of README, tasks, a model, and a run in runs/mine. A name in the documentation that stands for
something else, such as SAMPLE, is replaced by one that exists.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.newcomer.chat_models import save_chat_model

from .commands import PAGES, ROOT, Block, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ELSEWHERE = {"sft.md"}
"""Pages whose blocks another file of this folder executes."""
BLOCKS = [block for page in PAGES for block in blocks(page) if block.runs and page.name not in ELSEWHERE]
SMALL: dict[str, Any] = {
    "model": "path/to/model",
    "run": {"batch_groups": 4, "group_size": 8, "updates_max": 3, "eval_every": 3, "eval_tasks": 16},
    "learner": {"optimizer": {"lr": 1e-4}},
    "telemetry": {"traces": "file"},
}
COMMAND_S_MAX = 1800.0
"""A block takes about a minute of processor time, and up to forty times as long on a busy host."""


@dataclass(frozen=True)
class Reader:
    """The folder of a reader."""

    folder: Path

    def execute(self, script: str) -> str:
        """Execute a script as a reader would, and return what it prints."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-ec", script], cwd=self.folder, env={**os.environ, "PATH": path, "COLUMNS": "200"},
            capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def names(self) -> Mapping[str, str]:
        """Return what stands for something else in the documentation, as a regular expression, and what it is here."""
        checkpoints = sorted(path.name for path in (self.folder / "runs/mine/checkpoints").glob("update-*"))
        sample = re.search(r"\bg\d+\.\d+-\d+\b", self.execute("rollmesh show runs/mine"))
        assert sample is not None
        return {
            r"runs/(<run>|RUN\b)": "runs/mine",
            r"(?<=show )RUN\b": "runs/mine",
            r"\bSAMPLE\b": sample.group(),
            r"\bg12\.3\b": "g0.0",
            r"update-\d{8}\.\d": checkpoints[-1],
        }


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("reader")
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        (folder / name).write_text(text)
    config = yaml.safe_load((folder / "mine.yaml").read_text())
    for section, values in SMALL.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    (folder / "mine.yaml").write_text(yaml.safe_dump(config))
    rng = random.Random(1)
    answers = ["".join(sorted(rng.sample("abcdef", 4))) for _ in range(2000)]
    pairs = [("sort: " + "".join(rng.sample(answer, len(answer))), answer) for answer in answers]
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    save_chat_model("chatml", folder / "path/to/model", pairs[:1000], steps=150)
    found = Reader(folder)
    found.execute("rollmesh train mine.yaml --out runs/mine")
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_commands_of_a_block_succeed(reader: Reader, block: Block) -> None:
    script = block.text
    for name, here in reader.names().items():
        script = re.sub(name, here, script)
    reader.execute(script)
