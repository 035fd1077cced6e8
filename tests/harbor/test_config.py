from dataclasses import replace

import pytest

from rsi.harbor.config import (
    Artifact,
    Author,
    CollectHook,
    EnvironmentConfig,
    Healthcheck,
    McpServer,
    NetworkPolicy,
    StepConfig,
    TaskConfig,
    TpuSpec,
    VerifierConfig,
    config_toml,
    config_toml_1_1,
    parse_config,
    resolve_env,
)
from rsi.harbor.records import FormatError

EVERYTHING = b"""
schema_version = "1.4"
source = "here"
multi_step_reward_strategy = "final"
artifacts = ["/app/out", { source = "/db/dump", destination = "db", exclude = ["*.tmp"], service = "db" }]

[task]
name = "org/name"
version = "2"
description = "d"
authors = [{ name = "A", email = "a@b" }, { name = "B" }]
keywords = ["k"]

[metadata]
difficulty = "hard"
nested = { list = [1, 2.5, true], when = 2026-01-01T00:00:00Z }

[agent]
timeout_sec = 900
user = 1000
network_mode = "allowlist"
allowed_hosts = ["Example.ORG.", "*.b.c", "10.0.0.0/8", "::1"]

[verifier]
timeout_sec = 30.5
env = { A = "${A:-b}" }
user = "root"
network_mode = "public"
environment_mode = "separate"

[verifier.environment]
docker_image = "v:1"
cpus = 0.5

[[verifier.collect]]
command = "dump"
service = "db"
timeout_sec = 5
user = 0

[environment]
build_timeout_sec = 60.0
docker_image = "a:1"
os = "Linux"
cpus = 2.0
memory_mb = 2048
storage_mb = 1000
gpus = 1
gpu_types = ["H100"]
tpu = { type = "v6e", topology = " 2x4 " }
network_mode = "no-network"
mcp_servers = [
    { name = "s", transport = "stdio", command = "x", args = ["y"] },
    { name = "h", transport = "http", url = "http://h", headers = { Authorization = "Bearer ${TOKEN}" } },
]
env = { E = "f" }
workdir = "/w"
skills_dir = "/s"
healthcheck = { command = "c", interval_sec = 1, timeout_sec = 2, start_period_sec = 3, start_interval_sec = 4, retries = 5 }

[solution]
env = { S = "t" }

[[steps]]
name = "one"
min_reward = 0.5
artifacts = ["a"]
agent = { timeout_sec = 10 }
healthcheck = { command = "h" }
verifier = { timeout_sec = 5, collect = [{ command = "x" }] }

[[steps]]
name = "two"
min_reward = { reward = 1, other = 0.5 }
"""  # noqa: E501


def test_every_key_is_read() -> None:
    parsed = parse_config(EVERYTHING)
    config = parsed.config
    assert parsed.notes == ()
    assert config.artifacts == ("/app/out", Artifact("/db/dump", "db", ("*.tmp",), "db"))
    assert config.task is not None and config.task.authors == (Author("A", "a@b"), Author("B"))
    assert config.agent.policy == NetworkPolicy("allowlist", ("example.org", "*.b.c", "10.0.0.0/8", "::1"))
    assert config.verifier.collect == (CollectHook("dump", "db", 5.0, 0),)
    assert config.verifier.environment == EnvironmentConfig(docker_image="v:1", cpus=0.5)
    environment = config.environment
    assert (environment.cpus, environment.os, environment.tpu) == (2, "linux", TpuSpec("v6e", "2x4"))
    assert environment.mcp_servers[1].transport == "streamable-http"
    assert environment.healthcheck == Healthcheck("c", 1.0, 2.0, 3.0, 4.0, 5)
    assert config.steps is not None and config.steps[1] == StepConfig("two", min_reward={"reward": 1.0, "other": 0.5})
    assert config.steps[0].verifier.collect == (CollectHook("x"),)
    assert (config.verifier_mode(), config.verifier_mode(config.steps[0])) == ("separate", "separate")


def test_what_is_written_reads_back_equal() -> None:
    for config in (parse_config(EVERYTHING).config, TaskConfig(), TaskConfig(steps=(StepConfig("a b ü"),))):
        assert parse_config(config_toml(config)).config == config


def test_what_is_written_always_says_limits_and_network() -> None:
    text = config_toml(TaskConfig()).decode()
    for said in (
        'schema_version = "1.4"',
        "timeout_sec = 600.0",
        "build_timeout_sec = 600.0",
        'network_mode = "public"',
    ):
        assert said in text
    assert "allow_internet" not in text


def test_old_spellings_become_the_present_ones_and_are_noted() -> None:
    old = b'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "0.5g"\nallow_internet = false\n'
    parsed = parse_config(old)
    environment = EnvironmentConfig(memory_mb=2048, storage_mb=512, network_mode="no-network")
    assert parsed.config == TaskConfig("1.0", environment=environment)
    assert len(parsed.notes) == 4 and all("retired" in note for note in parsed.notes)
    # It is a fallback: a network mode that is said wins.
    both = b'[environment]\nallow_internet = false\nnetwork_mode = "public"\n'
    assert parse_config(both).config.environment.network_mode == "public"
    steps = b"[[steps]]\nname = 'a'\n[steps.verifier.environment]\nallow_internet = false\n"
    read = parse_config(steps).config.steps
    assert read is not None and read[0].verifier.environment is not None
    assert read[0].verifier.environment.network_mode == "no-network"


def test_unknown_keys_are_told_with_their_place() -> None:
    parsed = parse_config(b"mystery = 1\n[environment]\ncpu = 2\n[[steps]]\nname = 'a'\nagent = { model = 'm' }\n")
    assert [note.split()[0] for note in parsed.notes] == ["mystery", "environment.cpu", "steps[0].agent.model"]


