"""Makes the calls of grpc_messages against a running service and judges how they end."""

import grpc
import hypothesis
from hypothesis import given, settings

from service.proto import inference_pb2 as pb
from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import is_busy_call
from tests.integration.fuzz.grpc_messages import Call, calls
from tests.integration.fuzz.tally import Tally

SOURCE = "grpc"
_SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
STREAMS = ("GenerateStream",)
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
# Refusals of gRPC's own, before a message reaches the service: its size and that of metadata.
_WITHOUT_CODE = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
_DOCUMENTED = ("draining", "unavailable")
BATCH = settings(
    max_examples=50,
    deadline=None,
    database=None,
    phases=(hypothesis.Phase.generate,),
    suppress_health_check=list(hypothesis.HealthCheck),
)


class GrpcFuzzer:
    """One connection, one call at a time."""

    def __init__(self, address: str, tally: Tally) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._tally = tally

    def run_batch(self) -> None:
        @BATCH
        @given(call=calls())
        def send(call):
            self._judge(call, self._send(call))

        send()

    def close(self) -> None:
        self._channel.close()

    def _send(self, call: Call) -> grpc.RpcError | None:
        """What the call ended with; None: an answer, or the client left."""
        open_call = (
            self._channel.unary_stream if call.method in STREAMS else self._channel.unary_unary
        )
        rpc = open_call(f"/{_SERVICE}/{call.method}")
        try:
            if call.method in STREAMS:
                _read(rpc(call.payload, timeout=call.timeout_s, metadata=call.metadata), call)
            elif call.num_read == 0:
                rpc.future(call.payload, timeout=call.timeout_s, metadata=call.metadata).cancel()
            else:
                rpc(call.payload, timeout=call.timeout_s, metadata=call.metadata)
        except grpc.RpcError as error:
            return error
        return None

    def _judge(self, call: Call, error: grpc.RpcError | None) -> None:
        if error is None:
            self._tally.count(SOURCE, "OK" if call.num_read is None else "left")
            return
        status = error.code()
        code = dict(error.trailing_metadata() or ()).get("tessera-error-code", "")
        if is_busy_call(error):
            self._tally.count(SOURCE, BUSY)
            return
        is_own_deadline = status is grpc.StatusCode.DEADLINE_EXCEEDED and call.timeout_s < 1
        self._tally.count(SOURCE, f"{status.name} {code}".strip())
        is_bad = status in _BUGS or code == "internal"
        is_bad |= status is grpc.StatusCode.DEADLINE_EXCEEDED and not is_own_deadline
        is_bad |= status is grpc.StatusCode.UNAVAILABLE and code not in _DOCUMENTED
        is_bad |= not code and not is_own_deadline and status not in _WITHOUT_CODE
        if is_bad:
            payload = call.payload[:200].hex()
            self._tally.fail(SOURCE, f"{status.name} {code} {error.details()}: {call.method} "
                             f"{payload} ({len(call.payload)} bytes) {call.metadata}")  # fmt: skip


def _read(answers, call: Call) -> None:
    """Leave after so many messages as the call says."""
    if call.num_read == 0:
        answers.cancel()
        return
    for number, _ in enumerate(answers, 1):
        if number == call.num_read:
            answers.cancel()
            return
