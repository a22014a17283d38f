"""Types that the blocks of a fleet file are made of."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeGuard

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

KIB, MIB = 1024, 1024 * 1024


class Block(BaseModel):
    """A mapping in the fleet file: frozen, with known keys and strict types only.

    The text below a key is its description, in the reference and in error messages.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())


def _given(path: object) -> object:
    if path == "":
        raise ValueError("is empty; leave it out or name a file or folder")
    return path


def says(what: str) -> WrapValidator:
    """Return a validator that replaces the errors of a union: pydantic has one for each member."""

    def validate(value: object, check: ValidatorFunctionWrapHandler) -> object:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(what) from None

    return WrapValidator(validate)


LAST_PORT = 65535
Port = Annotated[int, Field(ge=0, le=LAST_PORT)]
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]
Key = Annotated[str, Field(pattern=r"^[!-~]+$")]
FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_given)]
# The name of a worker or tenant appears in headers, metric labels, logs and names of files.
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Label = Annotated[str, Field(pattern=LABEL)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# A YAML list becomes a tuple, which strict mode refuses; the items stay strict.
LIST = Field(strict=False)


def is_label(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and re.match(LABEL, name) is not None


def blocks_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the blocks in an annotation such as `Block | None` or `tuple[Block, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from blocks_in(argument)
