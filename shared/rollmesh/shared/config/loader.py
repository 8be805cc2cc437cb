"""The configuration loader: defaults < YAML file < `key=value` overrides, into a frozen tree of msgspec structs.

A type with a static method `underlay(tree, base_dir) -> Path | None` has one more layer between the defaults and the
given values: the YAML file that the method returns for these values, e.g. a recipe. Its section `about` is not part of
the configuration.

The loader is strict. An unknown key, a wrong type, a value out of range, a missing file or invalid YAML is an error
that contains the path of the key (`rollout.turns_max`), the expected and the found value, and the line or override. One
pass finds all errors: after each, the key is removed (or renamed to the probable one) and the rest is read. Several
errors become one `ConfigError`. A class attribute `removed` of a type maps the settings that only the release before
had to the reason why they have no effect. They are ignored with a warning, because the configuration in a run folder
has every setting. `listed` maps settings that only the release before had to the lists that replaced them. The value is
read as a list of one, with a warning. A mapping of some of its keys changes the only item of the list below it.

YAML is read as YAML 1.1 with two changes: `1e-4` is a number, and a duplicate key is an error.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from rollmesh.shared.config.settings import expectation, plain, shown, type_info
from rollmesh.shared.errors import ConfigError, FieldViolation, MeshError

T = TypeVar("T")
_log = logging.getLogger(__name__)
UNKNOWN_KEY = "unknown key"
"""Begin of the description of a key that a type does not have."""
_REQUIRED = "required, but not given"
MISTAKES_MAX = 50
"""Maximum number of errors in one list."""

_MSGSPEC_ERROR = re.compile(r"^(?P<what>.*?)(?: - at `\$?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`$")
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>[^`]*)`$")
_FIELD_PROBLEM = re.compile(r"^`?(?P<name>\w+)(?P<below>[^\s`]*)`? (?P<what>.*)$", re.DOTALL)


def load_config(type_: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Build a `type_` from its defaults, the YAML file `path` if one is given, and `key=value` overrides, in that
    order.

    Keys of overrides are dotted (`learner.optimizer.lr=3e-4`; a number indexes a list), values are YAML.
    Raises `ConfigError`.
    """
    config, mistakes = read_config(type_, path, overrides)
    if config is None or mistakes:
        raise all_in_one(mistakes)
    return config


def read_config(
    type_: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()
) -> tuple[T | None, list[ConfigError]]:
    """As `load_config`, but return the errors together with the configuration without the wrong keys, or None if it
    cannot be built.

    Raises `ConfigError` only for a file or an override that cannot be read.
    """
    file = Path(path) if path is not None else None
    tree, lines = read_tree(file) if file is not None else ({}, {})
    tree = _long_form(type_info(type_), tree, fill=False)
    origins = _apply_overrides(tree, overrides)
    return _convert_all(type_, tree, _Places(file, lines, origins))


def underlay_places(type_: type, path: Path, overrides: Sequence[str] = ()) -> Callable[[str], str]:
    """Return a function from a dotted key to `FILE:LINE` in the layer that `underlay` names, or "" if another layer
    gives its value.

    The arguments are those of a `read_config` that returned a configuration.
    """
    tree, lines = read_tree(path)
    tree = _long_form(type_info(type_), tree, fill=False)
    places = _Places(path, lines, _apply_overrides(tree, overrides))
    _with_underlay(type_, tree, places)
    return lambda key: places.below(f".{key}")


def all_in_one(mistakes: Sequence[MeshError]) -> MeshError:
    """Return one error for all. A single error is returned unchanged."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = "".join(f"\n  {number}. {mistake}" for number, mistake in enumerate(mistakes, 1))
    violations = [violation for mistake in mistakes for violation in mistake.violations]
    return ConfigError(f"{len(mistakes)} mistakes:{lines}", violations=violations)


def config_from_dict(type_: type[T], values: dict[str, Any], overrides: Sequence[str] = ()) -> T:
    """As `load_config`, from a dict instead of a file. The dict is not changed."""
    tree = _long_form(type_info(type_), msgspec.to_builtins(values), fill=False)
    return _convert(type_, tree, _Places(None, {}, _apply_overrides(tree, overrides)))


def to_yaml(config: object) -> str:
    """Return the resolved configuration as YAML. `load_config` reads an equal configuration from it."""
    return str(yaml.dump(msgspec.to_builtins(config), Dumper=_SafeDumper, sort_keys=False, allow_unicode=True))


# Reading --------------------------------------------------------------------------------------------------------------


# libyaml reads and writes ten times as fast. PyYAML can be built without it.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """SafeLoader with YAML 1.2 floats and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key `{key_node.value}` is given twice", key_node.start_mark
                )
            seen.add(str(key_node.value))
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