@pytest.mark.parametrize(
    "toml, complaint",
    [
        ("[task]\n", "task.name is missing"),
        ("[task]\nname = 'plain'", "task: 'plain' is not a name"),
        ("[task]\nname = 'a/b..c'", "not a name"),
        ("[task]\nname = 'a/b'\nversion = ''", "version is empty"),
        ("[agent]\nallowed_hosts = ['a']", "agent: allowed_hosts is for"),
        ("[environment]\nallowed_hosts = ['a']", "environment: allowed_hosts is for"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", 'environment_mode = "shared" has no'),
        ("[environment]\nos = 'plan9'", "environment.os is not one of linux, windows"),
        ("[environment]\ncpus = inf", "cpus is not a positive finite"),
        ("[environment]\ngpus = 1.5", "environment.gpus is not a whole number"),
        ("[environment]\nmemory = '1G'\nmemory_mb = 5", "memory and environment.memory_mb differ"),
        ("[environment]\nallow_internet = 'no'", "allow_internet is not true or false"),
        ("[environment.tpu]\ntype = 'v'\ntopology = '2'", "environment.tpu: topology '2'"),
        ("[[environment.mcp_servers]]\nname = 'a'", "mcp_servers\\[0\\]: transport sse needs a url"),
        ("[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'", "transport stdio needs a command"),
        ("[environment.healthcheck]\nretries = 1", "environment.healthcheck.command is missing"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = '-'", "not a service name"),
        ("artifacts = ['../x']", "has a '..' in it"),
        ("artifacts = [{ source = 'a', destination = '/b' }]", "not a relative path"),
        ("artifacts = [{ source = 'a', destination = 'manifest.json/' }]", "manifest.json is taken"),
        ("artifacts = [{ source = 'a', service = 'db' }]", "is not absolute"),
        ("artifacts = [3]", "artifacts\\[0\\] is not a string or a table"),
        ("[[steps]]\nname = 'a.'", "not a step name"),
        ("[[steps]]\nname = 'NUL.txt'", "not a step name"),
        ("[[steps]]\nname = 'a/b'", "not a step name"),
        ("[[steps]]\nname = 'é'\n[[steps]]\nname = 'É'", "are one directory"),
        (f"[[steps]]\nname = '{'é' * 128}'", "more than 255 bytes"),
        ("steps = 3", "steps is not a list"),
        ("multi_step_reward_strategy = 'max'", "one of mean, final"),
    ],
)
def test_a_rule_that_is_broken_is_told_with_its_place(toml: str, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        parse_config(toml.encode())


@pytest.mark.parametrize(
    "host", ["http://a", "a:80", "a/b", "10.0.0.1/8", "*", "a.*", "*.1.2.3.4", "", "-a", "[::1]", "::1%eth0", "a_b"]
)
def test_hosts_are_names_and_networks_without_ports_or_schemes(host: str) -> None:
    with pytest.raises(ValueError, match="allowed_hosts"):
        EnvironmentConfig(network_mode="allowlist", allowed_hosts=(host,))


@pytest.mark.parametrize(
    "name, value, is_fine",
    [
        ("Authorization", "Bearer ${TOKEN}", True),
        ("Authorization", "${A}:${B}", True),
        ("Authorization", "Bearer abc", False),
        ("Authorization", "Bearer ${TOKEN:-abc}", False),
        ("X-Api-Key", "abc", False),
        ("Cookie", "a=b", False),
        ("X-Plain", "abc", True),
        ("X-Plain", "${API_KEY:-abc}", False),
        ("X-Plain", "${broken", False),
        ("X-Plain", "a\nb", False),
        ("X Plain", "a", False),
        ("X-Tokens", "3", True),
    ],
)
def test_headers_hold_no_credentials(name: str, value: str, is_fine: bool) -> None:
    if is_fine:
        McpServer("m", url="u", headers={name: value})
    else:
        with pytest.raises(ValueError, match="header"):
            McpServer("m", url="u", headers={name: value})


def test_variables_come_from_the_mapping_that_is_given() -> None:
    env = {"A": "${X}", "B": "${Y:-d}", "C": "$X", "D": "a${X}", "E": "${Z:-}"}
    assert resolve_env(env, {"X": "1"}) == {"A": "1", "B": "d", "C": "$X", "D": "a${X}", "E": ""}
    with pytest.raises(FormatError, match="wants X for A"):
        resolve_env(env, {})


def test_the_export_for_old_readers_says_the_network_their_way() -> None:
    config = TaskConfig(environment=EnvironmentConfig(cpus=1, network_mode="no-network"))
    text = config_toml_1_1(config).decode()
    assert 'schema_version = "1.1"' in text and "allow_internet = false" in text and "network_mode" not in text
    assert parse_config(text.encode()).config == replace(config, schema_version="1.1")


@pytest.mark.parametrize(
    "config, named",
    [
        (TaskConfig(steps=(StepConfig("a"),)), "steps"),
        (TaskConfig(artifacts=("a",)), "artifacts"),
        (TaskConfig(verifier=VerifierConfig(environment_mode="separate")), "verifier.environment_mode"),
        (TaskConfig(verifier=VerifierConfig(collect=(CollectHook("x"),))), "verifier.collect"),
        (TaskConfig(environment=EnvironmentConfig(cpus=0.5)), "environment.cpus"),
        (TaskConfig(environment=EnvironmentConfig(network_mode="allowlist", allowed_hosts=("a",))), "allow"),
        (TaskConfig(environment=EnvironmentConfig(os="windows")), "environment.os"),
    ],
)
def test_what_old_readers_would_skip_is_not_exported(config: TaskConfig, named: str) -> None:
    with pytest.raises(FormatError, match=named):
        config_toml_1_1(config)
