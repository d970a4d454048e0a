"""Sleep and wake over HTTP: vLLM's names, operators only, one model of several."""

import dataclasses

import httpx
import pytest
import pytest_asyncio

from service.api.http import build_http_app
from service.api.services import AdminServices
from service.errors import ApiError, ApiErrorCode
from service.security.admin import AdminGate

pytestmark = pytest.mark.asyncio
OPERATOR = {"authorization": "Bearer operator"}


class Control:
    """A SleepControl that remembers what it was told."""

    model = "tiny"

    def __init__(self):
        self.calls = []
        self.is_sleeping = False

    async def sleep(self, level, *, aborts):
        if level == 2:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "cannot sleep: a reason")
        self.calls.append((level, aborts))
        self.is_sleeping = True

    async def wake_up(self):
        self.calls.append("wake")
        self.is_sleeping = False


@pytest.fixture
def controls():
    return {"tiny": Control()}


@pytest.fixture
def audited():
    return []


@pytest_asyncio.fixture
async def client(services, controls, audited):
    async def audit(action, by):
        audited.append((action, by))

    admin = AdminServices(AdminGate(["operator"]), None, controls, audit)
    app = build_http_app(dataclasses.replace(services, admin=admin))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        yield client


async def test_operators_alone_put_it_to_sleep_and_wake_it(client, controls, audited):
    control = controls["tiny"]
    for reply in (
        await client.post("/sleep"),
        await client.post("/wake_up", headers={"authorization": "Bearer guess"}),
        await client.get("/is_sleeping"),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert control.calls == []
    assert (await client.post("/sleep", headers=OPERATOR)).status_code == 200
    state = await client.get("/is_sleeping", headers=OPERATOR)
    assert state.json() == {"is_sleeping": True}
    assert (await client.post("/wake_up", headers=OPERATOR)).status_code == 200
    waiting = await client.post("/sleep?level=1&mode=wait&model=tiny", headers=OPERATOR)
    assert waiting.status_code == 200
    assert control.calls == [(1, True), "wake", (1, False)]
    actions = ["sleep level 1 mode abort tiny", "wake_up tiny", "sleep level 1 mode wait tiny"]
    assert [action for action, by in audited if by] == actions


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("level=0", 400, "level"),
        ("level=1&mode=keep", 400, "mode"),
        ("tags=weights", 400, "tags"),
        ("model=other", 404, "model"),
        ("level=2", 400, None),
    ],
)
async def test_what_it_does_not_do_is_refused_by_name(client, controls, query, status, param):
    reply = await client.post(f"/sleep?{query}", headers=OPERATOR)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)
    assert controls["tiny"].calls == []


async def test_of_several_models_one_is_named(client, controls):
    controls["other"] = Control()
    reply = await client.post("/sleep", headers=OPERATOR)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    assert (await client.post("/sleep?model=other", headers=OPERATOR)).status_code == 200
    assert (controls["tiny"].calls, controls["other"].calls) == ([], [(1, True)])
