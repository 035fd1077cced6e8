"""One event loop and one real backend for the folder's tests; coroutine tests run on that loop."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rsi.sandbox import Backend, HarborConfig, Image, ImageSpec, Sandbox, SandboxConfig, build_backend
from rsi.sandbox.namespace import NamespaceBackend, NamespaceSandbox

from .require import require

NAMESPACES = "rsi.sandbox.harbor:NamespaceEnvironment"
SECRET = "sk-not-for-the-sandbox"
RUNNER = pytest.StashKey[asyncio.Runner]()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.config.stash[RUNNER].run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        request.config.stash[RUNNER] = runner
        yield runner


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def backend(runner: asyncio.Runner, cache: str) -> Iterator[NamespaceBackend]:
    os.environ["RSI_TEST_API_KEY"] = SECRET  # before the launcher starts: nothing of it may come through
    # A plain user's run is given a base: building it again would be most of its time.
    backend = NamespaceBackend(SandboxConfig(cache_dir=cache, rootfs=os.environ.get("RSI_TEST_ROOTFS", "")))
    yield backend
    runner.run(backend.close())
    del os.environ["RSI_TEST_API_KEY"]


@pytest.fixture(scope="session")
def image(runner: asyncio.Runner, backend: NamespaceBackend) -> Image:
    return runner.run(backend.build(ImageSpec()))


@pytest.fixture
def box(runner: asyncio.Runner, backend: NamespaceBackend, image: Image) -> Iterator[NamespaceSandbox]:
    sandbox = runner.run(backend.create(image))
    yield sandbox
    runner.run(sandbox.close())


# ---- what every backend promises and withstands

NAMES = os.environ.get("RSI_TEST_BACKENDS", "namespace,namespace without cgroups,docker").split(",")
"""test_harbor.py runs the suite in Harbor's own virtual environment, for the `harbor` backend alone."""
BACKENDS = [pytest.param(name, marks=pytest.mark.docker) if name == "docker" else name for name in NAMES]


@pytest.fixture(scope="session", params=BACKENDS)
def any_backend(request: pytest.FixtureRequest, runner: asyncio.Runner, backend: NamespaceBackend) -> Iterator[Backend]:
    """Each backend in turn. A line in `open_backend` and one in BACKENDS add another."""
    opened = open_backend(request.param, backend)
    yield opened
    if opened is not backend:
        runner.run(opened.close())


def open_backend(name: str, namespace: NamespaceBackend) -> Backend:
    match name:
        case "namespace":
            return namespace
        case "namespace without cgroups":
            if namespace.driver.kind == "none":
                pytest.skip("there are no cgroups here, so this is the backend before")
            return NamespaceBackend(replace(namespace.config, cgroups=False))
        case "docker":
            if os.geteuid() != 0:
                pytest.skip("the engine is root's, and who runs the client makes no difference inside")
            require("docker")
            unbounded = ("disk", "inodes")  # on the file systems that engines usually have; probe says so
            return build_backend(replace(namespace.config, backend="docker", accept_missing=unbounded))
        case "harbor":
            provider = HarborConfig(NAMESPACES, {"cache_dir": namespace.config.cache_dir})
            unnamed = ("pids", "disk", "inodes")  # Harbor has no such limits; probe says so
            return build_backend(replace(namespace.config, backend="harbor", accept_missing=unnamed, harbor=provider))
    raise AssertionError(f"no backend is called {name!r}")


@pytest.fixture(scope="session")
def any_image(runner: asyncio.Runner, any_backend: Backend) -> Image:
    return runner.run(any_backend.build(ImageSpec()))


@pytest.fixture
def any_box(runner: asyncio.Runner, any_backend: Backend, any_image: Image) -> Iterator[Sandbox]:
    sandbox = runner.run(any_backend.create(any_image))
    yield sandbox
    runner.run(sandbox.close())


@pytest.fixture
def has_cgroups(backend: NamespaceBackend) -> bool:
    return backend.driver.kind != "none"
