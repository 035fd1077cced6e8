"""The managed verifier, tests/verify.py of a task: runs the tests beside it and writes reward = passed / total.

It stands alone (standard library, and pytest where a test file needs it) because it runs inside the sandbox. A file of
plain `test_*` functions is run without pytest, whose start costs 0.2 s of every grading; anything else goes to the real
pytest, in process, with a plugin that counts. Only a passed test counts: skipped, xfailed and uncollectable ones are in
the total. Without any test there is no reward at all. The `check_*` functions are what snapshot tests call; paths are
relative to the working directory, which is the task's workdir.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import stat
import sys
import time

MAX_MESSAGE = 200
MAX_UNPACKED = 16 << 20
"""Bytes that an archive may hold to be compared by its members; a larger one is compared by its own bytes."""


# ---- checks ----------------------------------------------------------------------------------------------------------


def plain_text(content: bytes) -> bytes:
    """Text as it is compared: one trailing newline more or less is no difference."""
    return content.removesuffix(b"\n")


def sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def archive_members(name: str, content: bytes) -> list[list[str]] | None:
    """[path, kind, sha256 or target] of every file and link of a tar, sorted; one nameless member for a gzipped file.

    Directories of a tar are left out, so that `tar c d` and `tar c d/*` agree. None: not an archive by its name,
    broken, or too large.
    """
    import gzip
    import io
    import tarfile
    import zlib

    if not name.endswith((".tar", ".tar.gz", ".tgz", ".gz")):
        return None
    try:
        if not name.endswith(".tar"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(MAX_UNPACKED + 1)
        if len(content) > MAX_UNPACKED:
            return None
        if not name.endswith((".tar", ".tar.gz", ".tgz")):
            return [["", "file", sha256(content)]]
        members, size = [], 0
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            for member in archive:
                path = member.name.removeprefix("./")
                size += member.size  # of a sparse file what it unpacks to, which may be anything
                if size > MAX_UNPACKED:
                    return None
                if member.isreg():
                    reader = archive.extractfile(member)
                    members.append([path, "file", sha256(reader.read() if reader else b"")])
                elif not member.isdir():
                    members.append([path, "link", member.linkname])
        return sorted(members)
    except (OSError, EOFError, ValueError, LookupError, OverflowError, RecursionError, zlib.error, tarfile.TarError):
        return None


def _read(path: str) -> bytes:
    assert os.path.lexists(path), f"{path} is missing"
    assert os.path.isfile(path) and not os.path.islink(path), f"{path} is not a file"
    with open(path, "rb") as file:
        return file.read()


def check_text(path: str, expected: str) -> None:
    assert plain_text(_read(path)) == plain_text(expected.encode()), f"{path} differs"


def check_text_hash(path: str, expected: str) -> None:
    """For long texts: the hash is of the text without its trailing newline."""
    assert sha256(plain_text(_read(path))) == expected, f"{path} differs"


def check_hash(path: str, expected: str) -> None:
    assert sha256(_read(path)) == expected, f"{path} differs"


def check_archive(path: str, expected: list[list[str]]) -> None:
    assert archive_members(path, _read(path)) == expected, f"{path} differs"


def check_folder(path: str) -> None:
    assert os.path.lexists(path), f"{path} is missing"
    assert os.path.isdir(path) and not os.path.islink(path), f"{path} is not a directory"


def check_link(path: str, target: str) -> None:
    assert os.path.lexists(path), f"{path} is missing"
    assert os.path.islink(path), f"{path} is not a link"
    assert os.readlink(path) == target, f"{path} differs"


def check_gone(path: str) -> None:
    assert not os.path.lexists(path), f"{path} should be gone"


def check_mode(path: str, expected: int) -> None:
    assert os.path.lexists(path), f"{path} is missing"
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    assert mode == expected, f"{path} has mode {mode:04o}, not {expected:04o}"


# ---- running ---------------------------------------------------------------------------------------------------------


def is_plain(source: str) -> bool:
    """Whether calling the module's `test*` functions one by one is what pytest would do with it.

    Errs towards False. Fixtures, parameters, marks, classes, generators, set-up functions, tests bound in any other way
    than a top-level `def` are pytest's business, and so is a test that returns a value (an error since pytest 8.4).
    """
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Expr)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not all(isinstance(node, allowed) for node in tree.body):
        return False
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_special(node.name)]
    names = [node.name for node in tests]
    return (
        not _needs_pytest(tree)
        and all(_is_plain_test(node) for node in tests)
        and len(set(names)) == len(names)
        and not any(_is_special(name) for node in tree.body for name in _bound(node) if name not in names)
    )


def _is_special(name: str) -> bool:
    """Names that pytest acts on."""
    special = ("test", "Test", "setup", "teardown", "setUp", "tearDown", "pytest", "__test__")
    return name.startswith(special) or name == "*"


def _is_plain_test(node: ast.FunctionDef) -> bool:
    arguments = node.args
    if not node.name.startswith("test") or node.decorator_list:
        return False
    if arguments.args or arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        return False
    returns_or_yields = (ast.Yield, ast.YieldFrom, ast.Await)
    return not any(
        isinstance(child, returns_or_yields) or isinstance(child, ast.Return) and child.value is not None
        for child in ast.walk(node)
    )


def _needs_pytest(tree: ast.AST) -> bool:
    """Whether pytest or unittest are named anywhere in the file."""
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        if any(module.partition(".")[0] in ("pytest", "_pytest", "unittest") for module in modules):
            return True
        if isinstance(node, ast.Global | ast.Nonlocal) and any(_is_special(name) for name in node.names):
            return True
    return False


def _bound(node: ast.stmt) -> list[str]:
    """Names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)]


