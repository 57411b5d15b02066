"""What can't be decoded, in words: where it stands, what was wrong, and what is allowed."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from msgspec import inspect

from core.errors import BadRequest
from core.settings import nearest

#: msgspec says "Expected `int`, got `str` - at `$.seed`", or "at `key` in `$.logit_bias`".
_WHERE: Final = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NO_CHOICE: Final = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_BLANK: Final = r"matching regex '\\S'"
_STEP: Final = re.compile(r"\.(\w+)|\[")


@contextmanager
def refusing(path: str, type_: Any = None) -> Generator[None, None, None]:
    """What can't be decoded becomes a `BadRequest` that names the field.

    `path` is where the decoded JSON stands, empty for the body. With `type_`, what is decoded to, the error also says what is allowed.
    """
    try:
        yield
    except msgspec.ValidationError as error:
        field, message = _in_words(error, path, type_)
        raise BadRequest(f"{field}: {message}" if field else message, param=field or None) from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest(f"{path or 'the body'}: it is nested too deeply", param=path or None) from error


def _in_words(error: msgspec.ValidationError, path: str, type_: Any) -> tuple[str, str]:
    """The field's path and what is wrong with it."""
    message, where = str(error), ""
    if found := _WHERE.fullmatch(message):
        message, in_key, where = found.groups()
        message = f"a key: {message}" if in_key else message
    if found := _MISSING.fullmatch(message):
        message, where = "this field is required", f"{where}.{found[1]}"
    elif (found := _UNKNOWN.fullmatch(message)) and (known := _keys(type_, where)):
        message, where = f"there is no such key here; {nearest(found[1], known)}", f"{where}.{found[1]}"
    elif (found := _NO_CHOICE.fullmatch(message)) and (allowed := _choices(type_, where)):
        message = f"{found[1]} is none; there are {', '.join(allowed)}"
    elif _BLANK in message:
        message = "it must not be empty"
    return f"{path}{where}".lstrip("."), message


def _keys(type_: Any, where: str) -> list[str]:
    return [field.encode_name for one in _types_at(type_, where) if isinstance(one, inspect.StructType) for field in one.fields]


def _choices(type_: Any, where: str) -> list[str]:
    return [repr(value) for one in _types_at(type_, where) if isinstance(one, inspect.LiteralType) for value in one.values]


def _types_at(type_: Any, where: str) -> list[inspect.Type]:
    """What may stand at a path; nothing where that can't be told."""
    types = _alternatives(inspect.type_info(type_)) if type_ is not None else []
    for step in _STEP.finditer(where):
        name, found = step[1], list[inspect.Type]()
        for one in types:
            match one:
                case inspect.StructType() if name:
                    found += [found for field in one.fields if field.encode_name == name for found in _alternatives(field.type)]
                case inspect.ListType() if not name:
                    found += _alternatives(one.item_type)
                case inspect.DictType() if not name:
                    found += _alternatives(one.value_type)
                case _:
                    pass
        types = found
    return types


def _alternatives(type_: inspect.Type) -> list[inspect.Type]:
    return list(type_.types) if isinstance(type_, inspect.UnionType) else [type_]
