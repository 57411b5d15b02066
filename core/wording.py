"""What can't be decoded, in words: where it stands, what was wrong, and what is allowed."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

#: No setting, plugin or field has a longer name.
_LONGEST_NAME: Final = 64
#: msgspec says "Expected `int`, got `str` - at `$.seed`", or "at `key` in `$.logit_bias`".
_WHERE: Final = re.compile(r"(.*) - at (`key` in )?`\$(.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_NO_CHOICE: Final = re.compile(r"Invalid enum value '?(.*?)'?", re.DOTALL)
_BLANK: Final = r"matching regex '\\S'"
_STEP: Final = re.compile(r"\.(\w+)|\[")


def nearest(word: str, known: Sequence[str]) -> str:
    """The hint for a name that isn't known: the nearest one that is, or all of them."""
    if not known:
        return "there are none"
    return f"did you mean {close!r}?" if (close := _close(word, known)) else f"known are {', '.join(sorted(known))}"


def in_words(error: msgspec.ValidationError, path: str, type_: Any) -> tuple[str, str]:
    """The field's path, which begins with `path`, and what is wrong with it; and what is allowed, where `type_` was decoded to."""
    message, in_key, where = str(error), None, ""
    if found := _WHERE.fullmatch(message):
        message, in_key, where = found.groups()
    if found := _MISSING.fullmatch(message):
        message, where = "this field is required", f"{where}.{found[1]}"
    elif (found := _UNKNOWN.fullmatch(message)) and (known := _keys(type_, where)):
        message, where = f"there is no such key here; {nearest(found[1], known)}", f"{where}.{found[1]}"
    elif (found := _NO_CHOICE.fullmatch(message)) and (allowed := _choices(type_, where, of_keys=bool(in_key))):
        close = _close(found[1], allowed)
        message = f"{found[1]!r} is none; there are {', '.join(map(repr, allowed))}{f'; did you mean {close!r}?' if close else ''}"
    elif _BLANK in message:
        message = "it must not be empty"
    return f"{path}{where}".lstrip("."), f"a key: {message}" if in_key else message


def _close(word: str, known: Sequence[str]) -> str | None:
    # The comparison takes time in proportion to the word, which may be a client's, of megabytes.
    return next(iter(difflib.get_close_matches(word[:_LONGEST_NAME], known, n=1)), None)


def _keys(type_: Any, where: str) -> list[str]:
    return [field.encode_name for one in _types_at(type_, where) if isinstance(one, inspect.StructType) for field in one.fields]


def _choices(type_: Any, where: str, *, of_keys: bool) -> list[str]:
    types = _types_at(type_, where)
    if of_keys:
        types = [key for one in types if isinstance(one, inspect.DictType) for key in _alternatives(one.key_type)]
    return [value for one in types if isinstance(one, inspect.LiteralType) for value in one.values if isinstance(value, str)]


def _types_at(type_: Any, where: str) -> list[inspect.Type]:
    """What may stand at a path; nothing where that can't be told."""
    types = _alternatives(inspect.type_info(type_)) if type_ is not None else []
    for step in _STEP.finditer(where):
        name, found = step[1], list[inspect.Type]()
        for one in types:
            match one:
                case inspect.StructType() if name:
                    found += [found for field in one.fields if field.encode_name == name for found in _alternatives(field.type)]
                case inspect.ListType() | inspect.VarTupleType() if not name:
                    found += _alternatives(one.item_type)
                case inspect.DictType() if not name:
                    found += _alternatives(one.value_type)
                case _:
                    pass
        types = found
    return types


def _alternatives(type_: inspect.Type) -> list[inspect.Type]:
    return list(type_.types) if isinstance(type_, inspect.UnionType) else [type_]
