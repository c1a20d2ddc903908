"""The bodies and the errors of the OpenAI API."""

import json
from reprlib import repr as shortened
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

Fields = dict[str, Any]
MAX_BODY_BYTES = 16 << 20  # the event loop reads no other request while it parses a body
MAX_STOP_STRINGS = 4  # as of OpenAI; the engine searches for them after each token
# Options of the API that the engine does not have, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "repetition_penalty": (None, 1, 1.0),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (None, 0, 0.0)),
    **dict.fromkeys(("functions", "tools"), (None, [])),
}
TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class APIError(HTTPException):
    """An answer with an error object of the OpenAI API; `param` is the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(status, message)
        self.param = param


async def read_fields(http: HTTPRequest) -> Fields:
    """The JSON object in a body; ValueError for anything else, APIError if it is too large."""
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise APIError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    fields = json.loads(body)
    if not isinstance(fields, dict):
        raise ValueError(f"the body must be a JSON object, got {shortened(fields)}")
    return fields


def field_of(fields: Fields, name: str, default: Any, *types: type) -> Any:
    """The value of a field; the default if it is absent or null."""
    if (value := fields.get(name)) is None:
        return default
    if type(value) not in types and not (float in types and type(value) is int):
        expected = " or ".join(TYPES[kind] for kind in types)
        raise APIError(400, f"{name} must be {expected}, got {shortened(value)}", name)
    if type(value) in (int, float) and not abs(value) < 2**64:  # NaN is not, either
        raise APIError(400, f"{name} is out of range: {shortened(value)}", name)
    return value


def check_neutral(fields: Fields) -> None:
    """APIError for an option that the engine does not have."""
    for name, values in NEUTRAL.items():
        value = fields.get(name)
        if not any(type(value) is type(same) and value == same for same in values):
            allowed = f"only {json.dumps(values[1])} is supported"
            raise APIError(400, f"{name} is {shortened(value)}; {allowed}", name)


def stop_strings(fields: Fields) -> list[str]:
    stop = field_of(fields, "stop", [], str, list)
    stop = [stop] if isinstance(stop, str) and stop else [*stop]
    if len(stop) > MAX_STOP_STRINGS:
        raise APIError(400, f"stop must be at most {MAX_STOP_STRINGS} strings", "stop")
    if not all(isinstance(text, str) and text for text in stop):
        raise APIError(400, "stop must be strings that are not empty", "stop")
    return stop


async def error_response(request: HTTPRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # a traceback follows
        error = APIError(500, "internal error")
    return JSONResponse(error_object(error), error.status_code, error.headers)


def error_object(error: HTTPException) -> Fields:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    param = getattr(error, "param", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": None}}
