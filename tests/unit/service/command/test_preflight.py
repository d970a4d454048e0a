"""What `tessera serve` finds out before Ray starts."""

import socket

import pytest

from service.command.preflight import check_before_start, check_ray_answers
from service.config import parse_config
from service.deployments.listeners import bind_shared, check_free, host_and_port
from service.model_names import model_folder, model_name
from workers.errors import ConfigError, ModelLoadError


@pytest.fixture
def free_ports():
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return dict(zip(("http", "grpc", "metrics"), ports, strict=True))


def config(ports, **settings):
    return parse_config({**{name: {"port": port} for name, port in ports.items()}, **settings})


def test_the_default_model_on_free_ports_passes(free_ports):
    check_before_start(config(free_ports))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "neither builtin nor builtin-draft nor a folder"),
        ((), "no config.json"),
        (("config.json",), "no tokenizer.json"),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path, free_ports, files, message):
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text("{}")
    with pytest.raises(ModelLoadError, match=message):
        check_before_start(config(free_ports, engine={"model": str(folder)}))


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_port_that_is_taken_is_named(free_ports, name):
    with (
        socket.create_server(("127.0.0.1", free_ports[name])),
        pytest.raises(ConfigError, match=rf"{name}\.port: cannot listen on 127\.0\.0\.1"),
    ):
        check_before_start(config(free_ports))


def test_a_port_that_another_service_of_this_user_shares_is_taken_too():
    with bind_shared("127.0.0.1", 0) as other:
        other.listen()
        with pytest.raises(OSError, match="in use"):
            check_free(*other.getsockname())


def test_a_host_of_another_machine_is_named(free_ports):
    http = {"host": "192.0.2.1", "port": free_ports["http"]}
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        check_before_start(config(free_ports, http=http))


def test_a_missing_key_file_is_found_before_anything_starts(tmp_path, free_ports):
    auth = {"api_key_file": str(tmp_path / "absent")}
    with pytest.raises(ConfigError, match="api_key_file"):
        check_before_start(config(free_ports, auth=auth))


def test_clients_call_a_folder_by_its_own_name_whatever_the_way_to_it(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "link").symlink_to("tiny")
    monkeypatch.chdir(tmp_path / "tiny")
    names = [".", "../tiny/", "../link", str(tmp_path / "tiny")]
    assert {model_name(name) for name in names} == {"tiny"}
    assert model_name("builtin") == "builtin"
    assert (model_folder("builtin") / "config.json").is_file()


def test_ipv6_addresses_are_written_in_brackets():
    assert host_and_port("::1", 9000) == "[::1]:9000"
    assert host_and_port("127.0.0.1", 9000) == "127.0.0.1:9000"


def test_a_ray_that_is_not_there_is_found_at_once(free_ports):
    with pytest.raises(ConfigError, match="no Ray answers at 127"):
        check_ray_answers(f"127.0.0.1:{free_ports['http']}")
    with pytest.raises(ConfigError, match="no Ray answers"):
        check_ray_answers("127.0.0.1:99999")


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001"])
def test_other_forms_of_address_are_left_to_ray(address):
    check_ray_answers(address)


def test_a_ray_that_listens_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_ray_answers(f"127.0.0.1:{server.getsockname()[1]}")
