import importlib.util
import os
import sys
import venv
from pathlib import Path

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh import Mesh
from rollmesh.mesh.supervisor import Supervisor, hosts_in_one_process, needs_processes
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.interpreter import check_interpreter, interpreter_of, is_this
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import ConfigError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="the cases are those of an environment without vLLM"
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment without packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def of(python: str | Path = "", engine: str = "vllm") -> InferenceConfig:
    return InferenceConfig(python=str(python), engine=Extension(engine))


def test_an_engine_of_this_environment_runs_with_this_interpreter(tmp_path: Path) -> None:
    assert interpreter_of(of(engine="torch"), tmp_path) == sys.executable
    assert is_this(sys.executable)


def test_a_relative_interpreter_is_in_the_folder_of_the_configuration(tmp_path: Path, bare: Path) -> None:
    (tmp_path / "env").symlink_to(bare.parent.parent)
    found = interpreter_of(of("env/bin/python"), tmp_path)
    assert found == str(tmp_path / "env/bin/python")
    assert not is_this(found)


@pytest.mark.parametrize("path", ["nowhere/python", ".", "file"])
def test_a_path_that_cannot_be_executed_is_a_config_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"`inference.python`: .* is not an executable file"):
        interpreter_of(of(path, "torch"), tmp_path)


def test_vllm_is_found_in_the_working_directory_and_named_if_it_is_not(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for config in (of(), of(sys.executable)):
        with pytest.raises(ConfigError, match=r"make setup-vllm.*inference\.python"):
            interpreter_of(config, tmp_path)
    Path(".venv-vllm").symlink_to(bare.parent.parent)
    assert interpreter_of(of(), tmp_path / "elsewhere") == str(tmp_path / ".venv-vllm/bin/python")


def test_an_interpreter_without_rollmesh_or_vllm_or_that_is_not_one_is_a_config_error(bare: Path) -> None:
    with pytest.raises(ConfigError, match="has no rollmesh"):
        check_interpreter(str(bare), of())
    with pytest.raises(ConfigError, match=f"{sys.executable} has none; run `make setup-vllm`"):
        check_interpreter(sys.executable, of())
    check_interpreter(sys.executable, of(engine="torch"))
    with pytest.raises(ConfigError, match="is not a Python interpreter that works"):
        check_interpreter("/bin/ls", of())


def test_an_interpreter_with_a_release_that_does_not_work_with_this_one_is_a_config_error(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho missing:\necho protocol:9.0\n")
    other.chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"`inference.python`: rollmesh of .* has protocol 9\.0, and the coordinator has"
    ):
        check_interpreter(str(other), of(engine="torch"))


def mesh(python: Path) -> MeshConfig:
    return config_from_dict(MeshConfig, {"inference": {"python": str(python), "engine": "fake"}})


async def test_a_mesh_in_one_process_refuses_another_interpreter(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(ConfigError, match=r"`inference.python`: the engine fake runs with .*separate process"):
        async with Mesh(mesh(bare), run_dir=tmp_path, services=["coordinator", "inference-0"]):
            pass


def test_a_mesh_of_processes_ends_with_the_cause(tmp_path: Path, bare: Path) -> None:
    with pytest.raises(ConfigError, match="has no rollmesh"):
        Supervisor(mesh(bare), run_dir=tmp_path)


def test_services_share_a_process_except_inference_and_the_learner(tmp_path: Path, bare: Path) -> None:
    config = mesh(bare)
    assert needs_processes(config, tmp_path)
    assert not needs_processes(mesh(Path(sys.executable)), tmp_path)
    hosts = hosts_in_one_process(config, tmp_path)
    assert hosts is not None
    assert list(hosts) == ["services", "inference-0", "learner"]
    assert {"nats", "coordinator", "rollout-0"} < set(hosts["services"])
    assert os.path.isabs(interpreter_of(config.inference, tmp_path))


@pytest.mark.parametrize(("max_staleness", "expected"), [(0, None), (1, ["services", "learner"])])
def test_the_learner_shares_the_process_unless_it_overlaps_with_generation(
    tmp_path: Path, max_staleness: int, expected: list[str] | None
) -> None:
    config = config_from_dict(MeshConfig, {"run": {"max_staleness": max_staleness}, "inference": {"engine": "fake"}})
    hosts = hosts_in_one_process(config, tmp_path)
    assert (hosts and list(hosts)) == expected
    if hosts is not None:
        assert "inference-0" in hosts["services"]
        assert hosts["learner"] == ("learner",)
