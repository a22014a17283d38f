"""How the admin API says no: always in one shape."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from proxy.errors import ConfigError, Problem, ProxyError

INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
HANDLED = (ProxyError, RequestValidationError, HTTPException, Exception)


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    code: str
    problems: list[Problem] = []  # where several things are wrong at once


class ErrorAnswer(BaseModel):
    """The one shape that errors have."""

    error: ErrorBody


def error_response(
    status: int, code: str, message: str, problems: Collection[Problem] = ()
) -> JSONResponse:
    """Answer with an error."""
    body = ErrorBody(message=message, code=code, problems=list(problems))
    return JSONResponse(ErrorAnswer(error=body).model_dump(), status_code=status)


class AdminError(ProxyError):
    """A request that can't be done."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, problems: Collection[Problem] = ()
    ) -> None:
        self.status = status
        self.code = code
        self.problems = problems
        super().__init__(message)


async def answer(_: Request, error: Exception) -> JSONResponse:
    """Answer a request that went wrong."""
    match error:
        case AdminError():
            return error_response(error.status, error.code, str(error), error.problems)
        case ConfigError():
            message = f"{error.source} can't be used; the configuration is unchanged"
            return error_response(INVALID, "invalid_config", message, error.problems)
        case ProxyError():
            return error_response(HTTPStatus.CONFLICT, "conflict", str(error))
        case RequestValidationError():
            # What was given is not repeated: it may be a key.
            problems = [
                Problem(".".join(map(str, problem["loc"][1:])), problem["msg"])
                for problem in error.errors()
            ]
            message = "the request is not as described in /docs"
            return error_response(INVALID, "invalid", message, problems)
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            response = error_response(error.status_code, code, str(error.detail))
            response.headers.update(error.headers or {})
            return response
        case _:  # our own mistake; the server logs it
            message = f"{type(error).__name__}: see the router's log"
            return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", message)