def result(name: str, status: str, error: BaseException | None, seconds: float) -> dict[str, object]:
    """One CTRF test. A failed assertion is told by its message, another error by its type and message."""
    message = ""
    if error is not None:
        first = (str(error).splitlines() or [""])[0]
        kind = type(error).__name__
        message = first if isinstance(error, AssertionError) and first else f"{kind}: {first}" if first else kind
    return {"name": name, "status": status, "duration": round(seconds * 1000), "message": message[:MAX_MESSAGE]}


def run_plain(path: str) -> list[dict[str, object]]:
    """Call the test functions of one plain file, in the order of their definition."""
    file = os.path.basename(path)
    started = time.monotonic()
    try:
        spec = importlib.util.spec_from_file_location(file.removesuffix(".py"), path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except Exception as error:
        return [result(file, "failed", error, time.monotonic() - started)]
    results = []
    for name, test in list(vars(module).items()):
        if not name.startswith("test"):
            continue
        started = time.monotonic()
        caught: BaseException | None = None
        try:
            test()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: pytest counts it as a failure of the one test
            caught = error
        status = "passed" if caught is None else "failed"
        results.append(result(f"{file}::{name}", status, caught, time.monotonic() - started))
    return results


class Counter:
    """A pytest plugin: one CTRF test for each test, and for each file that cannot be collected."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, object]] = {}
        self.errors: dict[str, BaseException] = {}

    def pytest_exception_interact(self, call, report):  # type: ignore[no-untyped-def]
        error = call.excinfo.value
        if type(error).__name__ == "CollectError" and error.__cause__ is not None:
            error = error.__cause__
        self.errors[report.nodeid] = error
        # pytest reports a test before it tells of the exception, and a file after.
        if report.nodeid in self.results:
            self._keep(report.nodeid, "failed", 0.0)

    def pytest_collectreport(self, report):  # type: ignore[no-untyped-def]
        if not report.passed:
            self._keep(report.nodeid, report.outcome, 0.0)

    def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
        before = self.results.get(report.nodeid)
        if report.when != "call" and report.passed or before is not None and before["status"] == "failed":
            return
        self._keep(report.nodeid, "other" if "wasxfail" in vars(report) else report.outcome, report.duration)

    def _keep(self, nodeid: str, status: str, seconds: float) -> None:
        error = self.errors.get(nodeid) if status == "failed" else None
        self.results[nodeid] = result(nodeid, status, error, seconds)


def run_pytest(tests_dir: str) -> list[dict[str, object]]:
    """Run pytest on a directory, out of reach of configuration and plugins that lie elsewhere."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    import pytest

    counter = Counter()
    options = ["-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "-c", os.devnull]
    pytest.main([*options, f"--rootdir={tests_dir}", f"--confcutdir={tests_dir}", tests_dir], plugins=[counter])
    return list(counter.results.values())


def run(tests_dir: str) -> list[dict[str, object]]:
    """The results of every test in a directory."""
    sys.path.insert(0, tests_dir)
    sys.modules["verify"] = sys.modules[__name__]  # so that `from verify import check_text` does not load it twice
    # Beside another file (conftest.py, a package, a second test file) pytest would do more than call functions.
    others = set(os.listdir(tests_dir)) - {"test.sh", "verify.py"}
    if others == {"test_outputs.py"}:
        path = os.path.join(tests_dir, "test_outputs.py")
        with open(path, encoding="utf-8", errors="replace") as file:
            plain = is_plain(file.read())
        if plain:
            return run_plain(path)
    return run_pytest(tests_dir)


def write(path: str, text: str) -> None:
    """Whole or not at all: a reader never sees half of a reward."""
    with open(f"{path}.tmp", "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    os.replace(f"{path}.tmp", path)


def main(tests_dir: str, logs_dir: str) -> None:
    logs_dir = os.path.abspath(logs_dir)
    os.makedirs(logs_dir, exist_ok=True)
    started = time.time()
    results = run(os.path.abspath(tests_dir))
    statuses = [str(test["status"]) for test in results]
    counts = {status: statuses.count(status) for status in ("passed", "failed", "skipped", "pending", "other")}
    times = {"start": round(started * 1000), "stop": round(time.time() * 1000)}
    summary = {"tests": len(results), **counts, **times}
    report = {"results": {"tool": {"name": "pytest"}, "summary": summary, "tests": results}}
    write(os.path.join(logs_dir, "ctrf.json"), json.dumps(report))
    if not results:
        print("no tests were found", flush=True)
        return
    # After all tests, so that there is a reward only for a run that came to its end; before anything is printed, which
    # fails where a test has closed the output.
    write(os.path.join(logs_dir, "reward.txt"), f"{counts['passed'] / len(results)!r}\n")
    for test in results:
        if test["status"] != "passed":
            print(ascii(f"{test['name']}: {test['message'] or test['status']}")[1:-1], flush=True)


if __name__ == "__main__":
    folders = sys.argv[1:] or [os.path.dirname(os.path.abspath(__file__)), "/logs/verifier"]
    main(*folders)
