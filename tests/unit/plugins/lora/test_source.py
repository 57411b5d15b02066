"""Which names and which paths are taken."""

import pytest

from core import BadRequest, NotFound
from core.settings import SettingsError, convert_settings
from plugins.lora import Settings
from plugins.lora.names import check_name, name_on_workers, split_name
from plugins.lora.source import Paths, Source


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "allowed" / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def paths(tmp_path):
    return Paths([str(tmp_path / "allowed")], hub=False, seen=True)


async def test_a_folder_below_an_allowed_one_is_taken_with_what_it_holds(paths, adapter):
    (adapter / "STABLE").touch()
    source = await paths.source(str(adapter), is_3d=False)
    [(name, size, changed)] = source.files
    assert (source.path, name, size) == (str(adapter), "adapter_config.json", 2)
    assert changed == (adapter / "adapter_config.json").stat().st_mtime_ns


async def test_a_path_that_is_not_allowed_is_refused_by_the_setting_s_name(paths, tmp_path):
    (tmp_path / "allowed-too").mkdir()
    for path in ("/etc", str(tmp_path), str(tmp_path / "allowed-too"), "/"):
        with pytest.raises(BadRequest, match=r"allowed_paths") as refusal:
            await paths.source(path, is_3d=False)
        assert refusal.value.param == "lora_path"


async def test_no_path_is_taken_by_default(adapter):
    settings = Settings()
    with pytest.raises(BadRequest, match=r"allowed_paths \(none\)"):
        await Paths(settings.allowed_paths, hub=settings.hub, seen=settings.shared_files).source(str(adapter), is_3d=False)


async def test_a_link_does_not_lead_out(paths, adapter, tmp_path):
    (tmp_path / "secret").mkdir()
    (adapter.parent / "link").symlink_to(tmp_path / "secret")
    (adapter.parent / "inside").symlink_to(adapter)
    with pytest.raises(BadRequest, match="allowed_paths"):
        await paths.source(str(adapter.parent / "link"), is_3d=False)
    assert (await paths.source(str(adapter.parent / "inside"), is_3d=False)).path.endswith("inside")


async def test_an_allowed_folder_may_be_a_link(adapter, tmp_path):
    (tmp_path / "link").symlink_to(adapter.parent)
    paths = Paths([str(tmp_path / "link")], hub=False, seen=True)
    assert (await paths.source(str(tmp_path / "link" / "adapter"), is_3d=False)).files


@pytest.mark.parametrize("path", ["", " ", ".", "~/adapter", "adapter", "a/b/c", "a/../b", "/x\0y", "/x\ny", "file:///x", "../a"])
async def test_what_is_neither_an_absolute_path_nor_a_hub_id_is_refused(paths, path):
    with pytest.raises(BadRequest):
        await paths.source(path, is_3d=False)


async def test_steps_upwards_are_refused(paths, adapter):
    with pytest.raises(BadRequest, match=r"\.\."):
        await paths.source(f"{adapter}/../adapter", is_3d=False)


async def test_hub_ids_are_taken_where_the_settings_say_so(paths):
    with pytest.raises(BadRequest, match="hub = true"):
        await paths.source("org/math-lora", is_3d=False)
    assert await Paths([], hub=True, seen=True).source("org/math-lora", is_3d=True) == Source("org/math-lora", is_3d=True)


async def test_an_adapter_that_is_not_there_is_not_found(paths, adapter):
    (adapter / "adapter_config.json").unlink()
    for path in (adapter, adapter / "none", adapter.parent):
        with pytest.raises(NotFound):
            await paths.source(str(path), is_3d=False)
    (adapter / "adapter_config.json").mkdir()
    with pytest.raises(NotFound):
        await paths.source(str(adapter), is_3d=False)


async def test_a_file_instead_of_a_folder_is_not_found(paths, adapter):
    with pytest.raises(NotFound, match="Not a directory"):
        await paths.source(str(adapter / "adapter_config.json"), is_3d=False)


async def test_unseen_files_are_not_looked_for(tmp_path):
    paths = Paths([str(tmp_path)], hub=False, seen=False)
    assert await paths.source(str(tmp_path / "none"), is_3d=False) == Source(str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["", " ", "math@1", "tiny@12", "a\nb", "x" * 257])
def test_names_that_are_none_are_refused(name):
    with pytest.raises(BadRequest) as refusal:
        check_name(name)
    assert refusal.value.param == "lora_name"


@pytest.mark.parametrize("name", ["math", "org/math", "r8-a16.0", "a@b", "a@0", "a@01", "数学", "x" * 256])
def test_other_names_are_taken_and_their_versions_told_apart(name):
    check_name(name)
    for number in (0, 1, 27):
        assert split_name(name_on_workers(name, number)) == (name, number)


def test_a_relative_allowed_path_is_an_error_of_the_settings():
    with pytest.raises(SettingsError, match=r"plugins.lora.*'adapters' is not absolute"):
        convert_settings({"allowed_paths": ["adapters"]}, Settings, source="headrace.toml", path="plugins.lora")
