"""The transport `filesystem` as the core uses it: which paths it takes, what it waits for, and what the workers are asked."""

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import trio

from core import BadRequest
from core.fleet.progress import Update, UpdateRequest
from plugins.weights_filesystem.plugin import Settings, WeightsFilesystem
from tests.unit.core.engines import AdministeredFleet, administered, serve_http

HEADER = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)


def transport(*allowed: Path, **settings: Any):
    [one] = WeightsFilesystem(Settings(allowed_paths=[str(path) for path in allowed], **settings)).weight_transports()
    return one


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("model.safetensors", "STABLE"):
        (folder / name).write_bytes(SAFETENSORS if name.endswith(".safetensors") else b"")
    return folder


async def updated(fleet: AdministeredFleet, path: Path | str, **options: Any) -> Update:
    request = UpdateRequest("7", "filesystem", {"path": str(path), **options})
    update = fleet.administration.updates.ask(request, fleet.administration.workers(), by="me")
    await update.done.wait()
    return update


async def failure(path: Path | str, *allowed: Path, **settings: Any) -> str:
    """Why an update failed before anybody was paused."""
    async with administered(transports=[transport(*allowed, **settings)]) as fleet:
        update = await updated(fleet, path)
        assert [engine.asked for engine in fleet.engines] == [[], []]
        return str(update.failure)


async def test_every_worker_is_asked_to_load_the_checkpoint(tmp_path: Path):
    async with administered(2, 1, transports=[transport(tmp_path)]) as fleet:
        asked = [serve_http(worker, {"results": [None] * worker.world_size}) for worker in fleet.workers]
        path = write(tmp_path / "step_7")
        update = await updated(fleet, path)
        assert update.failure is None
        assert asked == [[{"method": "reload_weights", "kwargs": {"weights_path": str(path)}}]] * 2
        assert [engine.version for engine in fleet.engines] == ["7", "7"]


@pytest.mark.parametrize("by_request", [True, False])
async def test_prime_rls_extension_gets_the_path_as_it_wants_it(tmp_path: Path, by_request: bool):
    method = "update_weights_from_path"
    settings, options = ({}, {"method": method}) if by_request else ({"method": method}, {})
    async with administered(1, transports=[transport(tmp_path, **settings)]) as fleet:
        [asked] = [serve_http(worker, {"results": [None]}) for worker in fleet.workers]
        path = write(tmp_path / "step_7")
        assert (await updated(fleet, path, **options)).failure is None
        assert asked == [{"method": method, "args": [str(path)]}]


@pytest.mark.parametrize("marker", ["STABLE", ".finished"])
async def test_calls_go_on_until_the_checkpoint_is_complete(tmp_path: Path, marker: str):
    async with administered(1, transports=[transport(tmp_path)]) as fleet, trio.open_nursery() as nursery:
        asked = serve_http(fleet.workers[0], {"results": [None]})
        done = trio.Event()

        async def update() -> None:
            assert (await updated(fleet, tmp_path / "step_7")).failure is None
            done.set()

        nursery.start_soon(update)
        while not fleet.administration.updates.latest():
            await trio.lowlevel.checkpoint()
        write(tmp_path / "step_7", "model.safetensors")
        assert (fleet.states, asked) == (["ready"], [])
        write(tmp_path / "step_7", marker)
        with trio.fail_after(10):
            await done.wait()


async def test_a_checkpoint_that_is_never_complete_is_given_up(tmp_path: Path):
    write(tmp_path / "step_7", "model.safetensors")
    reason = await failure(tmp_path / "step_7", tmp_path, marker_timeout=0.1)
    assert reason == f"path: none of STABLE, .finished came into '{tmp_path}/step_7' within 0.1 s: it isn't complete"


async def test_markers_of_ones_own_and_none_at_all(tmp_path: Path):
    for markers in (["DONE"], []):
        async with administered(1, transports=[transport(tmp_path, markers=markers)]) as fleet:
            serve_http(fleet.workers[0], {"results": [None]})
            assert (await updated(fleet, write(tmp_path / str(len(markers)), "model.safetensors", *markers))).failure is None


@pytest.mark.parametrize("name", ["outside", "link"])
async def test_a_path_that_leads_out_of_what_is_allowed_is_refused(tmp_path: Path, name: str):
    write(tmp_path / "outside")
    (tmp_path / "allowed").mkdir()
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
    path = tmp_path / "outside" if name == "outside" else tmp_path / "allowed" / "link"
    reason = await failure(path, tmp_path / "allowed")
    assert reason == f"path: '{path}' is not under [plugins.weights-filesystem] allowed_paths ({tmp_path}/allowed)"


async def test_a_link_among_what_is_allowed_is_fine(tmp_path: Path):
    write(tmp_path / "real" / "step_7")
    (tmp_path / "outputs").symlink_to(tmp_path / "real")
    async with administered(1, transports=[transport(tmp_path / "outputs")]) as fleet:
        asked = serve_http(fleet.workers[0], {"results": [None]})
        assert (await updated(fleet, tmp_path / "outputs" / "step_7")).failure is None
        assert asked[0]["kwargs"] == {"weights_path": f"{tmp_path}/outputs/step_7"}  # as the trainer wrote it


async def test_without_settings_no_path_is_taken(tmp_path: Path):
    assert (await failure(write(tmp_path / "step_7"))).endswith("is not under [plugins.weights-filesystem] allowed_paths (none)")


