"""Configuration: three sources, one precedence, no unknown key."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from service.config import EngineSettings, ServeConfig, load_config, parse_config
from workers.config import EngineConfig
from workers.errors import ConfigError


def load(tmp_path, text="", environment=None, overrides=None):
    file = tmp_path / "tessera.yaml"
    file.write_text(text)
    return load_config(file, environment or {}, overrides or {})


def test_engine_settings_mirror_engine_config():
    mirrored = {name: field.default for name, field in EngineSettings.model_fields.items()}
    assert mirrored.pop("revision") is None  # of the hub's models: engines get folders
    assert mirrored.pop("generation_config") == "auto"  # of requests, before engines get them
    assert mirrored.pop("lora") == {}  # names are of requests, too
    assert mirrored.pop("lora_folder") is None
    assert mirrored.pop("lora_folder_interval_s") == 5.0
    engine = {field.name: field.default for field in fields(EngineConfig)}
    # A service has streams that wait for their next tokens; an engine by itself has none.
    assert mirrored == engine | {"target_inter_token_ms": 55.0}
    expected = EngineConfig(target_inter_token_ms=55.0)
    assert EngineSettings().to_engine_config() == expected


@pytest.mark.parametrize("target_ms", [0, -1])
def test_a_target_must_lie_above_zero(target_ms):
    with pytest.raises(ConfigError, match="target_inter_token_ms"):
        parse_config({"engine": {"target_inter_token_ms": target_ms}})


def test_command_line_wins_over_environment_wins_over_file(tmp_path):
    text = "num_replicas: 2\nhttp: {port: 1, host: 10.0.0.1}\ngrpc: {port: 5}"
    config = load(
        tmp_path,
        text,
        {"TESSERA_HTTP__PORT": "2", "TESSERA_GRPC__PORT": "6", "PATH": "/bin"},
        {"http.port": 3},
    )
    assert (config.num_replicas, config.http.host) == (2, "10.0.0.1")
    assert (config.http.port, config.grpc.port) == (3, 6)


def test_defaults_bind_loopback_only():
    config = ServeConfig()
    assert {config.http.host, config.grpc.host, config.metrics.host} == {"127.0.0.1"}
    assert (config.http.port, config.grpc.port, config.metrics.port) == (8000, 9000, 9400)
    assert config.channel.transport == "unix"


@pytest.mark.parametrize(
    ("text", "environment", "overrides", "message"),
    [
        ("htpp: {}", {}, {}, "htpp"),
        ("http: {prot: 1}", {}, {}, "http.prot"),
        ("", {"TESSERA_HTTP__PROT": "1"}, {}, "http.prot"),
        ("", {"TESSERA_UNKNOWN": "1"}, {}, "unknown"),
        ("", {}, {"engine.modle": "x"}, "engine.modle"),
        ("engine: {tp_size: 0}", {}, {}, "tp_size"),
        ("- 1", {}, {}, "mapping"),
        ("http: [", {}, {}, "tessera.yaml"),
        ("http: 1", {"TESSERA_HTTP__PORT": "1"}, {}, "no section"),
        ("http: {port: 9000}", {}, {}, "must differ"),
        ("metrics: {peak_bytes_per_s: 1}", {}, {}, "both"),
        ("limits: {max_n: 0}", {}, {}, "limits.max_n"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_it(tmp_path, text, environment, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text, environment, overrides)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.yaml", {}, {})


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_config({"http": {"port": 0}, "grpc": {"port": "x"}})
    assert "http.port" in str(caught.value)
    assert "grpc.port" in str(caught.value)


def test_the_environment_can_unset_a_value(tmp_path):
    config = load(tmp_path, "engine: {page_size: 16}", {"TESSERA_ENGINE__PAGE_SIZE": "null"})
    assert config.engine.page_size is None


def test_configuration_is_frozen():
    with pytest.raises(ValidationError):
        ServeConfig().num_replicas = 2


def test_api_keys_come_from_environment_and_file_and_never_show(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# comment\n\n  third \n")
    config = load(
        tmp_path,
        f"auth: {{api_key_file: {file}}}",
        {"TESSERA_AUTH__API_KEYS": "first-key, second-key"},
    )
    assert [key.key for key in config.auth.load_keys()] == ["first-key", "second-key", "third"]
    assert "first-key" not in repr(config)


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n", encoding="utf-8-sig")
    config = parse_config({"auth": {"api_key_file": str(tmp_path / "keys")}})
    assert [key.key for key in config.auth.load_keys()] == ["first", "second"]


def test_a_key_file_that_is_empty_or_missing_is_an_error(tmp_path):
    (tmp_path / "keys").write_text("# nothing\n")
    for name in ("keys", "absent"):
        config = parse_config({"auth": {"api_key_file": str(tmp_path / name)}})
        with pytest.raises(ConfigError, match="api_key_file"):
            config.auth.load_keys()


@pytest.mark.parametrize("keys", ["", " ", "a,,b", ["a", " "]])
def test_an_empty_api_key_is_an_error_and_never_no_authentication(keys):
    with pytest.raises(ConfigError, match="API key is empty"):
        parse_config({"auth": {"api_keys": keys}})


def test_an_unknown_setting_is_said_to_be_one():
    with pytest.raises(ConfigError, match=r"engine\.pagesize: no such setting"):
        parse_config({"engine": {"pagesize": 16}})


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(tmp_path / "c.yaml", {}, {})
