"""Find the hidden tests in their source, and uses that cannot work, by its syntax alone; nothing of it is executed."""

from __future__ import annotations

import ast

from rollmesh.sandbox_runtime.judging.unit import WHOLE_SOURCE

_Test = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ACTIONS = (ast.Assert, ast.Expr, ast.For, ast.While, ast.With, ast.If, ast.Try)


def test_names(source: str) -> list[str]:
    """Return `test_x` and `TestX.test_y`, in the order of the source, without those that a decorator skips. A source
    without test functions whose statements test the candidate is one test. Raises SyntaxError, and ValueError for an
    async test."""
    body = ast.parse(source).body
    names: list[str] = []
    found = False
    for node in body:
        for name, test in _tests_of(node):
            found = True
            if isinstance(test, ast.AsyncFunctionDef):
                raise ValueError(  # noqa: TRY004 - an error of the manifest
                    f"source: the test {name} is async, which is not supported; call asyncio.run in it"
                )
            if not _is_skipped(node) and not _is_skipped(test):
                names.append(name)
    if not found and any(isinstance(node, _ACTIONS) and not _is_text(node) for node in body):
        return [WHOLE_SOURCE]
    return names


def replaced_name(source: str, module: str) -> str:
    """Return the first target of a `patch` that cannot reach the candidate, because it runs in another process: its
    module, or a builtin; otherwise an empty text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _last_name(node.func) == "patch" and node.args:
            target = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            if isinstance(target, str) and target.partition(".")[0] in (module, "builtins"):
                return target
    return ""


def _tests_of(node: ast.stmt) -> list[tuple[str, _Test]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [(node.name, node)] if node.name.startswith("test") else []
    if isinstance(node, ast.ClassDef) and _is_test_class(node):
        methods = [member for member in node.body if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return [(f"{node.name}.{method.name}", method) for method in methods if method.name.startswith("test")]
    return []


def _is_test_class(node: ast.ClassDef) -> bool:
    bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
    return node.name.startswith("Test") or any(base.endswith("TestCase") for base in bases)


def _is_skipped(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, _Test) else []
    return any(_last_name(getattr(each, "func", each)) == "skip" for each in decorators)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
