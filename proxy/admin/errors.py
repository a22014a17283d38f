"""Error responses of the admin API, which all have the same format."""

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
    """An error."""

    message: str
    code: str
    problems: list[Problem] = []  # one item for each invalid field


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorBody


def error_response(
    status: int, code: str, message: str, problems: Collection[Problem] = ()
) -> JSONResponse:
    body = ErrorBody(message=message, code=code, problems=list(problems))
    return JSONResponse(ErrorAnswer(error=body).model_dump(), status_code=status)


class AdminError(ProxyError):
    def __init__(
        self, status: HTTPStatus, code: str, message: str, problems: Collection[Problem] = ()
    ) -> None:
        self.status = status
        self.code = code
        self.problems = problems
        super().__init__(message)


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    match error:
        case AdminError():
            return error_response(error.status, error.code, str(error), error.problems)
        case ConfigError():
            message = f"{error.source} is invalid; the configuration is unchanged"
            return error_response(INVALID, "invalid_config", message, error.problems)
        case ProxyError():
            return error_response(HTTPStatus.CONFLICT, "conflict", str(error))
        case RequestValidationError():
            # The given values are left out: they may contain a key.
            problems = [
                Problem(".".join(map(str, problem["loc"][1:])), problem["msg"])
                for problem in error.errors()
            ]
            message = "the request does not match its description in /docs"
            if "json" not in request.headers.get("content-type", "json"):
                message = "the body is not JSON; send JSON with Content-Type: application/json"
            return error_response(INVALID, "invalid", message, problems)
        case HTTPException():
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            response = error_response(error.status_code, code, str(error.detail))
            response.headers.update(error.headers or {})
            return response
        case _:  # a bug in the router; the server logs it
            message = f"{type(error).__name__}: see the router's log"
            return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", message)