# PyYAML's pattern requires a dot, so `lr: 1e-4` would be a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def _parse_with_lines(text: str) -> tuple[Any, dict[str, int]]:
    """Return what `_parse_yaml` does, and the 1-based line of every path in it."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines = dict(_lines(node, ""))
        return loader.construct_document(node) if node is not None else None, lines
    finally:
        loader.dispose()


def read_tree(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping in a YAML file and the 1-based line of every path in it. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: cannot read the configuration file: {reason}; check the path", file=file) from err
    try:
        tree, lines = _parse_with_lines(text)
    except yaml.YAMLError as err:
        raise ConfigError(f"{_yaml_place(file, err)}: not valid YAML: {_yaml_problem(err)}", file=file) from err
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of keys at the top, found {_kind(tree)}", file=file)
    return tree, lines


def _lines(node: yaml.Node | None, path: str) -> Iterable[tuple[str, int]]:
    """(path, 1-based line) of every key and list item below `node`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}"
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield f"{path}[{index}]", item.start_mark.line + 1
            yield from _lines(item, f"{path}[{index}]")


def _yaml_place(file: Path, err: yaml.YAMLError) -> str:
    mark = getattr(err, "problem_mark", None)
    return f"{file}:{mark.line + 1}" if mark is not None else str(file)


def _yaml_problem(err: yaml.YAMLError) -> str:
    return str(getattr(err, "problem", None) or err)


# Overrides ------------------------------------------------------------------------------------------------------------


def _apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Write the overrides into `tree`. Return the override that wrote each path."""
    origins: dict[str, str] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override `{override}`: expected key=value, as in rollout.turns_max=4")
        try:
            value = _parse_yaml(text)
        except yaml.YAMLError as err:
            raise ConfigError(f"override `{override}`: the value is not valid YAML: {_yaml_problem(err)}") from err
        origins[_set_path(tree, key.strip().split("."), value, override)] = override
    return origins


def _set_path(tree: dict[str, Any], parts: list[str], value: object, override: str) -> str:
    """Set one dotted key and create missing mappings. Return its path in msgspec's form."""
    node: Any = tree
    path = ""
    for index, part in enumerate(parts):
        key = _key_in(node, part, override)
        path += f"[{key}]" if isinstance(key, int) else f".{key}"
        if index == len(parts) - 1:
            node[key] = value
        else:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]
    return path


def _key_in(node: object, part: str, override: str) -> str | int:
    if isinstance(node, dict) and part:
        return part
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return int(part)
    holder = f"a list of {len(node)} items" if isinstance(node, list) else _kind(node)
    raise ConfigError(f"override `{override}`: there is no `{part}` in {holder}")


# Converting -----------------------------------------------------------------------------------------------------------


def _long_form(node: msgspec.inspect.Type, value: Any, default: object = None, *, fill: bool = True) -> Any:
    """Replace short forms: a string in place of a struct that has a class attribute `short_form` means the field named
    there.

    With `fill`, a mapping that omits this field gets it from `default`, the default of the key that holds the struct.
    """
    if isinstance(node, msgspec.inspect.Metadata):
        return _long_form(node.type, value, default)
    if isinstance(node, msgspec.inspect.UnionType):
        for option in node.types:
            value = _long_form(option, value, default, fill=fill)
    elif isinstance(node, msgspec.inspect.StructType) and isinstance(value, (str, dict)):
        short = getattr(node.cls, "short_form", "")
        if isinstance(value, str):
            return {short: value} if short else value
        if fill and short and isinstance(default, node.cls):
            value = {short: getattr(default, short), **value}
        fields = {field.encode_name: field for field in node.fields}
        items = {old: _item_type(fields[new].type) for old, new in getattr(node.cls, "listed", {}).items()}
        return {
            key: _long_form(fields[key].type, below, _default(fields[key]), fill=fill)
            if key in fields
            else _long_form(items[key], below, fill=False)
            if key in items
            else below
            for key, below in value.items()
        }
    elif isinstance(node, msgspec.inspect.DictType) and isinstance(value, dict):
        return {key: _long_form(node.value_type, below, fill=fill) for key, below in value.items()}
    elif isinstance(node, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)) and isinstance(value, list):
        return [_long_form(node.item_type, below, fill=fill) for below in value]
    return value


