"""What a client is told when a request cannot be answered, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal. `param` names what is wrong in the request, `code` is one of OpenAI's words where there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Status 400: `param` is what the client has to change."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)
