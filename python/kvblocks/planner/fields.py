"""The fields of a model's config.json, looked up by name and checked.

Owns `Fields`. Invariant: a look-up gives a value of the type asked for, or raises a UserError with the file, the field
names that were looked for, what was found and what was expected; what came from a default is recorded.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvblocks.config import as_integer
from kvblocks.report import UserError

# Where a model of several modalities keeps its language model, and what that inherits from the outside.
_NESTED: Final = ("text_config", "language_config", "llm_config", "thinker_config")
_INHERITED: Final = ("model_type", "torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
# No size in a configuration is larger; it keeps products of a few sizes printable.
_LARGEST: Final = 1 << 40

_Default = TypeVar("_Default")


class Fields:
    """A model's configuration: `values` as in config.json, `source` as errors name it, `defaults` of its model type.

    A field that is null counts as absent. `assumed` collects the defaults that were used.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.values = dict(values)
        self.source = source
        self.defaults = dict(defaults or {})
        self.assumed: dict[str, Any] = {}

    def error(self, problem: str) -> UserError:
        """The error that names the file."""
        return UserError(f"{self.source}: {problem}")

    def find(self, *names: str) -> Any:
        """The value of the first of `names` that is there, else the model type's default, else None."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        for name in names:
            # An explicit null switches off what the model type would have by default.
            if self.defaults.get(name) is not None and not any(other in self.values for other in names):
                self.assumed[name] = self.defaults[name]
                return self.defaults[name]
        return None

    def optional_integer(self, *names: str, minimum: int = 1) -> int | None:
        """An integer >= `minimum`, or None where the field is absent or null."""
        value = self.find(*names)
        if value is None:
            return None
        number = as_integer(value)
        if number is None or number < minimum:
            raise self.error(f"{'/'.join(names)} is {_short(value)}: expected an integer >= {minimum}")
        if number > _LARGEST:
            raise self.error(f"{'/'.join(names)} is {_short(value)}: expected an integer <= 2^40")
        return number

    def integer(self, *names: str, minimum: int = 1) -> int:
        """An integer >= `minimum`; a UserError where the field is absent."""
        number = self.optional_integer(*names, minimum=minimum)
        if number is None:
            raise self.error(
                f"no field {' or '.join(names)}: expected an integer >= {minimum} (--set {names[0]}=N gives it)"
            )
        return number

    def choice(self, allowed: Iterable[str], *names: str) -> str | None:
        """One of the `allowed` names, or None where the field is absent."""
        value = self.find(*names)
        if value is None:
            return None
        if not isinstance(value, str) or value not in allowed:
            raise self.error(f"{names[0]} is {_short(value)}: expected one of {', '.join(allowed)}")
        return value

    def flag(self, name: str, fallback: _Default) -> bool | _Default:
        """A truth value, or `fallback` where the field is absent."""
        value = self.find(name)
        if value is None:
            return fallback
        if not isinstance(value, bool):
            raise self.error(f"{name} is {_short(value)}: expected true or false")
        return value

    def items(self, name: str, kind: type[_Default], length: int | None = None) -> list[_Default] | None:
        """A list of `kind`, of `length` items if given, or None where the field is absent."""
        value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or any(type(item) is not kind for item in value):
            raise self.error(f"{name} is {_short(value)}: expected a list of {kind.__name__}")
        if length is not None and len(value) != length:
            raise self.error(f"{name} has {len(value)} items: expected one for each of the {length} layers")
        return list(value)

    def nested(self, name: str) -> "Fields":
        """The fields of an object inside, as fields of their own; a UserError where there is none."""
        value = self.find(name)
        if not isinstance(value, Mapping):
            raise self.error(f"{name} is {_short(value)}: expected an object")
        return Fields(value, f"{self.source}: {name}")


def read_json(path: Path) -> Any:
    """The value in a JSON file; a UserError with the file, the line and what was expected."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start}: expected UTF-8 text") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: line {error.lineno}: expected JSON: {error.msg}") from error
    except ValueError as error:
        raise UserError(f"{path}: expected JSON with shorter numbers: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path}: expected JSON that is nested less deeply") from error


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config.json, or in that file of a folder."""
    file = path / "config.json" if path.is_dir() else path
    value = read_json(file)
    if not isinstance(value, dict):
        raise UserError(f"{file}: found {_short(value)}: expected an object with the fields of a model")
    return value


def language_model(values: Mapping[str, Any], source: str) -> Fields:
    """The fields of the language model, which a model of several modalities keeps in an object of its own."""
    while name := next((key for key in _NESTED if isinstance(values.get(key), Mapping)), None):
        inherited = {key: values[key] for key in _INHERITED if key in values}
        values, source = {**inherited, **values[name]}, f"{source}: {name}"
    return Fields(values, source)


def override(values: dict[str, Any], assignments: Iterable[str]) -> None:
    """Set fields from `name=value` strings, in the nested language model too; a value is JSON, else a string."""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise UserError(f"--set {assignment}: expected FIELD=VALUE")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        target = values
        while inner := next((key for key in _NESTED if isinstance(target.get(key), dict)), None):
            target = target[inner]
        target[name] = value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