def _listed(node: msgspec.inspect.Type, value: Any, places: _Places, path: str = "", under: Any = None) -> Any:
    """Replace each setting of the release before that is now a list.

    A mapping becomes the item of the list in `under`, the values of the layer below it, or of the default, with its
    changes, if that list has one item.
    """
    if isinstance(node, msgspec.inspect.Metadata):
        return _listed(node.type, value, places, path, under)
    if isinstance(node, msgspec.inspect.UnionType):
        for option in node.types:
            value = _listed(option, value, places, path, under)
    elif isinstance(node, msgspec.inspect.StructType) and isinstance(value, dict):
        under = under if isinstance(under, dict) else {}
        fields = {field.encode_name: field for field in node.fields}
        for old, new in getattr(node.cls, "listed", {}).items():
            if old in value and new not in value:
                key = f"{path}.{old}"
                _log.warning("%s: `%s` is now the list `%s`: write `%s: [...]`", places.of(key), key[1:], new, new)
                places.move(key, f"{path}.{new}[0]")
                item, items = value[old], under.get(new) or msgspec.to_builtins(_default(fields[new]))
                if isinstance(item, dict) and isinstance(items, (list, tuple)) and len(items) == 1:
                    item = merged(items[0], item) if isinstance(items[0], dict) else item
                value = {name: below for name, below in value.items() if name != old} | {new: [item]}
        return {
            key: _listed(fields[key].type, below, places, f"{path}.{key}", under.get(key)) if key in fields else below
            for key, below in value.items()
        }
    return value


