"""What a client sent that can't be decoded is refused, with the field named."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import msgspec

from core.errors import BadRequest
from core.wording import in_words


@contextmanager
def refusing(path: str, type_: Any = None) -> Generator[None, None, None]:
    """What can't be decoded becomes a `BadRequest` that names the field.

    `path` is where the decoded JSON stands, empty for the body. With `type_`, what is decoded to, the error also says what is allowed.
    """
    try:
        yield
    except msgspec.ValidationError as error:
        field, message = in_words(error, path, type_)
        raise BadRequest(f"{field}: {message}" if field else message, param=field or None) from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest(f"{path or 'the body'}: it is nested too deeply", param=path or None) from error
