"""What tools take from their sandbox profiles: descriptions for the prompt, and which functions are stateless.

The modules of a profile are code of the operator for the jail. Their source is parsed here, never executed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.mesh.config import MeshConfig
from rollmesh.services.rollout.config import RolloutConfig, ToolConfig
from rollmesh.services.sandbox.config import ProfileConfig
from rollmesh.shared.errors import ConfigError

_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def rollout_config(config: MeshConfig) -> RolloutConfig:
    """Return the rollout config. Values that its tools do not set are taken from the profiles. Raises ConfigError."""
    profiles = config.sandbox.profiles
    tools = {name: _described(tool, profiles.get(tool.profile)) for name, tool in config.rollout.tools.items()}
    return msgspec.structs.replace(config.rollout, tools=tools)


def _described(tool: ToolConfig, profile: ProfileConfig | None) -> ToolConfig:
    if profile is None or not tool.function:
        return tool
    if tool.stateless is None:
        tool = msgspec.structs.replace(tool, stateless=tool.function in profile.stateless)
    elif tool.stateless and tool.function not in profile.stateless:
        raise ConfigError(
            f"`rollout.tools`: a tool is stateless, but `sandbox.profiles.{tool.profile}.stateless` lacks its function "
            f"{tool.function!r}; add it there, or remove `stateless` from the tool"
        )
    function = find_function(profile, tool.function)
    if function is None:
        return tool
    return msgspec.structs.replace(
        tool,
        description=tool.description or inspect.cleandoc(ast.get_docstring(function) or ""),
        parameters=tool.parameters or _parameters(function),
    )


def find_function(profile: ProfileConfig, name: str) -> _Function | None:
    """Return the definition of a profile's function, in its prelude or its modules; None if it cannot be read."""
    sources = [profile.prelude, *(_source(module, profile.library_paths) for module in reversed(profile.tools))]
    for source in sources:
        try:
            body = ast.parse(source).body
        except SyntaxError:  # the sandbox reports it when the profile starts
            continue
        for node in reversed(body):
            if isinstance(node, _Function) and node.name == name:
                return node
    return None


def _source(module: str, library_paths: tuple[str, ...]) -> str:
    parts = module.split(".")
    for folder in library_paths:
        for path in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__init__.py")):
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    origin = spec.origin if spec is not None else None
    return Path(origin).read_text(encoding="utf-8", errors="replace") if origin and origin.endswith(".py") else ""


def _parameters(function: _Function) -> dict[str, Any]:
    """Return the first argument, the only one that a tool call passes."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    if not arguments:
        return {"type": "object", "properties": {}}
    first = arguments[0]
    annotation = ast.unparse(first.annotation).partition("[")[0] if first.annotation is not None else "str"
    property_ = {"type": _TYPES.get(annotation, "string")}
    return {"type": "object", "properties": {first.arg: property_}, "required": [first.arg]}
