"""Fetching from a hub on loopback: what is fetched, in which order, and what each failure says."""

import json

import huggingface_hub.constants
import pytest

from service.hub.ids import HubModel
from service.hub.store import HubStore
from tests.fakes.hub_server import TOKEN, FakeRepo, running_hub
from workers.errors import ModelLoadError

ID = "owner/Tiny-1B"
WEIGHTS = bytes(range(256)) * 4096
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "modeling_tiny.py": b"import os",
    "consolidated.safetensors": WEIGHTS,
    "onnx/config.json": b"{}",
    "README.md": b"# Tiny",
}
INDEX = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
SHARDS = {"model-1.safetensors": WEIGHTS, "model-2.safetensors": WEIGHTS[::-1]}


@pytest.fixture(autouse=True)
def _online_with_small_chunks_and_no_pauses(monkeypatch):
    """The library keeps whole chunks only, of 10 MB, and sleeps between attempts."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 64 << 10)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)


def store(hub, tmp_path, **options):
    return HubStore(endpoint=hub.url, cache_dir=tmp_path / "cache", **options)


def without(*names, **more):
    return {**{name: data for name, data in FILES.items() if name not in names}, **more}


def test_only_what_an_engine_reads_is_fetched_and_weights_come_last(tmp_path):
    with running_hub((ID, FakeRepo(FILES))) as hub:
        seen = []
        folder = store(hub, tmp_path).fetch(
            HubModel(ID), lambda folder: seen.extend(path.name for path in folder.iterdir())
        )
    assert hub.fetched() == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert sorted(seen) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_how_a_model_is_pooled_comes_with_it(tmp_path):
    files = without(**{"1_Pooling/config.json": b"pooling", "2_Normalize/config.json": b"{}"})
    with running_hub((ID, FakeRepo(files))) as hub:
        folder = store(hub, tmp_path).fetch(HubModel(ID))
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"pooling"
    assert not (folder / "2_Normalize").exists()


def test_every_shard_of_an_index_is_fetched(tmp_path):
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    repo = FakeRepo(without("model.safetensors", **index, **SHARDS))
    with running_hub((ID, repo)) as hub:
        folder = store(hub, tmp_path).fetch(HubModel(ID))
    assert {name: (folder / name).read_bytes() for name in SHARDS} == SHARDS
    assert "consolidated.safetensors" not in hub.fetched()


def test_a_model_that_is_refused_costs_no_byte_of_weights(tmp_path):
    def refuse(folder):
        raise ModelLoadError(f"{json.loads((folder / 'config.json').read_text())['architectures']}")

    with (
        running_hub((ID, FakeRepo(FILES))) as hub,
        pytest.raises(ModelLoadError, match="LlamaForCausalLM"),
    ):
        store(hub, tmp_path).fetch(HubModel(ID), refuse)
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("repo", "model", "message"),
    [
        (FakeRepo(FILES, is_gated=True), HubModel(ID), "is gated: accept its terms .* HF_TOKEN"),
        (FakeRepo(FILES), HubModel("owner/other"), "the hub has no such model"),
        (FakeRepo(FILES), HubModel(ID, "v9"), "has no revision 'v9'"),
        (FakeRepo(without("config.json")), HubModel(ID), "has no config.json"),
        (FakeRepo(without("tokenizer.json")), HubModel(ID), "has no tokenizer.json: .* fast form"),
        (
            FakeRepo(without("model.safetensors")),
            HubModel(ID),
            r"no safetensors .* \(\.bin, \.pt\)",
        ),
        (
            FakeRepo(
                without(
                    "model.safetensors",
                    **{"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.py"}}'},
                )
            ),
            HubModel(ID),
            "not a safetensors file beside it",
        ),
    ],
)
def test_what_cannot_be_served_is_said_before_weights_are_read(tmp_path, repo, model, message):
    with (
        running_hub((ID, repo)) as hub,
        pytest.raises(ModelLoadError, match=message),
    ):
        store(hub, tmp_path).fetch(model)
    assert not any(name.endswith((".safetensors", ".bin", ".py")) for name in hub.fetched())


def test_a_token_opens_what_is_gated(tmp_path):
    with running_hub((ID, FakeRepo(FILES, is_gated=True))) as hub:
        folder = store(hub, tmp_path, token=TOKEN).fetch(HubModel(ID))
    assert (folder / "model.safetensors").is_file()


def test_a_revision_is_what_was_asked_for(tmp_path):
    with running_hub((ID, FakeRepo(FILES, revisions=("main", "v2")))) as hub:
        folder = store(hub, tmp_path).fetch(HubModel(ID, "v2"))
        assert folder.name == hub.repos[ID].commit


def test_a_fetch_that_broke_off_goes_on_where_it_was(tmp_path):
    repo = FakeRepo(FILES, cuts={"model.safetensors": [300_000]})
    with running_hub((ID, repo)) as hub:
        folder = store(hub, tmp_path).fetch(HubModel(ID))
        ranges = [r for m, p, r in hub.requests if m == "GET" and p.endswith("/model.safetensors")]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert ranges[0] is None
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 300_000


def test_a_later_fetch_takes_only_the_files_that_an_earlier_one_did_not_finish(tmp_path):
    index = {"model.safetensors.index.json": json.dumps(INDEX).encode()}
    repo = FakeRepo(without("model.safetensors", **index, **SHARDS))
    repo.cuts["model-2.safetensors"] = [0] * 6
    with running_hub((ID, repo)) as hub:
        with pytest.raises(ModelLoadError, match="could not be fetched"):
            store(hub, tmp_path).fetch(HubModel(ID))
        hub.requests.clear()
        told = []
        folder = store(hub, tmp_path).fetch(HubModel(ID), on_bytes=lambda *now: told.append(now))
    assert {name: (folder / name).read_bytes() for name in SHARDS} == SHARDS
    assert hub.fetched() == {"model-2.safetensors"}
    assert told[-1] == (len(WEIGHTS), len(WEIGHTS))


def test_a_warm_cache_serves_without_the_hub_and_offline(tmp_path, monkeypatch, caplog):
    with running_hub((ID, FakeRepo(FILES))) as hub:
        warm = store(hub, tmp_path)
        folder = warm.fetch(HubModel(ID))
    assert warm.fetch(HubModel(ID)) == folder
    assert "the cache must do" in caplog.text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert warm.fetch(HubModel(ID)) == folder


def test_a_cold_or_half_cache_without_the_hub_is_an_error(tmp_path, monkeypatch):
    with running_hub((ID, FakeRepo(FILES))) as hub:
        half = store(hub, tmp_path)
        half.fetch_text(HubModel(ID))
    with pytest.raises(ModelLoadError, match="not wholly in the hub's cache"):
        half.fetch(HubModel(ID))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set: fetch it once"):
        half.fetch(HubModel("owner/other"))


def test_progress_counts_the_bytes_of_the_weights_to_the_end(tmp_path):
    told = []
    with running_hub((ID, FakeRepo(FILES))) as hub:
        store(hub, tmp_path).fetch(HubModel(ID), on_bytes=lambda *told_now: told.append(told_now))
    assert told[-1] == (len(WEIGHTS), len(WEIGHTS))
    assert {total for _, total in told} == {len(WEIGHTS)}


def test_a_folder_outside_the_cache_gets_real_files(tmp_path):
    with running_hub((ID, FakeRepo(FILES))) as hub:
        begun = []
        commit = store(hub, tmp_path).fetch_to(HubModel(ID), tmp_path / "out", begun.append)
        assert commit == hub.repos[ID].commit
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.read_bytes() == WEIGHTS
    assert not weights.is_symlink()