def _item_type(node: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Return the type of the items of a list."""
    bare = plain(node)
    assert isinstance(bare, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)), "`listed` names lists"
    return bare.item_type


def _default(field: msgspec.inspect.Field) -> object:
    return field.default_factory() if callable(field.default_factory) else field.default


class _Places:
    """The origin of each value, for messages."""

    def __init__(self, file: Path | None, lines: dict[str, int], overrides: dict[str, str]) -> None:
        self.file = file
        self._lines = lines
        self._overrides = overrides
        self._below: tuple[Path, dict[str, int]] | None = None
        self._moved: dict[str, str] = {}

    def lay_under(self, file: Path, lines: dict[str, int]) -> None:
        """Values of `file` are used where no other place gives one."""
        self._below = (file, lines)

    def move(self, given: str, path: str) -> None:
        """The value at `path` was given at the path `given`."""
        self._moved[path] = given

    def below(self, path: str) -> str:
        """Return the place in the lower file, if no other place gives the value."""
        where = self.of(path)
        return where if self._below is not None and where.rpartition(":")[0] == str(self._below[0]) else ""

    def of(self, path: str) -> str:
        paths = [path, *(old + path.removeprefix(new) for new, old in self._moved.items() if _is_in(path, new))]
        for candidate, override in self._overrides.items():
            if any(_is_in(one, candidate) for one in paths):
                return f"override `{override}`"
        line = next((self._lines[one] for one in paths if one in self._lines), None)
        if line is None and self._below is not None:
            file, lines = self._below
            if (below := next((lines[one] for one in paths if one in lines), None)) is not None:
                return f"{file}:{below}"
        if self.file is None:
            return "configuration"
        return f"{self.file}:{line}" if line is not None else str(self.file)


def _is_in(path: str, part: str) -> bool:
    """Return whether `path` is `part` or a path below it."""
    return path == part or path.startswith((f"{part}.", f"{part}["))


def _convert(type_: type[T], tree: dict[str, Any], places: _Places) -> T:
    config, mistakes = _convert_all(type_, tree, places)
    if config is None or mistakes:
        raise all_in_one(mistakes)
    return config


def _convert_all(type_: type[T], tree: dict[str, Any], places: _Places) -> tuple[T | None, list[ConfigError]]:
    mistakes: list[ConfigError] = []
    kind = type_info(type_)
    rest = msgspec.to_builtins(tree)
    try:
        rest = _with_underlay(type_, rest, places)
    except ConfigError as err:
        rest = _listed(kind, rest, places)
        mistakes.append(err)
    rest = _long_form(kind, rest)
    taken: set[str] = set()
    """Paths that were removed as wrong. A required one is then missing, which is not another mistake."""
    while len(mistakes) < MISTAKES_MAX:
        try:
            return msgspec.convert(rest, type_), mistakes
        except msgspec.ValidationError as err:
            mistake = _mistake(type_, rest, str(err))
            if mistake.removed:
                _log.warning("%s", mistake.error(places))
            elif mistake.what != _REQUIRED or mistake.path not in taken:
                mistakes.append(mistake.error(places))
            taken.add(mistake.path)
            if not _without(rest, mistake):
                break
    return None, mistakes


def _with_underlay(type_: type, tree: dict[str, Any], places: _Places) -> dict[str, Any]:
    """Return `tree` over the values of the file that the type names for it. Settings that are now lists are replaced in
    both."""
    kind = type_info(type_)
    underlay = getattr(type_, "underlay", None)
    file = underlay(tree, places.file.parent if places.file is not None else None) if underlay is not None else None
    if file is None:
        made: dict[str, Any] = _listed(kind, tree, places)
        return made
    below, lines = read_tree(file)
    places.lay_under(file, lines)
    below.pop("about", None)
    below = _long_form(kind, _listed(kind, below, places), fill=False)
    return merged(below, _listed(kind, tree, places, under=below))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `above` over `below`, key by key. A part with another `name` or `kind` replaces the part below it."""
    if any(key in below and key in above and below[key] != above[key] for key in ("name", "kind")):
        return above
    both = dict(below)
    for key, value in above.items():
        part = below.get(key)
        both[key] = merged(part, value) if isinstance(part, dict) and isinstance(value, dict) else value
    return both


@dataclass(frozen=True, slots=True)
class _Mistake:
    """One error in a tree."""

    path: str
    what: str
    meant: str = ""
    """The key that was probably meant by an unknown one."""
    removed: bool = False
    """Whether the key is a setting of the release before, which is ignored."""

    def error(self, places: _Places) -> ConfigError:
        key = self.path.lstrip(".") or "(top)"
        colon = "" if self.what.startswith("must ") else ":"
        return ConfigError(
            f"{places.of(self.path)}: `{key}`{colon} {self.what}",
            violations=[FieldViolation(key, self.what)],
            key=key,
            file=places.file or "",
        )


def _mistake(type_: type, tree: dict[str, Any], text: str) -> _Mistake:
    match = _MSGSPEC_ERROR.match(text)
    assert match is not None
    what, path = match["what"], _with_keys(type_, tree, match["path"] or "", text)
    names = _field_names(type_, path, tree)
    if unknown := _UNKNOWN_FIELD.match(what):
        for struct in (one for node in _nodes(type_, path) for one in _structs(node)):
            if reason := getattr(struct.cls, "removed", {}).get(unknown["name"]):
                what = f"no effect, because {reason}; delete the key"
                return _Mistake(f"{path}.{unknown['name']}", what, removed=True)
        meant = _close_to(unknown["name"], names)
        return _Mistake(f"{path}.{unknown['name']}", f"{UNKNOWN_KEY}{_did_you_mean(meant, names)}", meant)
    if missing := _MISSING_FIELD.match(what):
        return _Mistake(f"{path}.{missing['name']}", _REQUIRED)
    if (problem := _FIELD_PROBLEM.match(what)) and problem["name"] in names:  # ValueError of a struct
        field_path = f"{path}.{problem['name']}{problem['below']}"
        return _Mistake(field_path, problem["what"] if problem["what"].startswith("must ") else what)
    found, value = _look_up(tree, path)
    if found and what.startswith("Invalid enum value") and (choices := _choices(type_, path)):
        return _Mistake(path, f"must be one of {', '.join(choices)}, got {value!r}")
    if isinstance(value, str) and what.startswith("Expected `array`"):
        return _Mistake(path, f"expected a list, for example [{value}], got {value!r}")
    wanted = next(filter(None, (expectation(node) for node in _nodes(type_, path))), "")
    if found and wanted and what.startswith("Expected ") and ", got" not in what:
        return _Mistake(path, f"{wanted}, got {shown(value)}")
    return _Mistake(path, _with_value(what, tree, path))


def _choices(type_: type, path: str) -> list[str]:
    """Return the values of an enumeration or a `Literal` at `path`."""
    nodes = [plain(node) for node in _nodes(type_, path)]
    values = [value for node in nodes if isinstance(node, msgspec.inspect.LiteralType) for value in node.values]
    values += [one.value for node in nodes if isinstance(node, msgspec.inspect.EnumType) for one in node.cls]
    return [str(value) for value in values]


def _without(tree: dict[str, Any], mistake: _Mistake) -> bool:
    """Remove the wrong key from the tree, or the mapping that lacks it. Return False if only the whole tree is left."""
    steps = _steps(mistake.path)
    while steps:
        found, holder = _look_up_steps(tree, steps[:-1])
        key = steps.pop()
        if found and isinstance(holder, dict) and key in holder:
            value = holder.pop(key)
            if mistake.meant and mistake.meant not in holder:
                holder[mistake.meant] = value
            return True
    return False


def _with_keys(type_: type, tree: dict[str, Any], path: str, text: str) -> str:
    """Return `path` with each `[...]`, which msgspec writes for some key of a mapping, replaced by the wrong key."""
    while "[...]" in path:
        before, _, after = path.partition("[...]")
        found, mapping = _look_up(tree, before)
        if not found or not isinstance(mapping, dict):
            break
        guilty = [key for key in mapping if _fails_alone(type_, tree, before, key, text)]
        if not guilty:
            break
        path = f"{before}.{guilty[0]}{after}"
    return path


def _fails_alone(type_: type, tree: dict[str, Any], path: str, key: str, text: str) -> bool:
    """Return whether the same error occurs with `key` as the only key of the mapping at `path`."""
    trial = msgspec.to_builtins(tree)
    _, mapping = _look_up(trial, path)
    for other in [k for k in mapping if k != key]:
        del mapping[other]
    try:
        msgspec.convert(trial, type_)
    except msgspec.ValidationError as err:
        return str(err) == text
    return False


def _close_to(name: str, names: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), "")


