"""The audit log: one JSON line a call, and that the control plane writes it."""

import asyncio
import io
import json

from service.deployments.control_plane import RegistryActor
from service.security.audit import AuditLog, describe_this_process


def test_a_call_is_one_json_line():
    stream = io.StringIO()
    log = AuditLog(stream, clock=lambda: 1_700_000_000.5)
    log.record("begin_drain", 'eve"\n@host')
    log.record("end_drain", "bob")
    lines = stream.getvalue().splitlines()
    assert json.loads(lines[0]) == {
        "log": "tessera.audit",
        "time": "2023-11-14T22:13:20.500+00:00",
        "action": "begin_drain",
        "by": 'eve"\n@host',
    }
    assert [json.loads(line)["by"] for line in lines] == ['eve"\n@host', "bob"]


def test_the_registry_records_who_drains(capsys):
    async def drain_and_back():
        actor = RegistryActor()
        await actor.begin_drain("alice")
        await actor.end_drain("bob")

    asyncio.run(drain_and_back())
    entries = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(entry["action"], entry["by"]) for entry in entries] == [
        ("begin_drain", "alice"),
        ("end_drain", "bob"),
    ]


def test_a_process_is_described_by_user_and_number():
    assert "@" in describe_this_process()
    assert "pid " in describe_this_process()
