"""One rank that opens model folders with others in its own process, for tests. Every rank compares what it gets with
the library.

python -m tests.unit.trainer.loading_worker FOLDER RANK SIZE MODEL... [--opens-only]

Prints the peak resident size in bytes after each model. With `--opens-only` the models are opened and not compared.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmesh.trainer.config import LossTermChoice, UpdateConfig
from rollmesh.trainer.model_config import auto_class, has_tied_head, text_part
from rollmesh.trainer.model_files import open_model, read_config
from rollmesh.trainer.ranks import Ranks
from rollmesh.trainer.sharding import whole
from rollmesh.trainer.update import BatchTrainer

from .measured_peak import peak
from .rank_worker import join


def open_trainer(folder: Path, ranks: Ranks, kind: str) -> BatchTrainer:
    """Open a trainer with a reference of a kind as the learner does."""
    terms = (LossTermChoice("ppo_clip"), LossTermChoice("kl"))
    config = msgspec.convert({"loss": terms, "reference": {"kind": kind}}, UpdateConfig)
    model = open_model(folder, ranks=ranks)
    assert (model.device.type == "meta") is (ranks.rank > 0)
    initial = partial(open_model, folder, ranks=ranks)
    return BatchTrainer(model, config, seed=0, initial_model=initial, ranks=ranks, device=torch.device("cpu"))


def check(folder: Path, ranks: Ranks, *, is_first: bool) -> None:
    """Compare the policy and a reference of a trainer on ranks with what `from_pretrained` loads."""
    kinds = ("initial", "average") if is_first else ("average",)
    trainers = [open_trainer(folder, ranks, kind) for kind in kinds]
    expected = auto_class(read_config(folder)).from_pretrained(folder, dtype=torch.float32).eval()
    for trainer in trainers:
        assert trainer.reference is not None
        for found in (trainer.model, trainer.reference.model):
            _compare(found, expected)
        assert {n for n, p in trainer.model.named_parameters() if p.requires_grad} == text_part(expected)


def _compare(found: Any, expected: Any) -> None:
    state, wanted = found.state_dict(), expected.state_dict()
    assert set(state) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(whole(state[name]), values), name
    for name, parameter in found.named_parameters():
        rows = -(-parameter.shape[0] // dist.get_world_size())
        assert isinstance(parameter, DTensor)
        assert len(parameter.to_local()) <= rows, name
        assert parameter.to_local().untyped_storage().nbytes() <= rows * parameter[0:1].numel() * 4, (
            "nothing else is kept"
        )
    for module, other in zip(found.modules(), expected.modules(), strict=True):
        for attribute, tensor in {**other._buffers, **vars(other)}.items():
            if isinstance(tensor, Tensor):
                assert torch.equal(getattr(module, attribute), tensor), attribute
    assert has_tied_head(found) is has_tied_head(expected)
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=tokens).logits, expected(input_ids=tokens).logits)
    found.reshard()


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ranks = join(folder, rank, size)
    models, opens_only = sys.argv[4:], "--opens-only" in sys.argv
    for model in models[: len(models) - opens_only]:
        if opens_only:
            open_trainer(Path(model), ranks, "average")
        else:
            check(Path(model), ranks, is_first=model == models[0])
        print(peak(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