def _did_you_mean(meant: str, names: Sequence[str]) -> str:
    if meant:
        return f"; did you mean `{meant}`?"
    return f"; known keys: {', '.join(names)}" if names else ""


def _with_value(what: str, tree: object, path: str) -> str:
    found, value = _look_up(tree, path)
    if not found or isinstance(value, (dict, list)):
        return what
    return f"{what} (found {value!r})"


def _steps(path: str) -> list[str | int]:
    """Return `.a.b[2].c` as ["a", "b", 2, "c"]."""
    steps: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[]+)|\[([^\]]*)\]", path):
        steps.append(name or (int(index) if index.isdecimal() else index))
    return steps


def _look_up(tree: object, path: str) -> tuple[bool, Any]:
    return _look_up_steps(tree, _steps(path))


def _look_up_steps(tree: object, steps: Sequence[str | int]) -> tuple[bool, Any]:
    node: Any = tree
    for step in steps:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, node


def _field_names(type_: Any, path: str, tree: object) -> list[str]:
    """Return the keys that are known at `path`, for suggestions; empty if it is not a struct."""
    found, value = _look_up(tree, path)
    tags = {str(v) for v in value.values() if isinstance(v, str)} if found and isinstance(value, dict) else set()
    structs = [s for node in _nodes(type_, path) for s in _structs(node)]
    tagged = [s for s in structs if s.tag is not None and str(s.tag) in tags]
    return [field.encode_name for struct in (tagged or structs) for field in struct.fields]


def _nodes(type_: Any, path: str) -> list[msgspec.inspect.Type]:
    """Return the types that a value at `path` may have."""
    nodes = [type_info(type_)]
    for step in _steps(path):
        nodes = [below for node in nodes for below in _children(node, step)]
    return nodes


def _structs(node: msgspec.inspect.Type) -> list[msgspec.inspect.StructType]:
    if isinstance(node, msgspec.inspect.Metadata):
        return _structs(node.type)
    if isinstance(node, msgspec.inspect.UnionType):
        return [struct for option in node.types for struct in _structs(option)]
    return [node] if isinstance(node, msgspec.inspect.StructType) else []


def _children(node: msgspec.inspect.Type, step: str | int) -> list[msgspec.inspect.Type]:
    if isinstance(node, msgspec.inspect.Metadata):
        return _children(node.type, step)
    if isinstance(node, msgspec.inspect.UnionType):
        return [below for option in node.types for below in _children(option, step)]
    if isinstance(node, msgspec.inspect.StructType):
        return [field.type for field in node.fields if field.encode_name == step]
    if isinstance(node, msgspec.inspect.DictType):
        return [node.value_type]
    if isinstance(node, (msgspec.inspect.ListType, msgspec.inspect.VarTupleType)):
        return [node.item_type]
    if isinstance(node, msgspec.inspect.TupleType) and isinstance(step, int):
        return list(node.item_types[step : step + 1])
    return []


def _kind(value: object) -> str:
    return {"NoneType": "nothing", "str": "text", "list": "a list", "dict": "a mapping"}.get(
        type(value).__name__, f"a value of type {type(value).__name__}"
    )
