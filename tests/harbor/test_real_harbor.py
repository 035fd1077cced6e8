"""Harbor itself, in .venv-harbor: what we write it reads, what it writes we read, and both give the same rewards."""

from pathlib import Path

import pytest

from tests.harbor_venv import Case, check, names_in, run_there

INSIDE = Path(__file__).with_name("in_harbor_venv.py")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return run_there([INSIDE], tmp_path_factory.mktemp("harbor") / "report.xml")


@pytest.mark.harbor
@pytest.mark.parametrize("name", names_in(INSIDE))
def test_against_harbor(cases: list[Case], name: str) -> None:
    check(cases, name)
