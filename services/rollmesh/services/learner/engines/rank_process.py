"""A rank of a torch trainer other than 0: makes the calls of rank 0 on its part until rank 0 ends it.

    python -m rollmesh.services.learner.engines.rank_process RANK SIZE HOST PORT DEVICE TIMEOUT_S

An error ends the process. Its traceback is in the log of the rank, and rank 0 reports it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta

import torch.distributed as dist
from msgspec import structs
from torch._C._distributed_c10d import TCPStore

from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.engines.rank_group import (
    RankMember,
    device_of,
    join,
    rank_of_torchrun,
    size_of_torchrun,
    up,
)
from rollmesh.services.learner.engines.torch_trainer import TorchTrainer, open_part
from rollmesh.shared.errors import MeshError


def run_rank(member: RankMember, own: LearnerConfig | None = None) -> None:
    """Make the calls of rank 0 until it ends this rank. `own` is the configuration of this host, by default that of
    rank 0."""
    trainer: TorchTrainer | None = None
    try:
        while (call := member.receive()) is not None:
            name, *arguments = call
            if name == "open":
                config, found = arguments
                trainer = None  # frees the memory of the one before
                # Checkpoints are on a file system that all hosts share, and the run has one list of sources.
                if own is not None:
                    config = structs.replace(own, directory=config.directory, external_sources=config.external_sources)
                engine = open_part(config, found, member.ranks, _local_rank(member.ranks.rank)).engine
                assert isinstance(engine, TorchTrainer)
                trainer = engine
            else:
                assert trainer is not None, "a trainer is opened first"
                getattr(trainer, name)(*arguments)
    except MeshError as err:
        member.report(err)
        dist.destroy_process_group()  # its threads must not live when the interpreter ends
        raise
    dist.destroy_process_group()


def run_torchrun_rank(config: LearnerConfig) -> None:
    """Run this process, a rank of torchrun other than 0, with the configuration of its host."""
    faulthandler.register(signal.SIGUSR1)
    device_of(config, size_of_torchrun(), 0)
    member = join(rank_of_torchrun(), size_of_torchrun(), None, config.device, config.compute.rank_timeout_s)
    run_rank(member, config)


def main() -> None:
    rank, size, host, port, device, timeout_s = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    store = TCPStore(host, int(port), int(size), is_master=False, timeout=timedelta(seconds=float(timeout_s)))
    store.set(up(int(rank)), "")
    run_rank(join(int(rank), int(size), store, device, float(timeout_s)))


def _local_rank(rank: int) -> int:
    return int(os.environ.get("LOCAL_RANK", rank))


if __name__ == "__main__":
    main()
