"""Modules whose import path changed since the last release, so that an error about a user's plug-in or configuration
names the new path."""

from __future__ import annotations

_ENGINES = "rollmesh.services.inference.engines"
_SHARED = {
    "domain": "decoding digest engine_capabilities formats ids ledger_facts ledger_head outputs protocol reward_range "
    "sources text trajectory versions",
    "config": "config_schema extras moved objects plugin registry settings user_code",
    "net": "asgi_server http_link ports retry",
    "membership": "fleet joined_node",
    "store": "disk jsonl payload_files private_files",
    "process": "fault_points process_info process_launch stop_signals",
    "weights": "model_files model_folder",
}
"""Room of `rollmesh.shared`, and the modules that it got."""
MOVED: dict[str, str] = {
    **{
        f"rollmesh.shared.{name}": f"rollmesh.shared.{room}.{name}"
        for room, names in _SHARED.items()
        for name in names.split()
    },
    "rollmesh.cli.config": "rollmesh.app.config",
    "rollmesh.cli.config_checks": "rollmesh.app.checks.config_checks",
    "rollmesh.cli.display": "rollmesh.app.views.display",
    "rollmesh.cli.export_run": "rollmesh.app.samples.export_run",
    "rollmesh.cli.mlflow_logger": "rollmesh.app.loggers.mlflow_logger",
    "rollmesh.cli.open_run": "rollmesh.app.open_run",
    "rollmesh.cli.run_folder": "rollmesh.app.run_folder",
    "rollmesh.cli.run_loggers": "rollmesh.app.loggers.run_loggers",
    "rollmesh.cli.samples": "rollmesh.app.samples.samples",
    "rollmesh.cli.scoring": "rollmesh.app.samples.scoring",
    "rollmesh.cli.series": "rollmesh.app.views.series",
    "rollmesh.cli.session": "rollmesh.app.session",
    "rollmesh.cli.summary": "rollmesh.app.views.summary",
    "rollmesh.cli.wandb_logger": "rollmesh.app.loggers.wandb_logger",
    "rollmesh.cli.watch": "rollmesh.app.views.watch",
    f"{_ENGINES}.adapters": f"{_ENGINES}.common.adapters",
    f"{_ENGINES}.attached_config": f"{_ENGINES}.attached.config",
    f"{_ENGINES}.attached_engine": f"{_ENGINES}.attached.engine",
    f"{_ENGINES}.attached_server": f"{_ENGINES}.attached.server",
    f"{_ENGINES}.requests": f"{_ENGINES}.common.requests",
    f"{_ENGINES}.sampling": f"{_ENGINES}.common.sampling",
    f"{_ENGINES}.sglang_engine": f"{_ENGINES}.attached.sglang",
    f"{_ENGINES}.stop": f"{_ENGINES}.common.stop",
    f"{_ENGINES}.torch_config": f"{_ENGINES}.torch.config",
    f"{_ENGINES}.torch_engine": f"{_ENGINES}.torch.engine",
    f"{_ENGINES}.vllm_config": f"{_ENGINES}.vllm.config",
    f"{_ENGINES}.vllm_engine": f"{_ENGINES}.vllm.engine",
    f"{_ENGINES}.vllm_plugin": f"{_ENGINES}.vllm.plugin",
    f"{_ENGINES}.vllm_server_engine": f"{_ENGINES}.attached.vllm_server",
    f"{_ENGINES}.weight_folders": f"{_ENGINES}.attached.weight_folders",
    f"{_ENGINES}.weights_buffer": f"{_ENGINES}.common.weights_buffer",
}
"""Old module or package to the new one. A package stands for all modules in it that have no row. A row stays for one
release."""


def moved_hint(module: str | None) -> str:
    """Return `OLD is now NEW` for a module at an old path; empty for any other name."""
    old = module or ""
    while old and old not in MOVED:
        old = old.rpartition(".")[0]
    return f"{module} is now {MOVED[old]}{(module or '').removeprefix(old)}" if old else ""
