"""The `harbor` backend and the provider that Harbor gets from us, each run for real in .venv-harbor."""

import sys
from pathlib import Path

import pytest

from rsi.sandbox import HarborConfig, SandboxConfig, SandboxError, build_backend
from tests.harbor_venv import Case, check, names_in, run_there

HERE = Path(__file__).parent
CONFORMANCE, PROVIDER = HERE / "test_conformance.py", HERE / "in_harbor_venv.py"
DIFFERS = {
    "test_a_gigabyte_is_counted_exactly_and_not_kept": "output lies on the sandbox's disk, which has less",
    "test_a_snapshot_forks_files_and_not_processes": "Harbor's environments have none; the backend says so",
}
"""What the harbor backend does not promise; everything else of the suite it does."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    left_out = [f"--deselect={CONFORMANCE.relative_to(HERE.parent.parent)}::{name}[harbor]" for name in DIFFERS]
    report = tmp_path_factory.mktemp("harbor") / "report.xml"
    return run_there([CONFORMANCE, PROVIDER], report, left_out, {"RSI_TEST_BACKENDS": "harbor"})


@pytest.mark.harbor
@pytest.mark.parametrize("name", [name for name in names_in(CONFORMANCE) if name not in DIFFERS])
def test_a_provider_behind_our_protocol_keeps_the_promises_of_every_backend(cases: list[Case], name: str) -> None:
    check(cases, name)


@pytest.mark.harbor
@pytest.mark.parametrize("name", names_in(PROVIDER))
def test_in_harbors_own_environment(cases: list[Case], name: str) -> None:
    check(cases, name)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harbor", None)
    with pytest.raises(SandboxError, match="scripts/harbor_venv.sh.*rsi\\[harbor\\]"):
        build_backend(SandboxConfig(backend="harbor", harbor=HarborConfig("docker")))