async def test_files_that_headrace_does_not_see_are_the_workers_affair():
    async with administered(1, transports=[transport(Path("/nowhere"), shared_files=False)]) as fleet:
        asked = serve_http(fleet.workers[0], {"results": [None]})
        assert (await updated(fleet, "/nowhere/step_7")).failure is None
        assert asked[0]["kwargs"] == {"weights_path": "/nowhere/step_7"}


async def test_a_folder_without_weights_is_refused(tmp_path: Path):
    write(tmp_path / "step_7", "STABLE", "model.bin")
    assert await failure(tmp_path / "step_7", tmp_path) == f"path: there are no *.safetensors in '{tmp_path}/step_7'"


async def test_a_file_is_no_folder(tmp_path: Path):
    write(tmp_path, "model.safetensors")
    reason = await failure(tmp_path / "model.safetensors", tmp_path, markers=[])
    assert reason == f"path: '{tmp_path}/model.safetensors' can't be read: Not a directory"


async def test_a_part_that_the_index_names_has_to_be_there(tmp_path: Path):
    path = write(tmp_path / "step_7", "STABLE", "model-1.safetensors")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert await failure(path, tmp_path) == f"path: '{path}' lacks model-2.safetensors, which model.safetensors.index.json names"
    index.write_text("{")
    assert "model.safetensors.index.json in" in await failure(path, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", SAFETENSORS[:-1], SAFETENSORS + b"x", SAFETENSORS[:20], b"\xff" * 100, b"\x02" + bytes(7) + b"{["]
)
async def test_a_file_that_is_not_whole_is_refused_before_anybody_is_paused(tmp_path: Path, content: bytes):
    path = write(tmp_path / "step_7")
    (path / "model.safetensors").write_bytes(content)
    assert await failure(path, tmp_path) == f"path: model.safetensors in '{path}' is not a whole safetensors file"


async def test_a_worker_that_cannot_load_it_is_quarantined_and_the_others_go_on(tmp_path: Path):
    async with administered(transports=[transport(tmp_path)]) as fleet:
        error = {"error": {"message": "no space", "type": "server_error", "param": None, "code": 500}}
        serve_http(fleet.workers[0], lambda _: httpx.Response(500, json=error))
        serve_http(fleet.workers[1], {"results": [None]})
        update = await updated(fleet, write(tmp_path / "step_7"))
        assert str(update.failure) == "update failed on w0: no space. Quarantined; the other workers go on"
        assert fleet.states == ["quarantined", "ready"]


async def test_a_method_that_no_engine_has_changes_nothing(tmp_path: Path):
    async with administered(transports=[transport(tmp_path)]) as fleet:
        reason = "Worker failed with error ''CPUWorker' object has no attribute 'update_weights_from_path''"
        for worker in fleet.workers:
            serve_http(worker, lambda _: httpx.Response(500, json={"error": {"message": reason, "code": 500}}))
        update = await updated(fleet, write(tmp_path / "step_7"), method="update_weights_from_path")
        assert update.failure
        assert (update.failure.status, str(update.failure)) == (
            404,
            f"update failed on w0: {reason}; w1: {reason}. Nothing has changed",
        )
        assert fleet.states == ["ready", "ready"]
        assert [engine.paused for engine in fleet.engines] == [False, False]


async def test_what_a_load_that_broke_off_has_left_is_cleared_away_before_the_next_one(tmp_path: Path):
    async with administered(1, transports=[transport(tmp_path)]) as fleet:
        error = {"error": {"message": "no space", "type": "server_error", "param": None, "code": 500}}
        asked = serve_http(
            fleet.workers[0],
            lambda number: httpx.Response(500, json=error) if number == 1 else httpx.Response(200, json={"results": [None]}),
        )
        for _ in range(3):
            await updated(fleet, write(tmp_path / "step_7"))
        load, clear = ({"method": "reload_weights", "kwargs": kwargs} for kwargs in (asked[0]["kwargs"], {"weights_iterator": []}))
        assert asked == [load, clear, load, load]
        assert fleet.states == ["ready"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "path"),
        ({"path": 7}, "path"),
        ({"path": "weights/7"}, "path"),
        ({"path": "/weights/../etc"}, "path"),
        ({"path": "/weights/\n7"}, "path"),
        ({"path": ""}, "path"),
        ({"path": "/weights", "method": "load"}, "method"),
        ({"path": "/weights", "weight_dir": "/weights"}, "weight_dir"),
    ],
)
def test_what_is_wrong_is_refused_by_name(options: dict[str, Any], param: str | None):
    with pytest.raises(BadRequest) as refused:
        transport().parse(options)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pathh": "/w"}, "pathh: there is no such key here; did you mean 'path'?"),
        ({"path": "/w", "method": "nope"}, "method: 'nope' is none; there are 'reload_weights', 'update_weights_from_path'"),
    ],
)
def test_what_is_allowed_is_told(options: dict[str, Any], message: str):
    with pytest.raises(BadRequest) as refused:
        transport().parse(options)
    assert refused.value.message == message


def test_a_path_that_no_file_system_takes_is_refused_and_not_echoed():
    with pytest.raises(BadRequest, match=r"^path: '[/ä]{60}'… has 4097 bytes; 4096 are allowed$") as refused:
        transport().parse({"path": "/" + "ä" * 2048})
    assert refused.value.param == "path"
    assert transport().parse({"path": "/a" * 2048})


def test_a_worker_that_comes_late_can_be_brought_up_to_date():
    assert transport().repeatable


@pytest.mark.parametrize("settings", [{"allowed_paths": ["outputs"]}, {"markers": ["a/b"]}, {"markers": [""]}, {"marker_timeout": 0}])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, Settings)
