"""Find the names of hidden tests in their source, by its syntax alone; nothing of it is executed."""

from __future__ import annotations

import ast


def test_names(source: str) -> list[str]:
    """Return `test_x` and `TestX.test_y`, in the order of the source. Raises SyntaxError."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            names.append(node.name)
        elif isinstance(node, ast.ClassDef) and _is_test_class(node):
            methods = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
            names += [f"{node.name}.{name}" for name in methods if name.startswith("test")]
    return names


def _is_test_class(node: ast.ClassDef) -> bool:
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)
