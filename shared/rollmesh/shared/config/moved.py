"""Modules whose import path changed since the last release, so that an error about a user's plug-in or configuration
names the new path."""

from __future__ import annotations

import re

_NOT_IN_PACKAGE = re.compile(r"cannot import name '(\w+)'")
_ENGINES = "rollmesh.services.inference.engines."
_GROUPS = {
    ("rollmesh.shared.", "rollmesh.shared.domain."): "decoding digest engine_capabilities formats ids ledger_head "
    "outputs protocol reward_range text trajectory versions",
    ("rollmesh.shared.", "rollmesh.shared.config."): "config_schema extras objects registry settings user_code",
    ("rollmesh.shared.", "rollmesh.shared.net."): "asgi_server http_link ports retry",
    ("rollmesh.shared.", "rollmesh.shared.membership."): "fleet joined_node",
    ("rollmesh.shared.", "rollmesh.shared.store."): "disk jsonl payload_files private_files",
    ("rollmesh.shared.", "rollmesh.shared.process."): "fault_points process_info process_launch stop_signals",
    ("rollmesh.shared.", "rollmesh.shared.weights."): "model_files model_folder",
    ("rollmesh.cli.", "rollmesh.app."): "certificates config coordinator_alone dead_letters episode_trace folder_audit "
    "interrupts mesh_client nats_files open_run page_link recipe_catalog run_bus run_folder scale_run session",
    ("rollmesh.cli.", "rollmesh.app.backup."): "backup backup_file restore",
    ("rollmesh.cli.", "rollmesh.app.checks."): "config_checks disk_need effective_config host_checks model_checks "
    "profile_checks",
    ("rollmesh.cli.", "rollmesh.app.loggers."): "mlflow_logger run_loggers wandb_logger",
    ("rollmesh.cli.", "rollmesh.app.samples."): "dry_run export_run samples scoring stored_heads stored_samples "
    "transcript",
    ("rollmesh.cli.", "rollmesh.app.views."): "causes display figure report results series status_view summary watch "
    "weights_view",
    (_ENGINES, f"{_ENGINES}common."): "adapters requests sampling stop weights_buffer",
    (_ENGINES, f"{_ENGINES}attached."): "weight_files weight_folders",
    (_ENGINES, f"{_ENGINES}torch."): "command_queue execution model_spec plain_outputs plain_runner row_rules runner "
    "scheduler self_check slots step_pace weight_layout",
    (_ENGINES, f"{_ENGINES}vllm."): "prepared_files swap_gate weights_fit",
    (f"{_ENGINES}attached_", f"{_ENGINES}attached."): "config engine server tables",
    (f"{_ENGINES}torch_", f"{_ENGINES}torch."): "config core engine model",
    (f"{_ENGINES}vllm_", f"{_ENGINES}vllm."): "columns config engine host load model plugin request sampler scores "
    "weights worker",
}
"""Old and new beginning of a path, and the ends that moved."""
MOVED: dict[str, str] = {
    **{f"{old}{name}": f"{new}{name}" for (old, new), names in _GROUPS.items() for name in names.split()},
    f"{_ENGINES}sglang_engine": f"{_ENGINES}attached.sglang",
    f"{_ENGINES}torch_runner": f"{_ENGINES}torch.built_in_runner",
    f"{_ENGINES}vllm_server_engine": f"{_ENGINES}attached.vllm_server",
}
"""Old module or package to the new one. A package stands for all modules in it that have no row. A row stays for one
release."""


def moved_hint(module: str | None) -> str:
    """Return `OLD is now NEW` for a module at an old path; empty for any other name."""
    old = module or ""
    while old and old not in MOVED:
        old = old.rpartition(".")[0]
    return f"{module} is now {MOVED[old]}{(module or '').removeprefix(old)}" if old else ""


def import_hint(error: ImportError) -> str:
    """Return the hint for an import that failed, also of the form `from package import module`."""
    found = _NOT_IN_PACKAGE.match(error.msg)
    return moved_hint(f"{error.name}.{found[1]}" if found else error.name)
