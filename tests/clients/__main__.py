"""Train agents with the public `openai` packages and print held-out success: `python -m tests.clients [--seeds N]
[--arms ARM ...]`.

Each run starts from a warm-started model of its seed. The agents are services (`rollout.agent: url`), because the start
of a program costs more processor time than its episode. After each run, the tokens of the engine, the scorer and the
trainer are compared.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from .trained_run import ClientArm, Sizes, check, train, warm_model

ARMS = {
    f"{package}-{'stream' if stream else 'whole'}": ClientArm(package, stream, "url")
    for package in ("python", "npm")
    for stream in (False, True)
}


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all exited descendants whose parents waited for them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description="Curves of agents with public clients."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="Seeds of the runs. Default: 0 1 2.")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="Agents. Default: all.")
    parser.add_argument("--updates", type=int, default=40, help="Number of updates. Default: 40.")
    parser.add_argument("--out", type=Path, help="Folder of models and runs. Default: a new temporary one.")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="rollmesh-clients-"))
    out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(updates=options.updates, batch_groups=8, group_size=8, eval_every=10, eval_tasks=120)
    print("| seed | agent | held-out success at update | conversations | requests | encoded again | CPU s | wall s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for seed in options.seeds:
        model = out / f"model-{seed}"
        if not model.exists():
            warm_model(model, seed=seed)
        for name in options.arms:
            begin_s, begin_cpu_s = time.perf_counter(), _cpu_s()
            run = train(ARMS[name], model, out / f"{name}-{seed}", replace(sizes, seed=seed))
            check(run, options.updates)
            assert run.counted is not None
            curve = ", ".join(f"{step}: {success:.2f}" for step, success in sorted(run.success.items()))
            counted, cpu_s, wall_s = run.counted, _cpu_s() - begin_cpu_s, time.perf_counter() - begin_s
            print(
                f"| {seed} | {name} | {curve} | {counted['chains first']:,} | {counted['requests 200']:,} | {counted['reencoded']} | "
                f"{cpu_s:.0f} | {wall_s:.0f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
