"""Tells what a machine without CPU to spare answers from what is our fault.

A prompt whose tokenizer got next to no CPU for its whole time limit ends with a 503 that says so.
One whose process was lost has the same code and another message, and is a fault.
"""

import grpc
import httpx

MESSAGE = "this machine is too busy"
_CODE = "tokenizer_failed"
ANSWER = f"503 {_CODE} of a busy machine"


def is_of_a_busy_machine(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and is_busy(*error_of(answer))


def is_busy(code: str, message: str) -> bool:
    return code == _CODE and MESSAGE in message


def is_busy_call(error: grpc.RpcError) -> bool:
    code = dict(error.trailing_metadata() or ()).get("tessera-error-code", "")
    return error.code() is grpc.StatusCode.UNAVAILABLE and is_busy(code, error.details())


def error_of(answer: httpx.Response) -> tuple[str, str]:
    """Code and message of an error in any protocol's shape."""
    error = (answer.json() or {}).get("error", {})
    return str(error.get("code")), str(error.get("message"))
