"""The facade: every public name is there, is documented and is listed."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import ModuleType

import stagedtensor as st

FACADE = Path(st.__file__)


def imported_names() -> set[str]:
    """Return the names that the facade imports, as the user sees them."""
    tree = ast.parse(FACADE.read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module != "__future__"
        for alias in statement.names
    }


def test_all_lists_exactly_what_the_facade_imports() -> None:
    assert set(st.__all__) == imported_names()
    assert len(st.__all__) == len(set(st.__all__))


def test_the_facade_only_re_exports() -> None:
    tree = ast.parse(FACADE.read_text(encoding="utf-8"))
    assigned = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    assert assigned == {"__all__", "__version__"}
    assert not [item for item in tree.body if isinstance(item, ast.FunctionDef | ast.ClassDef)]


def test_every_public_callable_and_module_has_a_docstring() -> None:
    undocumented = [
        name
        for name in st.__all__
        if (callable(value := getattr(st, name)) or isinstance(value, ModuleType)) and not inspect.getdoc(value)
    ]
    assert undocumented == []


def test_no_module_imports_the_facade() -> None:
    root = FACADE.parent
    offenders = []
    for path in sorted(root.rglob("*.py")):
        if path == FACADE or path.is_relative_to(root / "benchmarks"):  # measurements use the language from outside
            continue
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.Import) and any(alias.name == "stagedtensor" for alias in statement.names):
                offenders.append(f"{path}:{statement.lineno}")
    assert offenders == []


def test_no_module_fetches_a_shadowed_module_from_the_package() -> None:
    """``st.precision`` is a function: ``from . import precision`` would give it or the module, by order of import."""
    root = FACADE.parent
    modules = {path.stem for path in root.glob("*.py")} | {path.name for path in root.iterdir() if path.is_dir()}
    shadowed = {name for name in st.__all__ if name in modules and not isinstance(getattr(st, name), ModuleType)}
    assert "precision" in shadowed
    offenders = []
    for path in sorted(root.rglob("*.py")):
        depth = len(path.relative_to(root).parts)
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(statement, ast.ImportFrom) or path == FACADE:
                continue
            from_package = (statement.module is None and statement.level == depth) or statement.module == "stagedtensor"
            if from_package and shadowed & {alias.name for alias in statement.names}:
                offenders.append(f"{path}:{statement.lineno}")
    assert offenders == []


def test_errors_share_one_base_class() -> None:
    classes = [value for value in vars(st.errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    own = [value for value in classes if value.__module__ == "stagedtensor.errors"]
    assert len(own) > 10
    assert all(issubclass(value, st.errors.StagedTensorError) for value in own)
    assert all(value.__name__.endswith("Error") for value in own)
